"""Captured steps without CUDA: a replay computes the step again, with attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from workers.generation.attention import PagedAttention, packed_pass
from workers.generation.captured import (
    Captured,
    CapturedPrompts,
    CapturedSteps,
    Captures,
    Graph,
    Inputs,
    Step,
)
from workers.generation.heads import Heads
from workers.generation.paged_decode import Decode, DecodeLayout
from workers.generation.paged_tiles import NOBODY, TileLayout, Tiles


def decode(
    size: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: DecodeLayout,
    heads: Heads,
) -> torch.Tensor:
    """As `PagedDecode` for blocks of `size` tokens, one sequence after another."""
    rows = []
    for row, length in enumerate(layout.lengths.tolist()):
        at = torch.arange(length)
        cells = layout.table[row, at // size].long() * size + at % size
        seen = heads.allows(at[-1:, None], at[None])
        rows.append(heads.masked(q[row : row + 1], keys[cells], values[cells], seen))
    return torch.cat(rows)


def tiles(
    size: int,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: TileLayout,
    heads: Heads,
) -> torch.Tensor:
    """As `PagedTiles` for blocks of `size` tokens, one tile after another. What no tile writes stays unknown."""
    out = q.new_full((*q.shape[:2], values.shape[2]), float("nan"))
    for row, count, start, sequence in layout.tiles.tolist():
        here, at = slice(row, row + count), torch.arange(start + count)
        if sequence == NOBODY:
            out[here] = 0.0
        elif count:
            cells = layout.table[sequence, at // size].long() * size + at % size
            out[here] = heads.masked(
                q[here], keys[cells], values[cells], heads.allows(at[start:, None], at[None])
            )
    return out


def attention(block_tokens: int, function: Any = decode, of_prompts: Any = tiles) -> PagedAttention:
    """Attention of an engine whose steps `ReplayedSteps` and `ReplayedPrompts` capture.

    `function` and `of_prompts` take the arguments of `decode` and `tiles`.
    """

    def select_decode(*shape: Any) -> Decode:
        return partial(function, block_tokens)

    def select_tiles(*shape: Any) -> Tiles:
        return partial(of_prompts, block_tokens)

    return PagedAttention(block_tokens, select_decode=select_decode, select_tiles=select_tiles)


@dataclass
class Replay:
    """The graph of a plan."""

    model: Any
    attention: PagedAttention
    inputs: Inputs
    logits: torch.Tensor
    count: int = 0

    @torch.inference_mode()
    def replay(self) -> None:
        """Compute the pass again."""
        self.count += 1
        self.logits.copy_(packed_pass(self.model, self.attention, self.inputs.plan, self.inputs.keep))


class Replays(Captures):
    """Captures on a CPU: the plain call takes the place of a graph."""

    def _capture(self, inputs: Inputs) -> tuple[Graph, torch.Tensor]:
        logits = packed_pass(self._model, self._attention, inputs.plan, inputs.keep).clone()
        return Replay(self._model, self._attention, inputs, logits), logits


class ReplayedSteps(Replays, CapturedSteps):
    """The captured steps of one engine."""


class ReplayedPrompts(Replays, CapturedPrompts):
    """The captured steps with prompts of one engine, whatever time these take."""

    def _is_worth(self, captured: Captured, step: Step) -> bool:
        return True
