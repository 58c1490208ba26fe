"""Captured steps without CUDA: a replay computes the step again, with attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from workers.generation.attention import PagedAttention, packed_pass
from workers.generation.captured import CapturedSteps, Graph
from workers.generation.heads import Heads
from workers.generation.paged_decode import Decode, DecodeLayout
from workers.generation.step_plan import Plan


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


def attention(block_tokens: int, function: Any = decode) -> PagedAttention:
    """Attention of an engine whose steps `ReplayedSteps` capture; `function` takes the arguments of `decode`."""

    def select_decode(*shape: Any) -> Decode:
        return partial(function, block_tokens)

    return PagedAttention(block_tokens, select_decode=select_decode)


@dataclass
class Replay:
    """The graph of a plan."""

    model: Any
    attention: PagedAttention
    plan: Plan
    logits: torch.Tensor
    count: int = 0

    @torch.inference_mode()
    def replay(self) -> None:
        """Compute the pass again."""
        self.count += 1
        self.logits.copy_(packed_pass(self.model, self.attention, self.plan))


class ReplayedSteps(CapturedSteps):
    """The captured steps of one engine on CPU."""

    def _capture(self, plan: Plan) -> tuple[Graph, torch.Tensor]:
        logits = packed_pass(self._model, self._attention, plan).clone()
        return Replay(self._model, self._attention, plan, logits), logits
