"""A response of Server-Sent Events: an event for each text, and an event for an error that ends the stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from falcon.asgi import Request

from frontend.engine.finishing import Outcome
from frontend.engine.scope import RequestScope
from frontend.http import tracebacks
from frontend.http.disconnect import until_disconnect
from frontend.protocols.kserve_v2 import errors
from frontend.services import Services
from ipc.errors import Cancelled, PenstockError

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/event-stream; charset=utf-8"


class EventStream:
    """The body of a response, as an async iterator; the request is counted when it ends.

    A text is made when the one before was written, so a client that does not read holds the model up and no memory.
    """

    def __init__(self, services: Services, req: Request, texts: AsyncGenerator[bytes, None]) -> None:
        """`texts` may raise a `PenstockError`, which becomes the last event."""
        self._services, self._req, self._texts = services, req, texts
        self._scope: RequestScope = req.context.penstock
        self._first: bytes | None = None
        self._ended = self._finished = False

    async def begin(self) -> None:
        """Wait for the first text, or the end. Raises what fails before that; the status is fixed from then on."""
        try:
            self._first = await anext(self._texts, None)
        except BaseException:
            await self._texts.aclose()
            raise
        self._scope.streams = True

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        """The next event."""
        if self._first is not None:
            text, self._first = self._first, None
            return _event(text)
        try:
            return _event(await until_disconnect(self._next(), self._req.scope))
        except StopAsyncIteration:
            self._ended = True
            raise
        except Cancelled as error:
            self._noted(error)
            raise StopAsyncIteration from None
        except PenstockError as error:
            return self._told(error)
        except Exception as error:
            log.error("%s failed", self._req.path, exc_info=error)
            return self._told(PenstockError("internal error"))

    async def _next(self) -> bytes:
        return await anext(self._texts)

    def _told(self, error: PenstockError) -> bytes:
        return _event(orjson.dumps(self._noted(error)))

    def _noted(self, error: PenstockError) -> dict[str, Any]:
        """The event of an error; the request is counted with this error."""
        self._ended = True
        tracebacks.forget(error)
        status, told, _ = errors.render(error, self._req.path)
        self._scope.error, self._scope.counted_status = error.code, status
        return told

    async def close(self) -> None:
        """End the work if it still goes on, and count the request. Called by Falcon when the response is over."""
        await self._texts.aclose()
        if not self._finished:
            self._finished = True
            if not self._ended:
                self._noted(self._scope.ended_early())
            outcome = Outcome(self._req.method, self._req.path, self._req.uri_template or "", 200)
            self._services.finisher.finish(self._scope, "kserve", outcome)


async def one_event(text: bytes) -> AsyncIterator[bytes]:
    """The body of a response that is a single event."""
    yield _event(text)


def _event(text: bytes) -> bytes:
    return b"data: " + text + b"\n\n"
