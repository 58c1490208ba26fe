"""The parts of one streamed answer, as a frontend reads them.

1. Parts that arrive wait here, as many as the worker may send ahead (`ipc.wire.streams`).
2. A part is valid until the reader asks for the next. Then its lease ends, and the worker learns how many were taken.
3. The stream ends without an error, or with one. The loss of the worker is an error too: a stream that has begun is
   never run again.

After `arena.lease_copy_after_s` a part that waits in a block is copied, so that a slow client holds no arena memory. If
the budget for copies has no room, the stream ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from frontend.engine.answer import Answer, AnswerStream, CopyBudget
from frontend.engine.local.channel import Channel, Delivery
from ipc.errors import LeaseRevoked, PenstockError, ShmExhausted, WorkerLost
from ipc.wire.streams import WINDOW

TELL_AFTER = WINDOW // 2
"""So many parts are taken before the worker is told, unless one was in a block."""


class PartStream(AnswerStream):
    """The parts of one request."""

    def __init__(
        self,
        channel: Channel,
        request: int,
        final: asyncio.Future[Delivery],
        copies: CopyBudget,
        copy_after_s: float,
        on_suspect: Callable[[], None] = lambda: None,
    ) -> None:
        """`request` and `final` are what `Channel.submit` gave.

        `on_suspect` is told when its worker died on it after the first part, at once: nobody may be reading.
        """
        self._on_suspect, self._begun = on_suspect, False
        self._channel, self._request, self._final = channel, request, final
        self._copies, self._copy_after_s = copies, copy_after_s
        self._waiting: deque[Delivery] = deque()
        self._held: tuple[Delivery, Answer] | None = None
        self._untold = 0
        self._wanted: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failure: PenstockError | None = None
        self._over = False
        channel.streams[request] = self._deliver
        final.add_done_callback(self._finished)

    def when_answered(self, then: Callable[[], object]) -> None:
        """Call `then` once the worker has done its work or was lost; not when the stream is closed before."""
        self._final.add_done_callback(lambda _: then())

    async def begun(self) -> None:
        """Wait for the first part or the end. Raises the error of a request that failed before its first part."""
        await self._something()
        if not self._waiting and self._failure is None:
            self._final.result()

    async def __anext__(self) -> Answer:
        """The next part; the one before is given back. Raises the error of the request, once."""
        self._let_go()
        if not self._over:
            await self._something()
            if self._failure is None and self._waiting:
                return self._hand_out(self._waiting.popleft())
            self._over = True
            self._end()
        raise StopAsyncIteration

    def _hand_out(self, delivery: Delivery) -> Answer:
        self._stop_timer(delivery)
        try:
            answer = delivery.answer(self._channel)
        except PenstockError:
            self._drop(delivery)
            self.close()
            raise
        self._held = delivery, answer
        return answer

    def _end(self) -> None:
        """Keep the final result, or raise the error of the stream."""
        if self._failure is not None:
            raise self._failure
        try:
            self.result = self._final.result().answer(self._channel)
        except WorkerLost as lost:
            raise WorkerLost(
                "the worker was lost in the middle of its answer, which cannot go on elsewhere",
                retry_after_s=lost.retry_after_s,
            ) from lost

    async def _something(self) -> None:
        """Wait until there is a part, or the stream has ended."""
        while not (self._waiting or self._failure or self._final.done()):
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted

    def _finished(self, final: asyncio.Future[Delivery]) -> None:
        # NOTE: looked at also so that the loop does not complain of an error that nobody asks for any more.
        error = None if final.cancelled() else final.exception()
        if self._begun and isinstance(error, WorkerLost) and error.suspect:
            self._on_suspect()
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    def _deliver(self, delivery: Delivery) -> None:
        """A part has arrived."""
        self._begun = True
        self._waiting.append(delivery)
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
        self._channel.release(delivery.result, arena)
        return Delivery(delivery.result, None, delivery.inline, kept)

    def _fail(self, error: PenstockError) -> None:
        """End the work and the stream."""
        self._failure = error
        self._channel.cancel(self._request)
        self._drop_all()
        self._wake()

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
            self._channel.taken(self._request, self._untold)
            self._untold = 0

    def _give_copy(self, delivery: Delivery) -> None:
        if delivery.kept is not None:
            self._copies.give(len(delivery.kept))

    def _drop(self, delivery: Delivery) -> None:
        """Give back a part that no reader will see."""
        self._stop_timer(delivery)
        self._give_copy(delivery)
        if delivery.arena is not None:
            self._channel.release(delivery.result, delivery.arena)

    def _drop_all(self) -> None:
        while self._waiting:
            self._drop(self._waiting.popleft())

    def close(self) -> None:
        """End the work if it still goes on, and give back all that was received. Idempotent."""
        self._over = True
        self._let_go()
        self._channel.streams.pop(self._request, None)
        if self.result is not None:
            self.result.release()
        else:
            self._channel.abandon(self._request, self._final)
        self._drop_all()
