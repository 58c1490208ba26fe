"""Streams of this contract: events with `data: [DONE]` behind them, also behind an error."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson
from falcon.asgi import Request, Response

from frontend.generation.errors import status_of, stream_error
from frontend.generation.sending import send_stream
from frontend.services import Services
from frontend.sse import DONE, data
from ipc.errors import PenstockError

PROTOCOL = "chat"


async def send_events(
    services: Services, req: Request, resp: Response, events: AsyncGenerator[bytes, None]
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that."""
    await send_stream(services, req, resp, events, PROTOCOL, last_events)


def last_events(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, events) of an error that ends a stream."""
    return status_of(error), data(orjson.dumps(stream_error(error))) + DONE
