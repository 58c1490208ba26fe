"""Answers of Server-Sent Events: an event for each text, and an event for an error that ends the stream.

A stream whose first text takes long opens with a comment, and comments fill later pauses (`generation.keep_alive_s`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import orjson
from falcon.asgi import Request, Response

from frontend.protocols.kserve_v2 import errors
from frontend.services import Services
from frontend.sse import CONTENT_TYPE, EventStream, data, prepare
from ipc.errors import PenstockError


async def send(services: Services, req: Request, resp: Response, texts: AsyncGenerator[bytes, None]) -> None:
    """Answer with an event for each text, and with an event for an error that ends the stream.

    The status is fixed by the first text, or when that takes long. Raises what fails before that.
    """
    idle_s = services.settings.generation.keep_alive_s
    last = partial(_last_event, req.path)
    events = EventStream(services, req, _framed(texts), "kserve", last, idle_s=idle_s)
    await events.begin()
    prepare(resp, f"{CONTENT_TYPE}; charset=utf-8")
    resp.stream = events


async def _framed(texts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(texts):
        async for text in texts:
            yield data(text)


def _last_event(path: str, error: PenstockError) -> tuple[int, bytes]:
    status, body, _ = errors.render(error, path)
    return status, data(orjson.dumps(body))
