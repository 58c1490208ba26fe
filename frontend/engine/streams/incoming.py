"""The reading end of the stream of one request (`Incoming`), and where such a stream comes from (`Source`).

`Incoming` keeps what has arrived, the one reader that waits, and the end. A stream ends without an error, or with one.
The loss of the source is an error too. A source is the channel of a worker, or a box of a cluster.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from frontend.engine.answer import Answer
from ipc.errors import PenstockError, WorkerLost
from ipc.memory.arena import ArenaView
from ipc.wire.messages import BlockRef, Result
from ipc.wire.streams import REASONING, TEXT, Deltas

T = TypeVar("T")
TEXT_KINDS = frozenset((TEXT, REASONING))
"""Kinds of entries that are a piece of text."""


class Sender(Protocol):
    """The worker that sent a result, as the channel of the worker knows the worker."""

    worker: str
    uuid: str

    def release(self, result: Result, arena: ArenaView) -> None:
        """End the lease of a result."""


@dataclass(slots=True, frozen=True)
class ArenaLease:
    """The lease of a result in a worker's arena."""

    sender: Sender
    result: Result
    arena: ArenaView
    block: BlockRef

    def check(self) -> None:
        """Raise `LeaseRevoked` when the block was taken back."""
        self.arena.check(self.block.offset, self.block.generation)

    def release(self) -> None:
        """Tell the worker that no reader of the block is left."""
        self.sender.release(self.result, self.arena)


@dataclass(slots=True)
class Delivery:
    """A result with the bytes that its tensors lie in: an arena to lease from, an inline frame, or a private copy.

    `kept` stands in the place of a block whose lease has ended already. `data` are the bytes of the tensors where they
    lie in private memory apart from those of loose tensors. `large`: the part of a box was too large for a message.
    """

    result: Result
    arena: ArenaView | None
    inline: bytes
    kept: bytes | None = None
    data: memoryview | None = None
    large: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent behind the part until it is taken."""
        return self.large or self.result.block is not None

    def answer(self, sender: Sender) -> Answer:
        """The result and its bytes as an `Answer`. Raises `LeaseRevoked` when the block was taken back already."""
        inline, block, arena = memoryview(self.inline), self.result.block, self.arena
        if block is None or arena is None:
            data = inline if self.kept is None else memoryview(self.kept)
            data = data if self.data is None else self.data
            return Answer(self.result, data, inline, worker=sender.worker, uuid=sender.uuid)
        data = arena.data(block.offset, block.nbytes, block.generation)
        lease = ArenaLease(sender, self.result, arena, block)
        return Answer(self.result, data, inline, lease=lease, worker=sender.worker, uuid=sender.uuid)


class TextTaker(Protocol):
    """The reading end of a stream of text."""

    def take_text(self, kind: int, choice: int, text: str, tokens: int, ids: bytes, now_ns: int) -> None:
        """The usual entry: a piece of TEXT or REASONING without log probabilities, and the ids that it brings."""

    def take(self, deltas: Deltas, at: int, now_ns: int) -> None:
        """Entry `at` of `deltas`, of any kind, is of this stream."""

    def look(self, now_ns: int) -> None:
        """Some time has passed; called several times a second."""


class TextStreams(Protocol):
    """The streams of text of one source."""

    @property
    def texts(self) -> dict[int, TextTaker]:
        """Who takes the text of a request, by its id."""

    def text_taken(self, request: int, nbytes: int) -> None:
        """So many bytes of the text of a stream were taken."""


class Source(Sender, Protocol):
    """Where the streams of requests come from: the channel of a worker, or a box of a cluster."""

    def rest(self, request: int) -> None:
        """No queue counts the stream any longer."""

    def cancel(self, request: int) -> None:
        """The caller has gone. Idempotent."""

    def abandon(self, request: int, future: asyncio.Future[Delivery]) -> None:
        """The caller was cancelled: stop the work, or give back a result that had just arrived."""


class TextSource(Source, Protocol):
    """Where streams of text come from."""

    @property
    def streams(self) -> TextStreams:
        """The streams of text."""


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
        while not (self._waiting or self._failure or self._final.done()):
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
