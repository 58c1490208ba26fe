"""Answers in JSON, and bodies that are held whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response

from frontend.http.rendering import off_loop
from frontend.protocols.kserve_v2.schemas import Decoder
from frontend.services import Services
from ipc.errors import BodyTooLarge

T = TypeVar("T")
LONG_NBYTES = 64 << 10
"""Bodies above this size are parsed by a thread."""
SMALL_NBYTES = 1 << 20
"""Largest body of a request that only names things."""


def send(resp: Response, value: Any) -> None:
    """Answer with a JSON value, or with structs."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = orjson.dumps(value, default=msgspec.to_builtins)


def send_empty(resp: Response) -> None:
    """Answer 200 with an empty body; the media type is that of the contract's examples."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = b""


async def read(services: Services, req: Request, decoder: Decoder, most_nbytes: int = SMALL_NBYTES) -> Any:
    """The body of a request, decoded. Raises as `parsed`."""
    return await parsed(services, req, decoder.decode, most_nbytes)


async def parsed(services: Services, req: Request, parse: Callable[[bytes], T], most_nbytes: int) -> T:
    """The body of a request, read by `parse`; a long body in a rendering thread.

    Raises `InvalidInput`, `BodyTooLarge`, and as `BodyReader.hold` does.
    """
    _check_length(req.content_length or 0, most_nbytes)
    async with services.bodies.hold(req, req.context.penstock.deadline_ns) as body:
        _check_length(len(body), most_nbytes)
        return await off_loop(parse, body) if len(body) > LONG_NBYTES else parse(body)


def _check_length(nbytes: int, most_nbytes: int) -> None:
    if nbytes > most_nbytes:
        raise BodyTooLarge(f"body: {nbytes} bytes, the limit of this path is {most_nbytes}")
