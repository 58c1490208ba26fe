"""A model that generates text out of quantised weights, which become numbers of the model's precision one by one.

1. `workers.loading.quantized_files` has held names, types and shapes of all tensors against the format.
2. transformers builds the model without memory and asks for each weight once, as for GGUF files. A weight is read,
   turned into numbers in float32, rounded to the model's precision, and its packed form is dropped.
3. What the model lacks, and what has no place in it, is refused as for weights that are no integers.

The products are those of plain numbers: such a checkpoint saves the download, not the memory. With a `Quantizer` linear
layers stay quantised: as they are where the file has the kind that is asked for, else the numbers are quantised anew.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from workers.adapters.base import LoadContext
from workers.adapters.shared import checkpoint
from workers.adapters.shared.building import BUILDING, WeightCount
from workers.adapters.shared.quantized_linears import FP8, INT4, INT8, QuantizedWeight
from workers.adapters.shared.quantizing import Quantizer
from workers.loading.quantized_files import Part, Plan, QuantizedRefused, Scheme, Weight
from workers.loading.reading import safe_open

_BITS_INT4 = 4
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in each four bits of a word, from the lowest on."""


def _table(*, sees: bool) -> Any:
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING


def brings(config: Any, *, sees: bool) -> bool:
    """Whether transformers brings the model of a configuration."""
    return type(config) in _table(sees=sees)


