"""Answers of Server-Sent Events: an event for each text, and an event for an error that ends the stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

import orjson
from falcon.asgi import Request, Response

from frontend.protocols.kserve_v2 import errors
from frontend.services import Services
from frontend.sse import CONTENT_TYPE, EventStream, data, prepare
from ipc.errors import PenstockError


def send_one(resp: Response, text: bytes) -> None:
    """Answer with a single event."""
    prepare(resp, f"{CONTENT_TYPE}; charset=utf-8")
    resp.stream = _one(data(text))


async def send(services: Services, req: Request, resp: Response, texts: AsyncGenerator[bytes, None]) -> None:
    """Answer with an event for each text, and with an event for an error that ends the stream.

    The status comes from the first text. Raises what fails before that.
    """
    events = EventStream(services, req, _framed(texts), "kserve", partial(_last_event, req.path))
    await events.begin()
    prepare(resp, f"{CONTENT_TYPE}; charset=utf-8")
    resp.stream = events


async def _one(event: bytes) -> AsyncIterator[bytes]:
    yield event


async def _framed(texts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(texts):
        async for text in texts:
            yield data(text)


def _last_event(path: str, error: PenstockError) -> tuple[int, bytes]:
    status, body, _ = errors.render(error, path)
    return status, data(orjson.dumps(body))
