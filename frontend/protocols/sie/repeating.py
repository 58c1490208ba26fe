"""Answers a request whose whole answer is kept, and keeps the answers of requests that come again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import orjson
from falcon.asgi import Request

from frontend.engine.whole_answers import LONGEST_BODY, WholeAnswer
from frontend.protocols.sie.arrays import packed
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from frontend.services import Services

_encoder = msgspec.msgpack.Encoder()


def key_of(req: Request, scope: RequestScope, services: Services, name: str, body: bytes) -> bytes:
    """Stands for all that a request says; empty for a long body. `name` is the model in the path."""
    if len(body) > LONGEST_BODY:
        return b""
    header = req.get_header
    said = (
        "" if services.settings.cache.shared else scope.grant.caller,
        scope.operation,
        name,
        header("Content-Type"),
        header("Accept"),
        header("X-Penstock-item-errors"),
        header("X-Penstock-warnings"),
        body,
    )
    return hashlib.blake2b(_encoder.encode(said), digest_size=32).digest()


def whole_of(
    name: str,
    model: str,
    items: int,
    headers: Sequence[tuple[str, str]],
    parts: Sequence[Buffer],
    block: dict[str, float | None] | None,
    *,
    json: bool,
) -> WholeAnswer:
    """An answer from the parts of its body.

    A `block` takes the place of the last part but one, which has times. The first time in the block is the total, 0.0.
    """
    if block is None:
        return WholeAnswer(name, model, items, headers, b"".join(parts))
    write = orjson.dumps if json else packed
    head, _, tail = write(block).partition(write(0.0))
    return WholeAnswer(name, model, items, headers, b"".join([*parts[:-2], head]), tail + parts[-1], write)


def body_of(answer: WholeAnswer, total_ms: float) -> bytes:
    """The body with the time of this request."""
    if answer.total is None:
        return answer.before
    return answer.before + answer.total(total_ms) + answer.after
