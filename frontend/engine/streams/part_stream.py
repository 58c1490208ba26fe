"""The reading end of an answer in parts, from the channel of a worker or from a box of a cluster.

`PartStream` adds to `Incoming` what holds for parts:

1. Parts that arrive wait here, as many as the worker may send ahead (`ipc.wire.streams`).
2. A part is valid until the reader asks for the next. Then its lease ends, and the worker learns how many were taken.
3. A stream whose reader has enough parts costs nothing (`Outstanding`).
4. A request whose answer has begun is never run again.

After `arena.lease_copy_after_s` a part that waits in a block is copied, so that a slow client holds no arena memory. If
the budget for copies has no room, the stream ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from frontend.engine.answer import Answer, AnswerStream, CopyBudget
from frontend.engine.streams.incoming import Delivery, Incoming, Source, cut_off
from ipc.errors import LeaseRevoked, PenstockError, ShmExhausted, WorkerLost
from ipc.wire.streams import WINDOW, part_flow

TELL_AFTER = WINDOW // 2
"""So many parts are taken before the worker is told, unless one was in a block."""


class PartTakers(Protocol):
    """The answers in parts of one source."""

    @property
    def parts(self) -> dict[int, Callable[[Delivery], None]]:
        """Who takes the parts of a request, by its id."""

    def parts_taken(self, request: int, count: int) -> None:
        """The oldest parts of a stream were taken, so as many more may come."""


class PartSource(Source, Protocol):
    """Where the parts of requests come from."""

    @property
    def streams(self) -> PartTakers:
        """The answers in parts."""

    def resume(self, request: int) -> None:
        """A queue counts the stream again."""


class PartStream(Incoming[Delivery], AnswerStream):
    """The parts of one request."""

    channel: PartSource

    def __init__(
        self,
        channel: PartSource,
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
        self._flow.sent(1, alone=delivery.is_alone)
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
            data = bytes(arena.data(block.offset, block.nbytes, block.generation))
            arena.check(block.offset, block.generation)
        except LeaseRevoked:
            self._copies.give(block.nbytes)
            raise
        self.channel.release(delivery.result, arena)
        return Delivery(delivery.result, None, delivery.inline, data)

    def _let_go(self) -> None:
        """The part that was handed out is taken."""
        if self._held is None:
            return
        (delivery, answer), self._held = self._held, None
        # NOTE: the reader may still have the answer while the next part waits for room.
        answer.forget()
        self._give_copy(delivery)
        self._untold += 1
        if self._final.done() or self._over:
            return
        if delivery.is_alone or self._untold >= TELL_AFTER:
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
