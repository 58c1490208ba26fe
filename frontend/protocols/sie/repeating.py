"""Answers a request whose whole answer is kept, and keeps the answers of requests that come again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import orjson
from falcon.asgi import Request

from frontend.engine.scope import RequestScope
from frontend.engine.whole_answers import LONGEST_BODY, WholeAnswer
from frontend.http.sending import Buffer
from frontend.protocols.sie.arrays import packed
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
    name: str, model: str, items: int, parts: Sequence[Buffer], *, timed: bool, json: bool
) -> WholeAnswer:
    """An answer from the parts of its body; of a `timed` one the last part but one has the times."""
    before, after = (parts[:-2], parts[-1:]) if timed else (parts, ())
    return WholeAnswer(name, model, items, b"".join(before), b"".join(after), timed, json)


def body_of(answer: WholeAnswer, times: dict[str, float | None]) -> bytes:
    """The body with the times of this request."""
    if not answer.timed:
        return answer.before
    return answer.before + (orjson.dumps(times) if answer.json else packed(times)) + answer.after
