"""Base of the families that read query and document together and give nothing but a score."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import nn

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, Excess
from workers.adapters.shared.options import OptionReader


class ScoreAdapter(Adapter):
    """A model without vectors.

    `overflows` is what may be done with pairs that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`).
    """

    overflows: ClassVar[Collection[str]] = ("truncate", "error")

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    def check(self, call: Call) -> None:
        """Refuse LoRA, and overflow policies that cannot cut a pair."""
        super().check(call)
        OptionReader(call).check_overflow(self.overflows)


def pair_excess(query: int, pair: int, limit: int) -> Excess:
    """How much of a pair was cut, from the tokens of query and pair with everything around them."""
    if query >= limit:
        return Excess(query, limit, in_query=True)
    return Excess(pair, limit, "with the query")


def texts_of(items: Sequence[InputItem], where: str) -> list[str]:
    """The texts of `items`. Raises `InvalidInput` for one without text; `where` is its JSON path with {}."""
    for index, item in enumerate(items):
        if item.text is None:
            raise InvalidInput(f"{where.format(index)}: missing")
    return [item.text for item in items if item.text is not None]


def activation(name: str) -> nn.Module:
    """Sigmoid or identity by the catalog's name. Raises ValueError for another word."""
    known: dict[str, type[nn.Module]] = {"sigmoid": nn.Sigmoid, "identity": nn.Identity}
    if name not in known:
        raise ValueError(f"unknown activation {name!r}: use {', '.join(known)}")
    return known[name]()


def activated(logits: torch.Tensor, function: nn.Module) -> torch.Tensor:
    """fp32 scores of fp32 logits."""
    scores: torch.Tensor = function(logits.float())
    return scores
