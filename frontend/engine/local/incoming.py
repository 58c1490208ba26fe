"""What the reading ends of all streams share: what has arrived, the one reader that waits, and the end.

A stream ends without an error, or with one. The loss of the worker is an error too: a request whose answer has begun is
never run again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from frontend.engine.answer import Answer
from frontend.engine.local.channel import Channel
from frontend.engine.local.delivery import Delivery
from ipc.errors import PenstockError, WorkerLost

T = TypeVar("T")


class Incoming(ABC, Generic[T]):
    """The stream of one request. A subclass puts into `_waiting` what arrives, and says so with `_wake`."""

    result: Answer | None = None
    """The end of the answer, once the iteration has ended without an error."""

    def __init__(
        self,
        channel: Channel,
        request: int,
        final: asyncio.Future[Delivery],
        on_suspect: Callable[[WorkerLost], None],
    ) -> None:
        """`request` and `final` are what `Channel.submit` gave.

        `on_suspect` is told when the worker died on a request whose answer had begun, at once: nobody may be reading.
        """
        self.channel, self._request, self._final, self._on_suspect = channel, request, final, on_suspect
        self.answering = False
        """Whether the answer has begun."""
        self._waiting: deque[T] = deque()
        self._wanted: asyncio.Future[None] | None = None
        self._failure: PenstockError | None = None
        self._over = False
        final.add_done_callback(self._finished)

    def when_answered(self, then: Callable[[], object]) -> None:
        """Call `then` once the worker has done its work or was lost; not when the stream is closed before."""
        self._final.add_done_callback(lambda _: then())

    async def begun(self) -> Self:
        """Wait for the beginning or the end. Raises the error of an earlier failure, and closes the stream then."""
        try:
            while not (self._has_begun or self._has_no_more):
                await self._arrival()
            if not self._has_begun:
                self._check()
        except BaseException:
            self.close()
            raise
        return self

    @abstractmethod
    def close(self) -> None:
        """End the work unless the work has ended, and give back all received parts. Idempotent."""

    @property
    def _is_awaited(self) -> bool:
        """Whether the reader waits."""
        return self._wanted is not None and not self._wanted.done()

    @property
    def _has_begun(self) -> bool:
        """Whether the worker has accepted the request."""
        return bool(self._waiting)

    @property
    def _has_no_more(self) -> bool:
        """Whether nothing comes any more."""
        return self._failure is not None or self._final.done()

    async def _something(self) -> None:
        """Wait until something is there, or the stream has ended."""
        while not (self._waiting or self._has_no_more):
            await self._arrival()

    async def _arrival(self) -> None:
        """Wait until something has happened."""
        self._wanted = asyncio.get_running_loop().create_future()
        await self._wanted

    def _check(self) -> Delivery:
        """The final result. Raises the error of the stream in its place."""
        if self._failure is not None:
            raise self._failure
        return self._final.result()

    def _end(self) -> None:
        """Keep the final result, or raise the error of the stream."""
        self._over = True
        try:
            self.result = self._check().answer(self.channel)
        except WorkerLost as lost:
            if not self.answering:
                raise
            raise WorkerLost(
                "the worker was lost in the middle of its answer, which cannot go on elsewhere",
                retry_after_s=lost.retry_after_s,
            ) from lost

    def _finished(self, final: asyncio.Future[Delivery]) -> None:
        # NOTE: looked at also so that the loop does not complain of an error that nobody asks for any more.
        error = None if final.cancelled() else final.exception()
        if self.answering and isinstance(error, WorkerLost) and error.suspect:
            self._on_suspect(error)
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _fail(self, error: PenstockError) -> None:
        """End the work and the stream."""
        self._failure = error
        self.channel.cancel(self._request)
        self._wake()

    def _stop(self) -> None:
        """End the work unless the work has ended, and give back the final result."""
        self._over = True
        if self.result is not None:
            self.result.release()
        else:
            self.channel.abandon(self._request, self._final)
