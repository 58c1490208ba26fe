"""What a worker sends for a request: a result with the right to read its bytes, parts of an answer, or text.

`Streams` are those of one channel:

1. A part, or an entry of `Deltas`, goes to the taker of its request. What arrives for a request that has ended is
   given back.
2. Texts that clients have taken are told in one message for each turn of the event loop.
3. Every tick asks the streams of text whether they have waited too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from frontend.engine.answer import Answer
from ipc.memory.arena import ArenaView
from ipc.wire.codec import ToWorker
from ipc.wire.messages import BlockRef, Result
from ipc.wire.streams import REASONING, TEXT, Deltas, DeltasTaken, Part, PartsConsumed

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

    `kept` stands in the place of a block whose lease has ended already.
    """

    result: Result
    arena: ArenaView | None
    inline: bytes
    kept: bytes | None = None

    def answer(self, sender: Sender) -> Answer:
        """The result and its bytes as an `Answer`. Raises `LeaseRevoked` when the block was taken back already."""
        inline, block, arena = memoryview(self.inline), self.result.block, self.arena
        if block is None or arena is None:
            data = inline if self.kept is None else memoryview(self.kept)
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

    @property
    def streams(self) -> TextStreams:
        """The streams of text."""

    def rest(self, request: int) -> None:
        """No queue counts the stream any longer."""

    def cancel(self, request: int) -> None:
        """The caller has gone. Idempotent."""

    def abandon(self, request: int, future: asyncio.Future[Delivery]) -> None:
        """The caller was cancelled: stop the work, or give back a result that had just arrived."""


class Streams:
    """All streams of one channel."""

    def __init__(
        self,
        deliver: Callable[[Result, bytes], Delivery],
        give_back: Callable[[Delivery], None],
        put: Callable[[ToWorker], None],
    ) -> None:
        """The arguments are the channel's: join a result and its bytes, end its lease, and send a message."""
        self._deliver, self._give_back, self._put = deliver, give_back, put
        self.parts: dict[int, Callable[[Delivery], None]] = {}
        """Who takes the parts of a request, by its id."""
        self.texts: dict[int, TextTaker] = {}
        """Who takes the text of a request, by its id."""
        self._taken: dict[int, int] = {}
        self.handlers: dict[type, Callable[[Any, bytes], None]] = {
            Part: self._on_part,
            Deltas: self._on_deltas,
        }

    def __len__(self) -> int:
        return len(self.parts) + len(self.texts)

    def parts_taken(self, request: int, count: int) -> None:
        """The oldest parts of a stream were taken, so as many more may come."""
        self._put(PartsConsumed(request, count))

    def text_taken(self, request: int, nbytes: int) -> None:
        """So many bytes of the text of a stream were taken."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._tell_taken)
        self._taken[request] = self._taken.get(request, 0) + nbytes

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, {}
        self._put(DeltasTaken(list(taken), list(taken.values())))

    def look(self) -> None:
        """Some time has passed."""
        if self.texts:
            now_ns = time.monotonic_ns()
            for taker in list(self.texts.values()):
                taker.look(now_ns)

    def _on_part(self, part: Part, inline: bytes) -> None:
        delivery = self._deliver(part.result, inline)
        take = self.parts.get(part.result.id, self._give_back)
        take(delivery)

    def _on_deltas(self, deltas: Deltas, _: bytes) -> None:
        now_ns, texts, logprobs = time.monotonic_ns(), self.texts, deltas.logprobs
        columns = deltas.ids, deltas.kinds, deltas.choices, deltas.texts, deltas.tokens
        written = deltas.written or [b""] * len(deltas.ids)
        # PERF: a step of many streams is one message, and nearly all of its entries are plain text.
        for at, (request, kind, choice, text, tokens, ids) in enumerate(zip(*columns, written, strict=True)):
            taker = texts.get(request)
            if taker is None:
                continue
            if kind in TEXT_KINDS and at not in logprobs:
                taker.take_text(kind, choice, text, tokens, ids, now_ns)
            else:
                taker.take(deltas, at, now_ns)
