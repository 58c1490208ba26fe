"""Linear layers that read the same rows, computed as one product: queries, keys and values; gate and up.

`join` puts a `Part` in the place of each layer. The first part that is called with some rows computes the product of
all parts, and the others, which transformers' modules call with the same rows next, take their columns of the result.
The weight of the product is the only one: nothing is kept twice. A call with other rows computes anew, so the numbers
are right whoever calls. `workers.generation.decoder` takes the whole result at once.

Plain layers on a CPU are joined here. Whoever has layers of other forms hands `join` a function that merges them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SETS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in one module that read the same rows."""


Merge = Callable[[Sequence[nn.Module]], nn.Module | None]
"""One layer that gives the outputs of several side by side; None where their form has no such layer."""


Product = Callable[[Tensor], Tensor]
"""What a linear layer computes: rows float32 [n, inputs] to [n, outputs] of any float type."""


def bare(layer: Any) -> Product:
    """The product of a linear layer on a CPU without the calls of modules, and without hooks.

    A layer of another form than `nn.Linear` may have a `bare` of its own; else the layer is called as it is.
    """
    # PERF: a module's call and the checks of rows take 30 us of a step whose product takes 75.
    if type(layer) is nn.Linear:
        return partial(F.linear, weight=layer.weight, bias=layer.bias)
    product: Product = layer.bare if hasattr(layer, "bare") else layer
    return product


class Joined(nn.Module):
    """The product of several layers, `whole`; `widths` are the numbers of outputs of each."""

    whole: nn.Module

    def __init__(self, layers: Sequence[Any], whole: nn.Module) -> None:
        super().__init__()
        self.widths = [layer.out_features for layer in layers]
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

    def __init__(self, joined: Joined, number: int, layer: Any) -> None:
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


def join(layers: Iterable[Any], merge: Merge = lambda _: None) -> int:
    """Join the linear layers in `self_attn` and `mlp` of decoder layers on CPU; returns how many products there are.

    `merge` is asked where the layers of a set are not all plain.
    """
    count = 0
    for layer in layers:
        for parent in (layer.self_attn, layer.mlp):
            for names in SETS:
                parts = [part for name in names if (part := getattr(parent, name, None)) is not None]
                if len(parts) < len(names):
                    continue
                whole = merged(parts) if all(map(_is_plain, parts)) else merge(parts)
                if whole is not None:
                    product = Joined(parts, whole)
                    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
                        setattr(parent, name, Part(product, number, part))
                    count += 1
    return count


def _is_plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.weight.device.type == "cpu"


def merged(layers: Sequence[Any]) -> nn.Linear | None:
    """One plain layer with the outputs of several; None for weights of several types, and biases of some only."""
    if len({(layer.weight.dtype, layer.bias is None) for layer in layers}) > 1:
        return None
    first = layers[0]
    outputs = sum(layer.out_features for layer in layers)
    whole = nn.Linear(first.in_features, outputs, bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat([each.weight.detach() for each in layers]), requires_grad=False)
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([each.bias.detach() for each in layers]), requires_grad=False)
    return whole
