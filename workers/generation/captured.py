"""Steps that CUDA captures once and replays: the host launches one graph instead of all kernels.

1. Steps are captured for some numbers of rows. A step takes the next greater number and fills the rows that are left.
   `CapturedSteps` have single tokens only, and repeat the last sequence in these rows: they write to the cache what the
   last sequence writes. `CapturedPrompts` have parts of prompts.
2. The first step of a number runs in the plain way, then is captured and replayed. If the logits differ, or the model
   cannot be captured, the engine goes on without captured steps of this kind.
3. Every replay reads tokens, places, lengths and block tables from tensors of its own, which `_fill` sets.

`CapturedPrompts` are captured for numbers of tokens that are multiples of 256:

1. The rows of a step are padded to the next multiple. A row that pads has no sequence: its key and value go to a block
   of the cache that belongs to nobody (`PagedAttention.spare_slot`), it attends to nothing, and nobody reads its
   result. So neither the cache nor other rows know of it.
2. `workers.generation.paged_tiles` attends. Logits are made of one row for each sequence at most.
3. What a graph saves is the time of the host, and a plain step may have the faster attention. So the first step of a
   number is timed in both ways, and is replayed from then on where this takes less than `_GAIN` of the plain time.

All methods belong to the device thread. `attention.packed_pass` is the same step in the plain way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workers import foreign
from workers.device.oom import end_if_broken
from workers.device.transfer import sent
from workers.generation.attention import PagedAttention, packed_pass
from workers.generation.flights import Unread
from workers.generation.paged_decode import DecodeLayout
from workers.generation.paged_tiles import NOBODY, Piece, TileLayout, most_tiles, tiles_of
from workers.generation.rope import Lengths
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span
from workers.generation.step_plan import Plan, plan_of

log = logging.getLogger(__name__)

_MOST_ROWS = 256
_TOLERANCE = 0.1
"""Mean difference of logits, as a part of their mean size."""


class Graph(Protocol):
    """What computes a captured step again (`torch.cuda.CUDAGraph`)."""

    def replay(self) -> None:
        """Compute the step from the content that its tensors have now."""


class Inputs(NamedTuple):
    """What a step reads: `numbers` int64 [5, rows] and `table` int32 [sequences, pages].

    The numbers are ids, positions, slots and lengths, and 1 for a row with the positions of long texts. Logits are made
    of the rows `keep`, int64 [kept], or of all with 0. `tiles` are those of parts of prompts.
    """

    numbers: torch.Tensor
    table: torch.Tensor
    plan: Plan
    keep: torch.Tensor | int = 0
    tiles: torch.Tensor | None = None


class Captured(NamedTuple):
    """One graph, which makes the `logits` [kept, vocabulary] of what its inputs hold."""

    inputs: Inputs
    graph: Graph
    logits: torch.Tensor


class Step(NamedTuple):
    """A step that is to be computed: `rows` are those whose logits are asked for, None for all.

    `unread` are tokens that the host does not know.
    """

    spans: Sequence[Span]
    unread: Unread | None
    rows: Sequence[int] | None = None

    @property
    def kept(self) -> int:
        """The number of rows of logits."""
        return len(self.spans) if self.rows is None else len(self.rows)


def row_counts(most: int) -> list[int]:
    """Numbers of sequences for which steps are captured: at most half of a step's rows, or 15, are repetitions."""
    most = min(most, _MOST_ROWS)
    counts = [1, 2, 4, *range(8, 32, 8), *range(32, _MOST_ROWS, 16)]
    return [*(count for count in counts if count < most), most]