def load(
    context: LoadContext, plan: Plan, config: Any, *, sees: bool, quantizer: Quantizer | None = None
) -> Any:
    """The model in eval mode on the device, in the context's precision; reports the phase "weights".

    Raises `QuantizedRefused` for models of code of their own and for groups that do not exist, `CheckpointError` for
    weights that do not make up the model, and `LayerNotProven`.
    """
    table = _table(sees=sees)
    if plan.scheme is not None and not brings(config, sees=sees):
        raise QuantizedRefused(
            f"{plan.scheme.method}: quantised weights of {type(config).__name__}, which transformers does not bring, "
            "are not read"
        )
    transformers_logging.disable_progress_bar()
    checkpoint.refuse_layers_without_weights(config, context.directory)
    if plan.scheme is not None:
        del config.quantization_config
    count, turn = WeightCount(plan.values, context.progress), threading.Lock()
    with BUILDING:
        chosen, known = _chosen(table[type(config)], config, quantizer)
    made: dict[str, Any] = {}
    for name, weight in plan.quantized.items():
        # A name that the model does not have is one that transformers changes; experts become one tensor.
        keeps = name in chosen or (bool(known) and name not in known and ".experts." not in name)
        assert plan.scheme is not None
        layer = quantizer if keeps else None
        made[name] = _Numbers(name, plan.scheme, weight, context.dtype, count, turn, layer)
    # What a quantised checkpoint leaves as numbers, its maker has left so on purpose.
    plain = quantizer if plan.scheme is None else None
    for name, part in plan.plain.items():
        made[name] = _Plain(part, context.dtype, count, turn, plain if name in chosen else None)
    with BUILDING, count.raising():
        model, report = table[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=made,
            dtype=context.dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    checkpoint.refuse_unfitting(model, report)
    if (context.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(
            str(context.directory), local_files_only=True
        )
    model.config.use_cache = False
    if quantizer is not None:
        quantizer.finish(model, held_only=plan.scheme is not None)
    context.progress("weights", 1.0)
    return model.to(context.device).eval().requires_grad_(False)


def _chosen(factory: Any, config: Any, quantizer: Quantizer | None) -> tuple[frozenset[str], frozenset[str]]:
    """The weights of a model to quantise, and all of its weights; none without a quantizer."""
    if quantizer is None:
        return frozenset(), frozenset()
    with torch.device("meta"):
        model = factory(config)
    return quantizer.names(model), frozenset(model.state_dict())


class _Plain:
    """A tensor that is stored as it is, read when indexed, and quantised where there is a quantizer."""

    def __init__(
        self,
        part: Part,
        dtype: torch.dtype,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
    ) -> None:
        self._part, self._dtype, self._count, self._turn = part, dtype, count, turn
        self._quantizer = quantizer

    def __getitem__(self, index: Any) -> torch.Tensor:
        quantizer, part = self._quantizer, self._part
        # NOTE: a weight of another shape than the model's is told by transformers.
        if quantizer is None or len(part.shape) != 2:
            return self._count.make(lambda: _read(part))
        with self._turn:
            return self._count.make(lambda: quantizer.hold(part.name, _read(part)))


class _Numbers:
    """A quantised weight, made when indexed. All weights of a model take turns by one lock.

    transformers makes weights in threads, of which each would hold a packed weight and its numbers in float32.
    """

    def __init__(
        self,
        name: str,
        scheme: Scheme,
        weight: Weight,
        dtype: torch.dtype,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
    ) -> None:
        self._name, self._scheme, self._weight, self._dtype = name, scheme, weight, dtype
        self._count, self._turn, self._quantizer = count, turn, quantizer

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._turn:
            return self._count.make(self._made)

    def _made(self) -> torch.Tensor:
        quantizer = self._quantizer
        if quantizer is None:
            return dequantized(self._scheme, self._weight).to(self._dtype)
        kept = as_stored(self._scheme, self._weight, quantizer.kind_of(self._name))
        return quantizer.hold(self._name, dequantized(self._scheme, self._weight) if kept is None else kept)


def _read(part: Part) -> torch.Tensor:
    with safe_open(str(part.file), "pt") as file:
        tensor: torch.Tensor = file.get_tensor(part.name)
    return tensor


def dequantized(scheme: Scheme, weight: Weight) -> torch.Tensor:
    """The numbers of a weight, float32 [outer, inner]. Raises `QuantizedRefused` for a group that does not exist."""
    tensors = {end: _read(part) for end, part in weight.parts.items()}
    if scheme.method == "fp8":
        return _from_fp8(tensors["weight"], tensors["scale"].float(), scheme.block)
    packed = _integers(scheme, weight, tensors)
    # PERF: in place, so that a weight takes twice its float32 numbers at most.
    result = packed.values.float()
    packed.values = torch.empty(0)
    result -= packed.zeros[packed.groups]
    result *= packed.scales[packed.groups]
    return result.T.contiguous()


@dataclass
class _Integers:
    """Integers int16 [inner, outer], zero points and scales float32 [groups, outer], the group int64 of each input."""

    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor


def _integers(scheme: Scheme, weight: Weight, tensors: dict[str, torch.Tensor]) -> _Integers:
    """Raises `QuantizedRefused` for a group that does not exist."""
    zeros = _unpacked(tensors["qzeros"], scheme.bits)
    if scheme.method == "awq":
        numbers, zeros = (_in_order(each) for each in (_unpacked(tensors["qweight"], 4), zeros))
    else:
        # Words pack inputs, which are rows: unpacked [outer, inner], then turned.
        numbers = _unpacked(tensors["qweight"].T, scheme.bits).T
        zeros = (zeros + scheme.zero_offset) & ((1 << scheme.bits) - 1)
    inner = weight.shape[1]
    groups = tensors.get("g_idx")
    if groups is None:
        groups = torch.arange(inner) // (scheme.group or inner)
    else:
        groups = groups.long()
        least, most = int(groups.min()), int(groups.max())
        if least < 0 or most >= zeros.shape[0]:
            raise QuantizedRefused(
                f"{scheme.method}: {weight.parts['g_idx'].name} has groups from {least} to {most}, and there are "
                f"{zeros.shape[0]} groups"
            )
    return _Integers(numbers, zeros.float(), tensors["scales"].float(), groups)


def as_stored(scheme: Scheme, weight: Weight, kind: str) -> QuantizedWeight | None:
    """A weight with the integers or float8 of the file; None where the file has another kind, or unequal groups."""
    if kind != {"fp8": FP8}.get(scheme.method, INT4 if scheme.bits == _BITS_INT4 else INT8):
        return None
    tensors, (outer, inner) = {end: _read(part) for end, part in weight.parts.items()}, weight.shape
    if kind == FP8:
        scales = tensors["scale"].float().reshape(-1, 1 if not scheme.block else tensors["scale"].shape[-1])
        scales = scales.repeat_interleave(scheme.block[0] if scheme.block else outer, 0)[:outer]
        return QuantizedWeight(FP8, tensors["weight"], scales, scheme.block[1] if scheme.block else inner)
    packed, size = _integers(scheme, weight, tensors), scheme.group or inner
    order = torch.argsort(packed.groups, stable=True)
    if not torch.equal(packed.groups[order], torch.arange(inner) // size):
        return None
    # NOTE: int8 has no place for 128 and above, so values and zero points of 8 bits are less by 128.
    less = 0 if kind == INT4 else 128
    values = (packed.values[order].T - less).to(torch.int8).contiguous()
    zeros, scales = (each.T.contiguous() for each in (packed.zeros - less, packed.scales))
    is_ordered = torch.equal(order, torch.arange(inner))
    if kind == INT8 and not zeros.any():
        return QuantizedWeight(kind, values, scales, size, None, None if is_ordered else order)
    return QuantizedWeight(kind, values, scales, size, zeros, None if is_ordered else order)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers of words int32 [rows, words], lowest bits first: int16 [rows, words * 32 / bits]."""
    mask = (1 << bits) - 1
    pieces = [((words >> shift) & mask).to(torch.int16) for shift in range(0, 32, bits)]
    return torch.stack(pieces, -1).flatten(1)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """The outputs of AWQ [rows, outer] in their order, by the order in which words hold them."""
    place = sorted(range(len(_AWQ_COLUMNS)), key=_AWQ_COLUMNS.__getitem__)
    return values.unflatten(1, (-1, len(place)))[:, :, place].flatten(1)


def _from_fp8(stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    numbers = stored.float()
    if not block:
        return numbers.mul_(scale.reshape(()))
    for row, scales in enumerate(scale):
        columns = scales.repeat_interleave(block[1])[: numbers.shape[1]]
        numbers[row * block[0] : (row + 1) * block[0]] *= columns
    return numbers
