"""Bodies onto responses: small ones at once, large ones as a leased stream."""

from __future__ import annotations

from collections.abc import Sequence

from falcon.asgi import Response

from frontend.engine.answer import Answer
from frontend.http.sending import LeasedBody, Part
from frontend.services import Services


def send_parts(resp: Response, parts: Sequence[Part], reply: Answer, services: Services) -> None:
    """Send `parts`. A body up to one slice is joined and the lease ends; a larger one is streamed under it."""
    arena = services.settings.arena
    if sum(len(part) for part in parts) <= arena.slice_bytes:
        resp.data = b"".join(parts)
        reply.check()
        reply.release()
        return
    body = LeasedBody(parts, reply, arena, services.copies)
    resp.content_length = body.nbytes
    resp.stream = body  # type: ignore[assignment]