class Captures:
    """The captured steps of one kind and engine."""

    kind: ClassVar[str]
    """What is captured, in the words of the log."""

    def __init__(
        self, model: Any, attention: PagedAttention, counts: Sequence[int], most_blocks: int
    ) -> None:
        """For some numbers of rows in rising order, and sequences of at most `most_blocks` blocks each."""
        self._model, self._attention, self._most_blocks = model, attention, most_blocks
        self._counts = counts
        self.steps: dict[int, Captured] = {}
        """By the number of rows."""
        self._memory: Any = None
        self._works = True

    def _inputs(self, count: int) -> Inputs:
        """Tensors for steps of `count` rows."""
        raise NotImplementedError

    def _fill(self, inputs: Inputs, step: Step) -> None:
        """Lay a step in."""
        raise NotImplementedError

    def _is_worth(self, captured: Captured, step: Step) -> bool:
        """Whether steps of a number of rows, whose logits are right, are replayed from now on."""
        return True

    def _fits(self, spans: Sequence[Span]) -> bool:
        """Whether no span has a picture, or more blocks than a table."""
        return all(
            span.start >= span.sequence.pictured and len(span.sequence.blocks) <= self._most_blocks
            for span in spans
        )

    def _computed(self, rows: int, step: Step) -> torch.Tensor | None:
        """Logits [kept, vocabulary] of a step of so many rows, valid until the next step.

        None where the plain step is worth more.
        """
        count = next(count for count in self._counts if count >= rows)
        if count not in self.steps:
            return self._first(count, step)
        captured = self.steps[count]
        self._fill(captured.inputs, step)
        captured.graph.replay()
        return captured.logits[: step.kept]

    def _first(self, count: int, step: Step) -> torch.Tensor:
        """The logits of a plain step, which the captured step must give as well."""
        plain = self._plain(step)
        try:
            inputs = self._inputs(count)
            self._fill(inputs, step)
            captured = Captured(inputs, *self._capture(inputs))
            captured.graph.replay()
            difference = (captured.logits[: step.kept].float() - plain.float()).abs().mean()
            if not difference <= _TOLERANCE * plain.float().abs().mean():
                raise RuntimeError(f"the logits differ by {float(difference):.3g} in the mean")
            if self._is_worth(captured, step):
                self.steps[count] = captured
            elif not self.steps:
                # NOTE: CUDA's allocator gives a pool up with its last graph, and refuses the next graph there.
                self._memory = None
        except Exception as error:
            # NOTE: memory that is short is a reason too, as the plain step needs less.
            end_if_broken(error)
            name, why = type(self._model).__name__, foreign.line_of(error)
            log.warning("%s runs without captured %s: %s", name, self.kind, why)
            self._works = False
            self.steps.clear()
            # NOTE: the refused step has written its keys to the cache.
            return self._plain(step)
        return plain

    def _plain(self, step: Step) -> torch.Tensor:
        device = self._model.device
        plan = plan_of(step.spans, self._attention.block_tokens, device, step.unread)
        keep = 0 if step.rows is None else sent(np.array(step.rows, np.int64), device)
        return packed_pass(self._model, self._attention, plan, keep)

    def _capture(self, inputs: Inputs) -> tuple[Graph, torch.Tensor]:
        """The graph of inputs that hold a step, and its logits.

        Raises RuntimeError for a model that waits for the device, or that allocates too much.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._model.device)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # NOTE: kernels are compiled and libraries get their memory in a first pass, which capturing forbids.
            packed_pass(self._model, self._attention, inputs.plan, inputs.keep)
            graph.capture_begin(self._memory, capture_error_mode="thread_local")
            try:
                logits = packed_pass(self._model, self._attention, inputs.plan, inputs.keep)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph, logits

    def _lay(
        self,
        inputs: Inputs,
        numbers: NDArray[np.int64],
        table: NDArray[np.int32],
        unknown: Sequence[tuple[int, Choice]],
        unread: Unread | None,
    ) -> None:
        """Send `numbers` [5, rows] and `table` [sequences, some pages]; `unknown` rows get tokens of the device."""
        device = inputs.numbers.device
        inputs.numbers.copy_(sent(numbers, device))
        inputs.table[: len(table), : table.shape[1]].copy_(sent(table, device))
        if unknown:
            assert unread is not None
            unread.lay(inputs.numbers[0], [row for row, _ in unknown], [sequence for _, sequence in unknown])


class CapturedSteps(Captures):
    """The captured steps of single tokens."""

    kind = "steps"

    def __init__(self, model: Any, attention: PagedAttention, most_sequences: int, most_blocks: int) -> None:
        """For at most `most_sequences` sequences of at most `most_blocks` blocks each."""
        super().__init__(model, attention, row_counts(most_sequences), most_blocks)

    def logits(self, spans: Sequence[Span], unread: Unread | None = None) -> torch.Tensor | None:
        """Logits [spans, vocabulary], valid until the next step; None for a step that is not captured.

        `unread` are tokens that the host does not know.
        """
        are_single = len(spans) <= self._counts[-1] and all(span.stop - span.start == 1 for span in spans)
        if not (self._works and are_single and self._fits(spans)):
            return None
        return self._computed(len(spans), Step(spans, unread))

    def _inputs(self, count: int) -> Inputs:
        device = self._model.device
        numbers = torch.zeros(5, count, dtype=torch.int64, device=device)
        table = torch.zeros(count, self._most_blocks, dtype=torch.int32, device=device)
        ids, positions, slots, lengths, is_long = numbers.unbind()
        decoding, far = DecodeLayout(table, lengths), Lengths((), is_long)
        plan = Plan(ids, positions, slots, count, count, [], [], (), decoding=decoding, lengths=far)
        return Inputs(numbers, table, plan)

    def _fill(self, inputs: Inputs, step: Step) -> None:
        """Lay the tokens and blocks of a step in, the last sequence again in the rows that are left."""
        spans, size, count = step.spans, self._attention.block_tokens, inputs.numbers.shape[1]
        tables = [span.sequence.block_table() for span in spans]
        table = np.zeros((count, max(map(len, tables))), np.int32)
        numbers = np.empty((5, count), np.int64)
        rope = self._attention.rope
        unknown: list[tuple[int, Choice]] = []
        for row, (span, blocks) in enumerate(zip(spans, tables, strict=True)):
            table[row, : len(blocks)] = blocks
            at = span.start
            slot, is_long = blocks[at // size] * size + at % size, rope is not None and rope.is_long(span)
            position, tokens = at + span.sequence.shift, span.sequence.tokens
            if at == len(tokens):
                unknown.append((row, span.sequence))
            token = 0 if at == len(tokens) else tokens[at]
            numbers[:, row] = token, position, slot, span.stop, is_long
        last = len(spans) - 1
        if unknown and unknown[-1][0] == last:
            unknown += [(row, unknown[-1][1]) for row in range(last + 1, count)]
        numbers[:, last + 1 :], table[last + 1 :] = numbers[:, last, None], table[last]
        self._lay(inputs, numbers, table, unknown, step.unread)


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
