"""The plan of one packed step: which tokens stand in the row, where, and what each layer reads for them.

1. `plan_of` lays the tokens of all spans side by side. Spans of single tokens come first, in groups of similar length.
2. Tokens of pictures get positions of their own where the model counts rows and columns, and the features that replace
   their word embeddings.
3. Every layer reads the plan (`workers.generation.attention`), and keeps in it what the next layer needs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from workers.device.transfer import sent
from workers.generation.flights import Unread
from workers.generation.paged_decode import DecodeLayout
from workers.generation.paged_kernel import Kind, StepLayout
from workers.generation.paged_tiles import TileLayout
from workers.generation.rope import Lengths
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Span
from workers.generation.sight import Border, Pictured, Sight, pictured

_GROW, _NEAR = 1.5, 64
"""Sequences share a group while the longest has at most `_GROW` times the shortest's tokens plus `_NEAR`."""


class Group(NamedTuple):
    """Sequences of similar length that compute one token each; `rows` int64 [n] of the step, None for all from 0."""

    rows: torch.Tensor | None
    spans: Sequence[Span]


class Part(NamedTuple):
    """The tokens `start` to `stop` of a sequence, at `row` of the step; `table` are the sequence's blocks.

    `whole` are pictures that end within the part, and whose tokens see each other in both directions.
    """

    row: int
    start: int
    stop: int
    table: torch.Tensor
    whole: Sequence[Border] = ()


class Space(NamedTuple):
    """Memory for the blocks of a group side by side: `blocks`, and of these `heads` [sequences, heads, width, dim]."""

    blocks: torch.Tensor
    heads: torch.Tensor


Seen = tuple[int, int, int, Sight]
"""Tokens of a prompt with pictures: their row in the step, start and stop in the sequence, and the pictures."""


class View(NamedTuple):
    """What a group reads: its `rows` of the step, and `width` keys of each of its `sequences`.

    `blocks` int64 [sequences * blocks] hold the keys. A single sequence whose blocks lie side by side has the place of
    its first key as `start` instead. `mask` is additive [sequences, 1, 1, width], None if every key is seen. `spaces`
    are kept between the layers, by what a pool holds.
    """

    rows: torch.Tensor | None
    sequences: int
    width: int
    start: int | None
    blocks: torch.Tensor
    mask: torch.Tensor | None
    spaces: dict[tuple[int, tuple[int, int]], Space]


@dataclass(slots=True)
class Plan:
    """One step, laid out once and read by every layer.

    `ids`, `positions` and `slots` int64 [tokens] are the step's tokens, and their places in the sequence and in the
    cache. `positions` are [3, tokens] where pictures of the step have rows and columns, and `pictured` are the features
    of these. `text_places` are there where a proof has moved positions. The first `singles` rows belong to `groups`.
    `views` keeps the block tables and masks by kind of mask, and `layouts` what kernels read, by `PagedKernel.kind`. A
    step that CUDA captures has `decoding` instead of all these, or `tiled` where some of its tokens are of prompts.
    `lengths` are those of a step without spans, for a model with `LengthRope`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tokens: int
    singles: int
    groups: list[Group]
    parts: list[Part]
    spans: Sequence[Span]
    views: dict[Any, list[View]] = field(default_factory=dict)
    layouts: dict[Kind, StepLayout] = field(default_factory=dict)
    decoding: DecodeLayout | None = None
    tiled: TileLayout | None = None
    lengths: Lengths | None = None
    pictured: Pictured | None = None
    text_places: torch.Tensor | None = None

    @property
    def places(self) -> torch.Tensor:
        """int64 [tokens]: places in the text, of a model whose positions count these, but in a proof."""
        return self.positions if self.text_places is None else self.text_places

    @property
    def looks_ahead(self) -> bool:
        """Whether some tokens see later ones."""
        return any(part.whole for part in self.parts)


def plan_of(
    spans: Sequence[Span], block_tokens: int, device: torch.device, unread: Unread | None = None
) -> Plan:
    """The plan of a step; spans of single tokens come first. `unread` are tokens that the host does not know."""
    ids: list[int] = []
    unknown: list[tuple[int, Choice]] = []
    positions: list[int] = []
    slots: list[int] = []
    parts: list[Part] = []
    seen: list[Seen] = []
    for sequence, start, stop in spans:
        blocks, known = sequence.blocks, sequence.tokens[start:stop]
        if not known:
            unknown.append((len(ids), sequence))
            known = [0]
        if stop - start == 1 and not parts and start >= sequence.pictured:
            ids += known
            positions.append(start + sequence.shift)
            slots.append(blocks[start // block_tokens] * block_tokens + start % block_tokens)
            continue
        table = sent(sequence.block_table(), device)
        whole: Sequence[Border] = ()
        if sequence.sight is not None and start < sequence.pictured:
            whole = sequence.sight.whole(start, stop)
            seen.append((len(ids), start, stop, sequence.sight))
        parts.append(Part(len(ids), start, stop, table, whole))
        ids += known
        positions += range(start + sequence.shift, stop + sequence.shift)
        slots += [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(start, stop)]
    singles = len(spans) - len(parts)
    row, at, place = sent(np.array((ids, positions, slots)), device).unbind()
    if unknown:
        assert unread is not None
        unread.lay(row, [at for at, _ in unknown], [sequence for _, sequence in unknown])
    plan = Plan(row, at, place, len(ids), singles, _groups_of(spans[:singles], device), parts, spans)
    if seen:
        plan.positions, plan.pictured = _in_axes(positions, seen, device), pictured(seen, device)
    return plan


def _in_axes(positions: list[int], seen: Sequence[Seen], device: torch.device) -> torch.Tensor:
    """The positions of a step with pictures: int64 [3, tokens] for a model with three axes, else [tokens]."""
    rows = np.array(positions)
    if any(sight.in_axes for *_, sight in seen):
        rows = np.tile(rows, (3, 1))
        for row, start, stop, sight in seen:
            rows[:, row : row + stop - start] = sight.positions_of(start, stop)
    return sent(rows, device)


def _groups_of(singles: Sequence[Span], device: torch.device) -> list[Group]:
    """Sequences of similar length together: padding stays below half of what is read."""
    if not singles:
        return []
    lengths = [span.stop for span in singles]
    if max(lengths) <= _GROW * min(lengths) + _NEAR:
        return [Group(None, singles)]
    order = sorted(range(len(singles)), key=lengths.__getitem__)
    groups, current = [], [order[0]]
    for row in order[1:]:
        if lengths[row] > _GROW * lengths[current[0]] + _NEAR:
            groups.append(current)
            current = []
        current.append(row)
    groups.append(current)
    return [Group(sent(np.array(rows), device), [singles[row] for row in rows]) for rows in groups]
