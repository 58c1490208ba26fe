"""The reading end of a stream of one worker: `Incoming` for every stream, `PartStream` for answers in parts.

`Incoming` keeps what has arrived, the one reader that waits, and the end. A stream ends without an error, or with one.
The loss of the worker is an error too. The source of a stream is the channel of a worker, or a box of a cluster.

`PartStream` adds what holds for parts:

1. Parts that arrive wait here, as many as the worker may send ahead (`ipc.wire.streams`).
2. A part is valid until the reader asks for the next. Then its lease ends, and the worker learns how many were taken.
3. A stream whose reader has enough parts costs nothing (`Outstanding`).
4. A request whose answer has begun is never run again.

After `arena.lease_copy_after_s` a part that waits in a block is copied, so that a slow client holds no arena memory. If
the budget for copies has no room, the stream ends.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from frontend.engine.answer import Answer, AnswerStream, CopyBudget
from frontend.engine.local.channel import Channel
from frontend.engine.local.delivery import Delivery, Source
from ipc.errors import LeaseRevoked, PenstockError, ShmExhausted, WorkerLost
from ipc.wire.streams import WINDOW, part_flow

T = TypeVar("T")
TELL_AFTER = WINDOW // 2
"""So many parts are taken before the worker is told, unless one was in a block."""


def cut_off(lost: WorkerLost) -> WorkerLost:
    """The error of an answer that has begun and is not carried on."""
    return WorkerLost(
        "the worker was lost in the middle of its answer, which cannot go on elsewhere",
        retry_after_s=lost.retry_after_s,
    )


class Incoming(ABC, Generic[T]):
    """The stream of one request. A subclass puts into `_waiting` what arrives, and says so with `_wake`."""

    result: Answer | None = None
    """The end of the answer, once the iteration has ended without an error."""

    def __init__(
        self,
        channel: Source,
        request: int,
        final: asyncio.Future[Delivery],
        on_suspect: Callable[[WorkerLost], None],
    ) -> None:
        """`request` and `final` are what `Channel.submit` gave.

        `on_suspect` is told when the worker died on a request whose answer had begun, at once: nobody may be reading.
        """
        self._request, self._final, self._on_suspect = request, final, on_suspect
        self.channel: Source = channel
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
        self.result = self._check().answer(self.channel)

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


class PartStream(Incoming[Delivery], AnswerStream):
    """The parts of one request."""

    channel: Channel

    def __init__(
        self,
        channel: Channel,
        request: int,
        final: asyncio.Future[Delivery],
        window: int,
        copies: CopyBudget,
        copy_after_s: float,
        on_suspect: Callable[[WorkerLost], None] = lambda error: None,
    ) -> None:
        """`window` is `Work.parts`; for the others see `Incoming`."""
        super().__init__(channel, request, final, on_suspect)
        self._copies, self._copy_after_s = copies, copy_after_s
        self._flow = part_flow(window)
        self._held: tuple[Delivery, Answer] | None = None
        self._untold = 0
        self._timer: asyncio.TimerHandle | None = None
        channel.streams.parts[request] = self._deliver

    async def __anext__(self) -> Answer:
        """The next part. The part before is given back. Raises the error of the request, once."""
        self._let_go()
        if not self._over:
            await self._something()
            if self._failure is None and self._waiting:
                return self._hand_out(self._waiting.popleft())
            try:
                self._end()
            except WorkerLost as lost:
                raise (cut_off(lost) if self.answering else lost) from lost
        raise StopAsyncIteration

    def _hand_out(self, delivery: Delivery) -> Answer:
        self._stop_timer(delivery)
        try:
            answer = delivery.answer(self.channel)
        except PenstockError:
            self._drop(delivery)
            self.close()
            raise
        self._held = delivery, answer
        return answer

    def _deliver(self, delivery: Delivery) -> None:
        """A part has arrived."""
        self.answering = True
        self._waiting.append(delivery)
        self._flow.sent(1, alone=delivery.result.block is not None)
        if not self._flow.open:
            self.channel.rest(self._request)
        if delivery.arena is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._copy_after_s, self._keep_private)
        self._wake()

    def _stop_timer(self, delivery: Delivery) -> None:
        # NOTE: the worker sends nothing behind a part in a block, so there is one such part at most.
        if delivery.arena is not None and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep_private(self) -> None:
        """The client is slow: its part goes on in private memory, or the stream ends."""
        for place, delivery in enumerate(self._waiting):
            if delivery.arena is not None:
                try:
                    self._waiting[place] = self._copied(delivery)
                except PenstockError as error:
                    self._fail(error)
                    self._drop_all()
                return

    def _copied(self, delivery: Delivery) -> Delivery:
        block, arena = delivery.result.block, delivery.arena
        assert block is not None and arena is not None
        if not self._copies.take(block.nbytes):
            raise ShmExhausted(
                "the client was too slow and no copy could be kept for it (arena.copy_out_bytes)",
                retry_after_s=1,
            )
        try:
            kept = bytes(arena.data(block.offset, block.nbytes, block.generation))
            arena.check(block.offset, block.generation)
        except LeaseRevoked:
            self._copies.give(block.nbytes)
            raise
        self.channel.release(delivery.result, arena)
        return Delivery(delivery.result, None, delivery.inline, kept)

    def _let_go(self) -> None:
        """The part that was handed out is taken."""
        if self._held is None:
            return
        (delivery, answer), self._held = self._held, None
        answer.release()
        self._give_copy(delivery)
        self._untold += 1
        if self._final.done() or self._over:
            return
        if delivery.result.block is not None or self._untold >= TELL_AFTER:
            self._tell()

    def _tell(self) -> None:
        """As many more parts may come."""
        self._flow.taken(self._untold)
        if self._flow.open:
            self.channel.resume(self._request)
        self.channel.streams.parts_taken(self._request, self._untold)
        self._untold = 0

    def _give_copy(self, delivery: Delivery) -> None:
        if delivery.kept is not None:
            self._copies.give(len(delivery.kept))

    def _drop(self, delivery: Delivery) -> None:
        """Give back a part that no reader will see."""
        self._stop_timer(delivery)
        self._give_copy(delivery)
        if delivery.arena is not None:
            self.channel.release(delivery.result, delivery.arena)

    def _drop_all(self) -> None:
        while self._waiting:
            self._drop(self._waiting.popleft())

    def close(self) -> None:
        """End the work unless the work has ended, and give back all received parts. Idempotent."""
        self._over = True
        self._let_go()
        self.channel.streams.parts.pop(self._request, None)
        self._stop()
        self._drop_all()
