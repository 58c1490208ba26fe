"""Chooses the product of a quantised weight, the fastest first, and proves the layer before anybody uses it.

1. int8 with one scale for each output has products of integers on a CPU, 4 bits have torch's packed product. A weight
   that neither takes (integers in groups, as Q8_0 has) becomes int8 with one scale for each output on a CPU, where
   numbers and product stay near those of the file (`NEAR_NUMBERS`), else the sum of two such outputs. All else makes
   numbers in each call.
2. Each layer is compared with the product of its numbers. A layer that fails becomes a `MadeLinear`; where that fails
   too, the load ends with the name of the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.adapters.shared.quantized_linears import (
    FP8,
    INT4,
    INT8,
    ROWS,
    Int4Linear,
    Int8Linear,
    MadeLinear,
    PairedInt8Linear,
    QuantizedLinear,
    QuantizedWeight,
    packs,
)

log = logging.getLogger(__name__)

_PROVEN_ROWS = ROWS + 1
_MANY_OUTPUTS = 512
"""Outputs of a layer that oneDNN does not compute by reference code."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}
"""Largest difference of a result from that of the numbers, as a part of the largest result."""

NEAR_NUMBERS = 3e-2
"""The same for numbers of a file that are rounded to int8 anew: those of bell-shaped weights differ by about 1e-2."""


class LayerNotProven(ValueError):
    """A quantised layer does not give the product of its numbers; the message names the layer."""


def layer_of(
    name: str, stored: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> QuantizedLinear:
    """The layer called `name` over a weight, proven. Raises `LayerNotProven`."""
    states = proof_rows(stored.shape[1], dtype, device)
    wanted = _product(stored, states)
    why = ""
    for form, anew in _forms(stored, device):
        try:
            weight = stored if anew is None else anew(stored)
            result = wanted if anew is None else _product(weight, states)
            layer = form(weight, None, dtype, device)
            why = _difference(layer, states, result)
            if anew is not None:
                why = why or _apart(result, wanted, NEAR_NUMBERS) or _rounded(weight, stored)
        # NOTE: torch says so that a form is not there for this processor; memory that is short says the same of all.
        except (RuntimeError, AttributeError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not why:
            layer.register_buffer("bias", None if bias is None else bias.to(device, dtype), persistent=False)
            return layer
        log.info("%s: %s is not used for %s: %s", name, form.__name__, stored.words, why)
    raise LayerNotProven(
        f"{name}: the quantised layer ({stored.kind}) does not give the product of its numbers: {why}"
    )


def _forms(
    stored: QuantizedWeight, device: torch.device
) -> Iterator[tuple[type[QuantizedLinear], Callable[[QuantizedWeight], QuantizedWeight] | None]]:
    """The forms for a weight, the fastest first, each with what makes the form's own weight of that of the file."""
    if stored.kind == INT4 and packs(stored, device):
        yield Int4Linear, None
    if stored.kind != FP8 and device.type == "cpu":
        if stored.kind == INT8 and stored.zeros is None and stored.scales.shape[1] == 1:
            yield Int8Linear, None
        else:
            yield Int8Linear, QuantizedWeight.by_outputs
            yield PairedInt8Linear, QuantizedWeight.in_pairs
    yield MadeLinear, None


def proof_rows(inner: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows of `inner` numbers, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROVEN_ROWS, inner, generator=generator).to(device, dtype)


def _product(stored: QuantizedWeight, states: Tensor) -> Tensor:
    """The product of rows with the numbers, float32 [rows, outer]."""
    result = states.new_empty(len(states), stored.shape[0], dtype=torch.float32)
    for first, part in stored.tiles():
        numbers = part.numbers().to(states.device)
        result[:, first : first + len(numbers)] = F.linear(states.float(), numbers)
    return result


def _apart(found: Tensor, wanted: Tensor, limit: float) -> str:
    """How results differ by more than `limit` of the largest; empty where they do not."""
    most = float((found.float() - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)
    return "" if most <= limit else f"results differ by {most:.2g} of the largest, the limit is {limit:g}"


def _rounded(found: QuantizedWeight, stored: QuantizedWeight) -> str:
    """How much the numbers of a weight differ from those of the file; empty within `NEAR_NUMBERS` of their mean size.

    NOTE: a number that is far above the others of its output hides what the others lose from a product.
    """
    apart = size = 0.0
    for (_, part), (_, wanted) in zip(found.tiles(), stored.tiles(), strict=True):
        numbers = wanted.numbers()
        size += float(numbers.abs().sum())
        apart += float(numbers.sub_(part.numbers()).abs_().sum())
    share = apart / max(size, 1e-30)
    return (
        ""
        if share <= NEAR_NUMBERS
        else f"numbers differ by {share:.2g} of their size, the limit is {NEAR_NUMBERS:g}"
    )


@torch.inference_mode()
def _difference(layer: QuantizedLinear, states: Tensor, wanted: Tensor) -> str:
    """What is wrong with a layer; empty where its results are those of the numbers, of each row in any company."""
    if isinstance(layer, Int8Linear) and _saturates():
        return "sums of two products of int8 saturate on this processor"
    result = layer(states)
    limit = TOLERANCE[torch.bfloat16 if isinstance(layer, Int4Linear) else layer.dtype]
    if why := _apart(result, wanted, limit):
        return why
    if layer.device.type == "cpu" and not torch.equal(layer(states[-1:]), result[-1:]):
        return "the result of a row depends on the rows beside it"
    return ""


@lru_cache(maxsize=1)
def _saturates() -> bool:
    """Whether the largest products of int8 are wrong, as x86-64 processors without VNNI add two products in 16 bits.

    NOTE: products of random rows with bell-shaped weights lose so little that the proof of a layer may pass.
    """
    values = torch.full((_MANY_OUTPUTS, ROWS), torch.iinfo(torch.int8).max, dtype=torch.int8)
    weight = QuantizedWeight(INT8, values, torch.ones(_MANY_OUTPUTS, 1), ROWS)
    layer, rows = Int8Linear(weight, None, torch.float32, torch.device("cpu")), torch.ones(1, ROWS)
    return bool(_apart(layer(rows), _product(weight, rows), TOLERANCE[torch.float32]))
