"""A fake family that scores: the score of an item is the last word of its text, read as a number.

Everything else, the commands that make it fail included, is as in `tests.fakes.adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ipc.wire.messages import Call, InputItem, ScoreCall
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import AdapterSpec, ItemFailure, Prepared


class FakeScorer(FakeAdapter):
    """Scores that the texts say; the tokens of a pair are those of both texts."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="fake_scorer",
        operations=("score",),
        inputs=("text",),
        outputs=("score",),
        options=FakeAdapter.spec.options,
    )

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """The query stands before each text."""
        query = call.query.text if isinstance(call, ScoreCall) else ""
        return super().prepare([InputItem(f"{query} {item.text}") for item in items], call)

    def score(self, batch: Any) -> torch.Tensor:
        """fp32 [pairs]."""
        items, tokens = batch
        self.run([text for text, _ in items], tokens)
        return torch.tensor([math.nan if "#nan" in text else _number(text) for text, _ in items])


def _number(text: str) -> float:
    """The last word as a number, or 0."""
    try:
        return float(text.split()[-1])
    except (ValueError, IndexError):
        return 0.0
