"""Small answers in JSON, and small bodies."""

from __future__ import annotations

from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.protocols.kserve_v2.schemas import Decoder
from frontend.services import Services
from ipc.errors import BodyTooLarge

SMALL_NBYTES = 1 << 20
"""Largest body of a request that only names things."""


def send(resp: Response, value: Any) -> None:
    """Answer with a JSON value."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = orjson.dumps(value)


def send_empty(resp: Response) -> None:
    """Answer 200 with nothing; the type is that of the contract's examples."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = b""


async def body_of(services: Services, req: Request, decoder: Decoder, most_nbytes: int = SMALL_NBYTES) -> Any:
    """The body of a request, decoded. Raises `InvalidInput`, `BodyTooLarge`, and as `BodyReader.hold` does."""
    _check_length(req.content_length or 0, most_nbytes)
    async with services.bodies.hold(req, req.context.penstock.deadline_ns) as body:
        _check_length(len(body), most_nbytes)
        return decoder.decode(body)


def _check_length(nbytes: int, most_nbytes: int) -> None:
    if nbytes > most_nbytes:
        raise BodyTooLarge(f"body: {nbytes} bytes, the limit of this path is {most_nbytes}")
