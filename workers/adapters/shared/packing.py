"""Lay token sequences of different lengths into one row without padding.

1. `pack` sorts the sequences by length, longest first, and concatenates them; positions restart at each sequence.
2. A `Layout` holds the place of each sequence; runs of equal lengths let CPU attention work on rectangles.
3. `restore` maps results back to the order in which the sequences were given.

Families that pad compute their `padding_ratio` by `padding_share` or `masked_share`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Int64Array = npt.NDArray[np.int64]

_PARTS = 4
"""Sequences over the token budget run in parts of at most a quarter of the budget."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenized text.

    ids    int64 [tokens]
    types  int64 [tokens] segment ids, or None where all are 0
    skip   leading tokens that pooling leaves out: the prompt, in models that pool without it
    seen   leading tokens that attention sees, or None for all; the other tokens get vectors but influence no token
    """

    ids: Int64Array
    types: Int64Array | None = None
    skip: int = 0
    seen: int | None = None


class Positions(NamedTuple):
    """How a model numbers the tokens of a sequence: from `offset` on, each token by one more than the token before.

    Tokens with the id `skipped` are not counted, wherever they stand. Their position is the one before `offset`.
    """

    offset: int = 0
    skipped: int | None = None


COUNTED = Positions()
"""All tokens are counted, from 0 on."""


class Run(NamedTuple):
    """`rows` neighbouring sequences of `length` tokens each; the first begins at token `start` of the row."""

    start: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where N sequences lie in a row of T tokens.

    cu_seq_lens  int32 [N + 1], token offsets of the sequences, with T at the end
    first, last  int64 [N], index of each sequence's first and last token
    max_len      longest sequence, tokens
    runs         the sequences again, grouped by equal length
    seen         int64 [N] leading tokens of each sequence that attention sees, or None where all tokens are seen
    partial      first tokens of the runs with unseen tokens
    masks        cache of attention: masks of this batch by shape or place
    """

    cu_seq_lens: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    max_len: int
    runs: tuple[Run, ...]
    seen: torch.Tensor | None = None
    partial: frozenset[int] = frozenset()
    masks: dict[Any, torch.Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Self:
        """The same layout with its tensors on `device`."""
        return replace(
            self,
            cu_seq_lens=self.cu_seq_lens.to(device, non_blocking=True),
            first=self.first.to(device, non_blocking=True),
            last=self.last.to(device, non_blocking=True),
            seen=None if self.seen is None else self.seen.to(device, non_blocking=True),
            masks={},
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One batch as a single row of T tokens.

    ids, positions  int64 [1, T]
    types           int64 [1, T] segment ids, or None where all are 0
    skips           int64 [N] tokens left out of pooling, in packed order, or None where all are 0
    restore         int64 [N]: the sequence given as number i is number restore[i] in the row
    """

    ids: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor | None
    skips: torch.Tensor | None
    restore: torch.Tensor
    layout: Layout

    def to(self, device: torch.device) -> Self:
        """The same batch on `device`; from pinned memory the copies do not block."""
        if device == self.ids.device:
            return self
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            types=None if self.types is None else self.types.to(device, non_blocking=True),
            skips=None if self.skips is None else self.skips.to(device, non_blocking=True),
            restore=self.restore.to(device, non_blocking=True),
            layout=self.layout.to(device),
        )


def pack(
    sequences: Sequence[TokenSequence],
    *,
    positions: Positions = COUNTED,
    types: bool = False,
    pin: bool = False,
) -> PackedBatch:
    """Concatenate `sequences` (at least one, none empty) into one row.

    With `types` the row has segment ids also where all are 0. `pin` puts the tensors into page-locked memory for copies
    to CUDA.
    """
    given = np.fromiter((len(sequence.ids) for sequence in sequences), dtype=np.int64, count=len(sequences))
    if not given.size or given.min() == 0:
        raise ValueError("a batch needs at least one sequence and every sequence at least one token")
    order = np.argsort(-given, kind="stable")
    lens = given[order]
    ends = np.cumsum(lens)
    starts = ends - lens
    chosen = [sequences[index] for index in order]
    ids = np.concatenate([sequence.ids for sequence in chosen])
    restore = np.empty_like(order)
    restore[order] = np.arange(order.size)
    runs, seen = _runs(lens, starts), _seen(chosen)

    def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
        values = torch.from_numpy(array)
        return values.pin_memory() if pin else values

    return PackedBatch(
        ids=tensor(ids[None]),
        positions=tensor(_positions(ids, starts, lens, positions)[None]),
        types=_optional(tensor, _types(chosen, always=types)),
        skips=_optional(tensor, _skips(chosen)),
        restore=tensor(restore),
        layout=Layout(
            cu_seq_lens=tensor(np.concatenate(([0], ends)).astype(np.int32)),
            first=tensor(starts),
            last=tensor(ends - 1),
            max_len=int(lens[0]),
            runs=runs,
            seen=_optional(tensor, seen),
            partial=_partial(runs, lens, seen),
        ),
    )


def section(batch: PackedBatch, runs: Sequence[Run]) -> PackedBatch:
    """The sequences of some neighbouring runs as a row of their own. `skips` and `restore` stay those of the batch."""
    start, count = runs[0].start, sum(run.rows for run in runs)
    stop = runs[-1].start + runs[-1].rows * runs[-1].length
    layout = batch.layout
    before = sum(run.rows for run in layout.runs if run.start < start)
    own = slice(before, before + count)
    return replace(
        batch,
        ids=batch.ids[:, start:stop],
        positions=batch.positions[:, start:stop],
        types=None if batch.types is None else batch.types[:, start:stop],
        layout=Layout(
            cu_seq_lens=layout.cu_seq_lens[before : before + count + 1] - start,
            first=layout.first[own] - start,
            last=layout.last[own] - start,
            max_len=runs[0].length,
            runs=tuple(run._replace(start=run.start - start) for run in runs),
            seen=None if layout.seen is None else layout.seen[own],
            partial=frozenset(place - start for place in layout.partial if start <= place < stop),
        ),
    )


def filled(batch: PackedBatch, pad_id: int, position_offset: int) -> PackedBatch:
    """Append sequences of one token, up to the next of few sizes: any size to 32, then 16 sizes per doubling.

    oneDNN makes and keeps a program for each number of rows, half a megabyte for each shape of layer. The new sequences
    stand only in `runs`, for attention; pooling does not see them.
    """
    tokens = batch.ids.shape[1]
    spare = -tokens % (1 << max(0, (tokens - 1).bit_length() - 5))
    if not spare:
        return batch
    return replace(
        batch,
        ids=F.pad(batch.ids, (0, spare), value=pad_id),
        positions=F.pad(batch.positions, (0, spare), value=position_offset),
        types=None if batch.types is None else F.pad(batch.types, (0, spare)),
        layout=replace(batch.layout, runs=(*batch.layout.runs, Run(tokens, spare, 1))),
    )


def divided(tokens: Sequence[int], budget: int) -> list[slice]:
    """Divide sequences of these lengths into neighbours that run together: one part if all fit `budget` tokens.

    Otherwise parts of at most a quarter of the budget, so that other models run in between. A longer sequence is a part
    of its own.
    """
    most = budget if sum(tokens) <= budget else budget // _PARTS
    parts, start, taken = [], 0, 0
    for at, count in enumerate(tokens):
        if at > start and taken + count > most:
            parts.append(slice(start, at))
            start, taken = at, 0
        taken += count
    if tokens:
        parts.append(slice(start, len(tokens)))
    return parts


def _optional(tensor: Any, array: Int64Array | None) -> torch.Tensor | None:
    """`tensor(array)`, or None for None."""
    return None if array is None else tensor(array)


def _positions(ids: Int64Array, starts: Int64Array, lens: Int64Array, rule: Positions) -> Int64Array:
    """Positions of the tokens of a row, int64 [T]."""
    skipped = ids == rule.skipped if rule.skipped is not None else None
    if skipped is None or not skipped.any():
        return np.arange(len(ids), dtype=np.int64) - np.repeat(starts - rule.offset, lens)
    counted = np.cumsum(~skipped)
    before = np.where(starts > 0, counted[starts - 1], 0)
    return np.where(skipped, rule.offset - 1, counted - np.repeat(before, lens) + rule.offset - 1)


def _types(chosen: Sequence[TokenSequence], *, always: bool) -> Int64Array | None:
    """Segment ids of the row, or None where no sequence has any and the row needs none."""
    if not always and all(sequence.types is None for sequence in chosen):
        return None
    rows = [np.zeros_like(sequence.ids) if sequence.types is None else sequence.types for sequence in chosen]
    return np.concatenate(rows)[None]


def _skips(chosen: Sequence[TokenSequence]) -> Int64Array | None:
    """Skipped tokens per sequence, or None where nothing is skipped."""
    skips = np.fromiter((sequence.skip for sequence in chosen), dtype=np.int64, count=len(chosen))
    return skips if skips.any() else None


def _seen(chosen: Sequence[TokenSequence]) -> Int64Array | None:
    """Tokens that attention sees per sequence, or None where attention sees all tokens."""
    if all(sequence.seen is None for sequence in chosen):
        return None
    return np.array([len(one.ids) if one.seen is None else one.seen for one in chosen], dtype=np.int64)


def _partial(runs: Sequence[Run], lens: Int64Array, seen: Int64Array | None) -> frozenset[int]:
    """First tokens of the runs with unseen tokens."""
    if seen is None:
        return frozenset()
    hidden, at, starts = seen < lens, 0, set()
    for run in runs:
        if hidden[at : at + run.rows].any():
            starts.add(run.start)
        at += run.rows
    return frozenset(starts)


def _runs(lens: Int64Array, starts: Int64Array) -> tuple[Run, ...]:
    """Group sorted lengths into runs of equal length."""
    heads = np.concatenate(([0], np.flatnonzero(np.diff(lens)) + 1))
    counts = np.diff(np.concatenate((heads, [lens.size])))
    return tuple(map(Run, starts[heads].tolist(), counts.tolist(), lens[heads].tolist()))


def padding_share(tokens: int, places: int) -> float:
    """Share of padding, 0 to 1, in `places` that hold `tokens`; 0 without places."""
    return 1 - tokens / places if places else 0.0


def masked_share(masks: Iterable[torch.Tensor], beside: int = 0) -> float:
    """Share of padding in masks on the host that are 1 at tokens; `beside` more tokens run without padding."""
    every_mask = list(masks)
    tokens, places = sum(int(mask.sum()) for mask in every_mask), sum(mask.numel() for mask in every_mask)
    return padding_share(tokens + beside, places + beside)
