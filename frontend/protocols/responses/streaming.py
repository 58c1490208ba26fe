"""One response as the stream of its request: the events, and the row that is stored at their end.

1. The stream begins once the worker has accepted the prompt, or when the request has waited for long. What fails
   before has a status of its own, and is not stored.
2. The row is stored before the last event leaves, so that a client with the last event finds the response.
3. A client that goes away ends the work. What was generated until then is stored as a cancelled response, or as a
   failed one where the end of this server ends the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

from frontend.engine.events import Generation
from frontend.generation.errors import status_of
from frontend.protocols.responses import resource
from frontend.protocols.responses.keeping import Keeper
from frontend.protocols.responses.named_events import NamedEvents
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.resource import Resource
from ipc.errors import Cancelled, Draining, PenstockError


class ResponseStream:
    """The stream of a response that has begun as `begun`."""

    def __init__(self, begun: Resource, keeper: Keeper) -> None:
        self._begun, self._keeper = begun, keeper
        self._named = NamedEvents()
        self._output = Output(begun, self._named.tell)
        self._drained: Draining | None = None

    async def events(self, running: AbstractAsyncContextManager[Generation]) -> AsyncGenerator[bytes, None]:
        """The events of what `running` generates. Raises the error of a generation that fails."""
        async with running as generation:
            try:
                yield self.open()
                async for events in generation:
                    self._output.take(events)
                    if made := self._named.taken():
                        yield made
            except (asyncio.CancelledError, GeneratorExit, Cancelled):
                whole = resource.cancelled(self._begun, self._output)
                self._keeper.keep_soon(self._begun, self._failed(self._drained) if self._drained else whole)
                raise
            except Exception as error:
                await self._keeper.keep(self._begun, self._failed(error))
                raise
        whole = resource.ended(self._begun, self._output)
        await self._keeper.keep(self._begun, whole)
        yield self._named.end(whole)

    def open(self) -> bytes:
        """The events that begin the stream, once."""
        if not self._named.is_at_work:
            self._named.queue(self._begun)
            self._named.work(self._begun)
        return self._named.taken()

    def last_events(self, error: PenstockError) -> tuple[int, bytes]:
        """(status to count, events) of an error that ends the stream."""
        self._drained = error if isinstance(error, Draining) else None
        self._output.close()
        if resource.kind_of(error) == "model_error":
            return status_of(error), self._named.end(self._failed(error))
        return status_of(error), self._named.fail(error)

    def _failed(self, error: Exception) -> Resource:
        known = error if isinstance(error, PenstockError) else PenstockError("internal error")
        return resource.failed(self._begun, self._output, known)
