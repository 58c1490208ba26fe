"""Linear layers that read the same rows, computed as one product: queries, keys and values; gate and up.

`join` puts a `Part` in the place of each layer. The first part that is called with some rows computes the product of
all parts, and the others, which transformers' modules call with the same rows next, take their columns of the result.
The weight of the product is the only one: nothing is kept twice. A call with other rows computes anew, so the numbers
are right whoever calls. `workers.generation.decoder` takes the whole result at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that read the same rows."""


class Joined(nn.Module):
    """The product of several layers; `widths` are the numbers of outputs of each."""

    whole: nn.Module

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.widths = [layer.out_features for layer in layers]
        first = layers[0]
        whole = nn.Linear(first.in_features, sum(self.widths), bias=False, device="meta")
        whole.weight = nn.Parameter(torch.cat([each.weight.detach() for each in layers]), requires_grad=False)
        if first.bias is not None:
            biases = torch.cat([each.bias.detach() for each in layers])
            whole.bias = nn.Parameter(biases, requires_grad=False)
        self.whole = whole
        self._rows: Tensor | None = None
        self._results: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., all outputs]."""
        result: Tensor = self.whole(rows)
        return result

    def part(self, number: int, rows: Tensor) -> Tensor:
        """The outputs of one layer. Once the last layer has taken its outputs nothing is kept."""
        if self._rows is not rows:
            self._rows, self._results = rows, list(self(rows).split(self.widths, dim=-1))
        result = self._results[number]
        if number == len(self.widths) - 1:
            self._rows, self._results = None, []
        return result


class Part(nn.Module):
    """One of the joined layers, as `nn.Linear` for inference; the first part of a product bears the product."""

    def __init__(self, joined: Joined, number: int, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._number, self._first = number, sum(joined.widths[:number])
        if number == 0:
            self.product = joined
        else:
            # NOTE: not as a child. The weight of the product would count once for each part.
            self.__dict__["product"] = joined

    @property
    def weight(self) -> Tensor:
        """The rows of this layer in the weight of the product; without data where the product has none."""
        weight = self.product.whole.weight
        assert isinstance(weight, Tensor)
        return weight[self._first : self._first + self.out_features]

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        result: Tensor = self.product.part(self._number, rows)
        return result


def join(layers: Iterable[Any]) -> int:
    """Join the linear layers in `self_attn` and `mlp` of decoder layers on CPU; returns how many products there are."""
    count = 0
    for layer in layers:
        for parent in (layer.self_attn, layer.mlp):
            for names in SETS:
                if all(_is_plain(getattr(parent, name, None)) for name in names):
                    parts = [getattr(parent, name) for name in names]
                    if len({(part.weight.dtype, part.bias is None) for part in parts}) == 1:
                        _replace(parent, names, parts)
                        count += 1
    return count


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.weight.device.type == "cpu"


def _replace(parent: nn.Module, names: tuple[str, ...], layers: list[nn.Linear]) -> None:
    joined = Joined(layers)
    for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
        setattr(parent, name, Part(joined, number, layer))
