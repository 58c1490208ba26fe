"""What a frontend keeps of texts that are being written, so that another worker can carry them on.

1. Each stream has a `Progress`: the ids of the tokens of each choice, in the order of their arrival, and what has been
   told of calls. Ids come with the text that they stand for, so both are there or neither is.
2. A worker that is sent the request and the ids reads both as one prompt, and goes on behind the last token.
3. The frontend itself may die. So a `Mark` tells what has come since the mark before, and the `Progress` of another
   frontend begins where all marks end.
4. `KeptIds` counts the ids of all streams of the frontend. Beyond `generation.continuation_bytes` a stream loses its
   ids, and ends with an error if its worker is lost.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from frontend.engine.events import CallBegun, CallEvent, Finished, Mark, Past, Reasoning, Text
from ipc.wire.messages import GenerateCall, Written

TRIAL_TOKENS = 16
"""So many tokens behind a death a choice has passed the place at which the worker died.

A frontend lacks a few tokens that the dead worker had: of text that was held back, and of the last steps."""


class KeptIds:
    """The bytes of ids that the streams of one frontend keep."""

    def __init__(
        self, most: int, limit_nbytes: int, on_change: Callable[[int], None] = lambda change: None
    ) -> None:
        """A request is carried on `most` times; `on_change` is told of every change in bytes."""
        self.most, self._limit_nbytes, self._on_change = most, limit_nbytes, on_change
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Count more bytes; false without room."""
        if self.nbytes + nbytes > self._limit_nbytes:
            return False
        self.nbytes += nbytes
        self._on_change(nbytes)
        return True

    def give(self, nbytes: int) -> None:
        """Bytes are kept no more."""
        self.nbytes -= nbytes
        self._on_change(-nbytes)


class Gap:
    """What the client of a text waits for between two workers. Instants are CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, now_ns: int) -> None:
        """The loss of the earlier worker is known now."""
        self._lost_ns = self._sent_ns = self._prepared_ns = now_ns
        self._waited_ns = 0
        self.over_ns = 0
        """When the first token of the later worker arrived; 0: not yet."""

    def sent(self, now_ns: int) -> None:
        """The request has left for another worker."""
        self._sent_ns = now_ns

    def prepared(self, now_ns: int) -> None:
        """The worker has the tokens of the prompt."""
        self._prepared_ns = now_ns

    def started(self, waited_ns: int) -> None:
        """The worker has begun with the prompt, behind so much other work."""
        self._waited_ns = waited_ns

    def ended(self, now_ns: int) -> None:
        """A token has come. Idempotent."""
        self.over_ns = self.over_ns or now_ns

    def __str__(self) -> str:
        """The parts in milliseconds."""
        prefill_ns = max(0, self.over_ns - self._prepared_ns - self._waited_ns)
        parts = {
            "resend": self._sent_ns - self._lost_ns,
            "prepare": self._prepared_ns - self._sent_ns,
            "wait": self._waited_ns,
            "prefill": prefill_ns,
        }
        return ", ".join(f"{name} {part_ns / 1e6:.1f} ms" for name, part_ns in parts.items())


class Progress:
    """The answer to one request so far. `calls` counts the calls of each choice.

    `has_text`: the client has something of a choice. `weights` are those that write (`ipc.wire.streams.Start`). `gap`
    is there while a text goes on whose next token has not come.
    """

    def __init__(self, call: GenerateCall, kept: KeptIds, past: Past | None = None) -> None:
        """`past`: another frontend has begun the text."""
        self.calls: defaultdict[int, int] = defaultdict(int)
        self.has_text = False
        self.weights = ""
        self.gap: Gap | None = None
        self._kept = kept
        self._keeps = kept.most > 0 and not call.counts_only
        # NOTE: without a seed every worker draws by this one, or the text would go on as another text.
        self._seed = random.getrandbits(63) if past is None else past.mark.seed
        self._ids = [bytearray() for _ in range(call.n)]
        self._ended = [False] * call.n
        self._before = [0] * call.n
        """Bytes of ids that runs before the present one have brought."""
        self._marked = [0] * call.n
        """Bytes of ids that a mark has told."""
        if past is not None:
            self._take_up(past)

    def _take_up(self, past: Past) -> None:
        self.weights = past.mark.weights
        for event in past.events:
            self.has_text |= isinstance(event, Text | Reasoning | CallEvent | Finished)
            if isinstance(event, CallBegun):
                self.calls[event.choice] += 1
            elif isinstance(event, Finished):
                self._ended[event.choice] = True
        for choice, ids in enumerate(past.mark.ids):
            self.take(choice, ids)
            self._marked[choice] = len(ids)

    @property
    def has_begun(self) -> bool:
        """Whether a run from the beginning would repeat something."""
        return self.has_text or any(self._ids)

    @property
    def has_ended(self) -> bool:
        """Whether the ends of all choices have arrived."""
        return all(self._ended)

    @property
    def can_go_on(self) -> bool:
        """Whether another worker could write the rest."""
        return self._keeps

    @property
    def has_passed(self) -> bool:
        """Whether the present run has gone beyond the place at which the worker before died."""
        fresh = [(len(ids) - before) // 4 for ids, before in zip(self._ids, self._before, strict=True)]
        choices = zip(self._ids, self._ended, fresh, strict=True)
        return any(fresh) and all(ended or count >= TRIAL_TOKENS for ids, ended, count in choices if ids)

    def written(self) -> Written | None:
        """What the next worker is sent; None if nobody could carry on its text."""
        if not self._keeps:
            return None
        self._before = [len(ids) for ids in self._ids]
        if not self.has_begun:
            return Written(self._seed)
        return Written(self._seed, [bytes(ids) for ids in self._ids], list(self._ended), self.weights)

    def mark(self, identity: str, deaths: int, pictures: str) -> Mark | None:
        """What has come since the last mark; None if nobody could carry on the text. For the arguments see `Mark`."""
        if not self._keeps:
            return None
        fresh = [bytes(ids[at:]) for ids, at in zip(self._ids, self._marked, strict=True)]
        self._marked = [len(ids) for ids in self._ids]
        return Mark(self._seed, fresh, self.weights, identity, deaths, pictures)

    def fresh(self, choice: int) -> bytes | None:
        """The ids of a choice since the last mark, which count as told; None if nobody could carry on the text."""
        if not self._keeps:
            return None
        ids, at = self._ids[choice], self._marked[choice]
        self._marked[choice] = len(ids)
        return bytes(ids[at:])

    def take(self, choice: int, ids: bytes) -> None:
        """Ids of further tokens of a choice have arrived, with the text of these."""
        if self._keeps and self._kept.take(len(ids)):
            self._ids[choice] += ids
        else:
            self.drop()

    def end(self, choice: int) -> None:
        """The end of a choice has arrived."""
        self.has_text = self._ended[choice] = True

    def drop(self) -> None:
        """Keep no ids any more. Idempotent."""
        self._keeps = False
        if nbytes := sum(map(len, self._ids)):
            self._kept.give(nbytes)
            self._ids = [bytearray() for _ in self._ids]
