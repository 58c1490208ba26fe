"""Bodies onto responses: small ones at once, large ones as a leased stream."""

from __future__ import annotations

from collections.abc import Sequence

from falcon.asgi import Response

from frontend.engine.answer import Answer
from frontend.http.sending import LeasedBody, Part
from frontend.services import Services


def send_parts(resp: Response, parts: Sequence[Part], answer: Answer, services: Services) -> None:
    """Send `parts` of an answer whose context is open. A body up to one slice is joined here.

    A larger body reads the answer's memory while it leaves, so the answer is handed over to it.
    """
    arena = services.settings.arena
    if sum(len(part) for part in parts) <= arena.slice_bytes:
        resp.data = b"".join(parts)
        return
    body = LeasedBody(parts, answer.hand_over(), arena, services.copies)
    resp.content_length = body.nbytes
    resp.stream = body  # type: ignore[assignment]
