"""Fills the masks of grammars in a thread, while the model runs.

The rows of all masks lie in one buffer. One call of llguidance fills the rows of a step without the interpreter's lock,
so that the thread of the model never waits for this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from llguidance import LLExecutor, LLMatcher

from ipc.errors import InvalidInput
from workers.generation.grammar import Guide
from workers.generation.sequence import Sequence as Choice
from workers.generation.sequence import Unfit


class GrammarFailed(Unfit, InvalidInput):
    """The grammars of some `sequences` cannot go on; the message has the words of llguidance on the first."""

    def __init__(self, sequences: Sequence[Choice], reason: str) -> None:
        super().__init__(f"grammar: {reason}")
        self.sequences = sequences


class MaskFiller:
    """The masks of one engine (`workers.generation.engine.Masks`)."""

    def __init__(self, words: int, vocabulary: int, threads: int = 1) -> None:
        """`words` as of `Grammars`, `vocabulary` is the number of logits of the model."""
        self._words, self._width = words, -(-vocabulary // 32)
        self._executor = LLExecutor(threads)
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._rows = torch.empty(0, words, dtype=torch.int32)
        self._filling: Future[None] | None = None
        self._choices: list[Choice] = []

    def begin(self, sequences: Sequence[Choice]) -> None:
        """Begin to fill `mask` of sequences, whose matchers are `Guide`s."""
        if len(sequences) > len(self._rows):
            self._rows = torch.empty(2 * len(sequences), self._words, dtype=torch.int32)
        self._choices = list(sequences)
        rows: list[tuple[LLMatcher, int]] = []
        for row, sequence in enumerate(sequences):
            assert isinstance(sequence.matcher, Guide)
            sequence.mask = self._rows[row, : self._width]
            rows.append((sequence.matcher.matcher, row))
        self._filling = self._thread.submit(
            self._executor.unsafe_compute_mask_ptr,
            rows,
            self._rows.data_ptr(),
            self._words * 4,
            len(self._rows),
        )

    def wait(self) -> None:
        """Return when all masks are filled. Raises `GrammarFailed`."""
        if self._filling is None:
            return
        filling, self._filling = self._filling, None
        filling.result()
        failed = {one: one.matcher.error for one in self._choices if isinstance(one.matcher, Guide)}
        failed = {sequence: reason for sequence, reason in failed.items() if reason}
        if failed:
            raise GrammarFailed(list(failed), next(iter(failed.values())))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
