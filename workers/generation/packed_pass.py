"""The forward pass of one packed step."""

from __future__ import annotations

from typing import Any

import torch

from workers.generation.attention import PagedAttention, Plan


def packed_pass(
    model: Any, attention: PagedAttention, plan: Plan, keep: torch.Tensor | int = 0
) -> torch.Tensor:
    """Logits [rows, vocabulary] of the rows `keep` of a step, int64 [rows]; 0 for all."""
    attention.plan, rope = plan, attention.rope
    if rope is None:
        return _logits(model, plan, keep)
    with rope.applied(plan.lengths or rope.lengths(plan.spans, plan.ids.device)):
        return _logits(model, plan, keep)


def _logits(model: Any, plan: Plan, keep: torch.Tensor | int) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=plan.ids[None],
        position_ids=plan.positions[None],
        # NOTE: without a mask of ones some models look for packed sequences in the positions.
        attention_mask=torch.ones(1, plan.tokens, dtype=torch.long, device=plan.ids.device),
        use_cache=False,
        logits_to_keep=keep,
    ).logits[0]
    return logits
