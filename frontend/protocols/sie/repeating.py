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

_HEADERS = ("Accept", "X-Penstock-item-errors", "X-Penstock-warnings")
"""Headers that shape an answer, beside the type of the body."""
_encoder = msgspec.msgpack.Encoder()


def key_of(req: Request, scope: RequestScope, services: Services, name: str, body: bytes) -> bytes:
    """Stands for all that a request says; empty where nothing is looked up. `name` is the model in the path."""
    if services.engine.answers is None or len(body) > LONGEST_BODY:
        return b""
    owner = "" if services.settings.cache.shared else scope.grant.caller
    asked = (owner, scope.operation, name, req.content_type, *(req.get_header(one) for one in _HEADERS))
    return hashlib.blake2b(_encoder.encode((asked, body)), digest_size=32).digest()


def whole_of(name: str, model: str, items: int, parts: Sequence[Buffer], *, timed: bool) -> WholeAnswer:
    """An answer from the parts of its body; of a `timed` one the last part but one has the times."""
    before, after = (parts[:-2], parts[-1:]) if timed else (parts, ())
    return WholeAnswer(name, model, items, b"".join(before), b"".join(after), timed)


def body_of(answer: WholeAnswer, times: dict[str, float | None], json: bool) -> bytes:
    """The body with the times of this request."""
    if not answer.timed:
        return answer.before
    return answer.before + (orjson.dumps(times) if json else packed(times)) + answer.after
