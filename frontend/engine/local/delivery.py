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
from typing import Any

from frontend.engine.streams.incoming import TEXT_KINDS, Delivery, TextTaker
from ipc.wire.codec import ToWorker
from ipc.wire.messages import Result
from ipc.wire.streams import Deltas, DeltasTaken, Part, PartsConsumed


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
