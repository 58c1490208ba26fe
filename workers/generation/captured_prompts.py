"""Captured steps with parts of prompts, for numbers of tokens that are multiples of 256.

1. The rows of a step are padded to the next multiple. A row that pads has no sequence: its key and value go to a block
   of the cache that belongs to nobody (`PagedAttention.spare_slot`), it attends to nothing, and nobody reads its
   result. So neither the cache nor other rows know of it.
2. `workers.generation.paged_tiles` attends. Logits are made of one row for each sequence at most.
3. What a graph saves is the time of the host, and a plain step may have the faster attention. So the first step of a
   number is timed in both ways, and is replayed from then on where this takes less than `_GAIN` of the plain time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from workers.device.transfer import sent
from workers.generation.attention import PagedAttention
from workers.generation.captured import Captured, CapturedSteps, Captures, Inputs, Step
from workers.generation.flights import Unread
from workers.generation.paged_tiles import NOBODY, Piece, TileLayout, most_tiles, tiles_of
from workers.generation.rope import Lengths
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span
from workers.generation.step_plan import Plan

log = logging.getLogger(__name__)

STEP = 256
"""Numbers of tokens are multiples of this one."""
_GAIN = 0.9
_TURNS = 3
"""How often a step is timed in each way; the least time counts."""


def token_counts(most: int) -> list[int]:
    """Numbers of tokens for which steps of at most `most` tokens are captured."""
    return list(range(STEP, most + STEP, STEP))


class CapturedPrompts(Captures):
    """The captured steps that compute parts of prompts, and single tokens beside these."""

    kind = "prompts"

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        most_tokens: int,
        most_sequences: int,
        most_blocks: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """For steps of at most `most_tokens` tokens, of sequences as in `CapturedSteps`.

        `attention` has its tiles prepared, and a spare block. `clock` gives seconds.
        """
        super().__init__(model, attention, token_counts(most_tokens), most_blocks)
        self._most_sequences, self._clock = most_sequences, clock
        self._dropped: set[int] = set()

    def logits(
        self, spans: Sequence[Span], rows: Sequence[int], unread: Unread | None = None
    ) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of some rows, at least one, valid until the next step; None if not captured.

        `unread` are tokens that the host does not know.
        """
        count = sum(span.stop - span.start for span in spans)
        fits = count <= self._counts[-1] and len(spans) <= self._most_sequences and len(rows) <= len(spans)
        if not (self._works and fits and self._fits(spans)) or -(-count // STEP) * STEP in self._dropped:
            return None
        return self._computed(count, Step(spans, unread, rows))

    def _inputs(self, count: int) -> Inputs:
        device, most = self._model.device, self._most_sequences
        numbers = torch.zeros(5, count, dtype=torch.int64, device=device)
        table = torch.zeros(most, self._most_blocks, dtype=torch.int32, device=device)
        queries = self._attention.tile_queries
        tiles = torch.zeros(most_tiles(count, most, queries), 4, dtype=torch.int32, device=device)
        ids, positions, slots, _, is_long = numbers.unbind()
        tiled, far = TileLayout(tiles, table), Lengths((), is_long)
        plan = Plan(ids, positions, slots, count, 0, [], [], (), tiled=tiled, lengths=far)
        return Inputs(numbers, table, plan, torch.zeros(most, dtype=torch.int64, device=device), tiles)

    def _fill(self, inputs: Inputs, step: Step) -> None:
        """Lay the tokens and blocks of a step in. Rows that are left belong to nobody."""
        spans, size, count = step.spans, self._attention.block_tokens, inputs.numbers.shape[1]
        tables = [span.sequence.block_table() for span in spans]
        table = np.zeros((len(spans), max(map(len, tables))), np.int32)
        numbers = np.zeros((5, count), np.int64)
        rope = self._attention.rope
        unknown: list[tuple[int, Choice]] = []
        pieces: list[Piece] = []
        row = 0
        for number, ((sequence, start, stop), blocks) in enumerate(zip(spans, tables, strict=True)):
            table[number, : len(blocks)] = blocks
            places, here = np.arange(start, stop), slice(row, row + stop - start)
            tokens = sequence.tokens[start:stop]
            if not tokens:
                unknown.append((row, sequence))
                tokens = [0]
            numbers[0, here], numbers[1, here] = tokens, places + sequence.shift
            numbers[2, here] = blocks[places // size] * size + places % size
            numbers[4, here] = rope is not None and rope.is_long(spans[number])
            pieces.append(Piece(row, start, stop, number))
            row += stop - start
        numbers[2, row:] = self._attention.spare_slot
        pieces.append(Piece(row, 0, count - row, NOBODY))
        self._lay(inputs, numbers, table, unknown, step.unread)
        device = inputs.numbers.device
        assert isinstance(inputs.keep, torch.Tensor) and inputs.tiles is not None and step.rows is not None
        kept = np.full(len(inputs.keep), step.rows[-1], np.int64)
        kept[: len(step.rows)] = step.rows
        inputs.keep.copy_(sent(kept, device))
        tiles = tiles_of(pieces, self._attention.tile_queries, len(inputs.tiles))
        inputs.tiles.copy_(sent(tiles, device))

    def _is_worth(self, captured: Captured, step: Step) -> bool:
        def replayed() -> None:
            self._fill(captured.inputs, step)
            captured.graph.replay()

        took: dict[str, list[float]] = {"plain": [], "captured": []}
        for _ in range(_TURNS):
            for name, work in (("plain", lambda: self._plain(step)), ("captured", replayed)):
                began = self._clock()
                work()
                self._wait()
                took[name].append(self._clock() - began)
        plain_s, captured_s = (min(times) for times in took.values())
        count = captured.inputs.numbers.shape[1]
        is_worth = captured_s < _GAIN * plain_s
        log.info(
            "%s: a step of %d tokens takes %.1f ms captured, %.1f ms in the plain way; steps of up to %d are %s",
            type(self._model).__name__,
            sum(span.stop - span.start for span in step.spans),
            captured_s * 1e3,
            plain_s * 1e3,
            count,
            "replayed" if is_worth else "plain",
        )
        if not is_worth:
            self._dropped.add(count)
        return is_worth

    def _wait(self) -> None:
        """Until the device has done all work."""
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def replayed(
    steps: CapturedSteps | None,
    prompts: CapturedPrompts | None,
    spans: Sequence[Span],
    rows: Sequence[int] | None,
    unread: Unread | None,
) -> torch.Tensor | None:
    """Logits of a captured step, of some `rows` of the step or of all (None); None for a step that is not captured.

    Captured steps compute the bare model: not for steps whose modules have hooks.
    """
    if all(span.stop - span.start == 1 for span in spans):
        return None if steps is None or rows is not None else steps.logits(spans, unread)
    if prompts is None:
        return None
    ends = list(range(sum(span.stop - span.start for span in spans))) if rows is None else rows
    return prompts.logits(spans, ends or [0], unread)
