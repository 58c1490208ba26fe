"""A language model that stops in the middle of its texts while a file is there, so that a text cannot end meanwhile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.fakes.holding import wait_for_end_of
from workers.adapters.base import LoadContext
from workers.adapters.causal import CausalAdapter
from workers.generation.scheduler import Span

HELD_AFTER = 8
"""Tokens of a text that come while its worker is held."""


def hold_of(run_dir: Path) -> Path:
    """The file that holds the workers of a run directory."""
    return run_dir / "hold"


class HeldAdapter(CausalAdapter):
    """A causal language model as it is, whose steps wait."""

    @classmethod
    def load(cls, context: LoadContext) -> CausalAdapter:
        """Load the model of the directory, then put the wait before each step."""
        adapter = super().load(context)
        engine: Any = adapter.engine
        forward, hold = engine._forward, str(hold_of(Path(os.environ["PENSTOCK_RUN__DIR"])))

        def held(spans: Sequence[Span]) -> torch.Tensor:
            if any(len(span.sequence.tokens) - span.sequence.given >= HELD_AFTER for span in spans):
                wait_for_end_of(hold)
            logits: torch.Tensor = forward(spans)
            return logits

        engine._forward = held
        return adapter
