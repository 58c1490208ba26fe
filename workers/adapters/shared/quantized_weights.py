"""A model that generates text out of quantised weights, which become numbers of the model's precision one by one.

1. `workers.loading` has held names, types and shapes of all tensors against the format: `quantized_files` those of
   GPTQ, AWQ and FP8, `compressed_tensors` those of compressed-tensors.
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
from torch import Tensor
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
from workers.loading import compressed_tensors
from workers.loading.quantized_files import Plan, refuse_numbers
from workers.loading.quantized_parts import Part, QuantizedRefused, Scheme, Weight, short
from workers.loading.reading import safe_open

_BITS_INT4 = 4
_BYTE_BITS = 8
_NO_NUMBER = 0x7F
"""The bits of a float8 that is no number, but for its sign."""
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in each four bits of a word, from the lowest on."""


def _read(part: Part) -> Tensor:
    """A tensor of a file, a view of the mapped file."""
    with safe_open(str(part.file), "pt") as file:
        tensor: Tensor = file.get_tensor(part.name)
    return tensor


def dequantized(weight: Weight) -> Tensor:
    """The numbers of a weight, float32 [outer, inner]. Raises `QuantizedRefused` for float8 that is no number."""
    scheme, tensors = weight.scheme, _tensors(weight)
    if scheme.method == compressed_tensors.METHOD:
        return _compressed_numbers(weight, tensors)
    if scheme.method == "fp8":
        return _from_fp8(tensors["weight"], tensors["scale"].float(), scheme.block)
    packed = _integers(weight, tensors)
    # PERF: in place, so that a weight takes twice its float32 numbers at most.
    result = packed.values.float()
    packed.values = torch.empty(0)
    result -= packed.zeros[packed.groups]
    result *= packed.scales[packed.groups]
    return result.T.contiguous()


@dataclass
class _Integers:
    """Integers int16 [inner, outer], zero points and scales float32 [groups, outer], the group int64 of each input."""

    values: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor


def _integers(weight: Weight, tensors: dict[str, Tensor]) -> _Integers:
    scheme = weight.scheme
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
    return _Integers(numbers, zeros.float(), tensors["scales"].float(), groups.long())


def as_stored(weight: Weight, kind: str) -> QuantizedWeight | None:
    """A weight with the integers or float8 of the file; None where the file has another kind, or unequal groups.

    Raises `QuantizedRefused` for float8 that is no number.
    """
    scheme = weight.scheme
    if kind != _kind(scheme):
        return None
    tensors, (outer, inner) = _tensors(weight), weight.shape
    if scheme.method == compressed_tensors.METHOD:
        return _compressed_as_stored(weight, tensors, kind)
    if kind == FP8:
        scales = tensors["scale"].float().reshape(-1, 1 if not scheme.block else tensors["scale"].shape[-1])
        scales = scales.repeat_interleave(scheme.block[0] if scheme.block else outer, 0)[:outer]
        return QuantizedWeight(FP8, tensors["weight"], scales, scheme.block[1] if scheme.block else inner)
    packed, size = _integers(weight, tensors), scheme.group or inner
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


def _kind(scheme: Scheme) -> str:
    if scheme.method == "fp8" or scheme.floats:
        return FP8
    return INT4 if scheme.bits == _BITS_INT4 else INT8


def _tensors(weight: Weight) -> dict[str, Tensor]:
    """The tensors of a weight by the end of their names. Raises `QuantizedRefused` for float8 that is no number."""
    tensors = {end: _read(part) for end, part in weight.parts.items()}
    if (stored := tensors.get("weight")) is not None and stored.dtype == torch.float8_e4m3fn:
        wrong = int((stored.view(torch.uint8) & _NO_NUMBER == _NO_NUMBER).sum())
        if wrong:
            raise QuantizedRefused(
                f"{weight.scheme.method}: {short(weight.parts['weight'].name)} has {wrong} of {stored.numel()} values "
                "that are no numbers"
            )
    return tensors


def _in_order(values: Tensor) -> Tensor:
    """The outputs of AWQ [rows, outer] in their order, by the order in which words hold them."""
    place = sorted(range(len(_AWQ_COLUMNS)), key=_AWQ_COLUMNS.__getitem__)
    return values.unflatten(1, (-1, len(place)))[:, :, place].flatten(1)


def _from_fp8(stored: Tensor, scale: Tensor, block: tuple[int, ...]) -> Tensor:
    numbers = stored.float()
    if not block:
        return numbers.mul_(scale.reshape(()))
    for row, scales in enumerate(scale):
        columns = scales.repeat_interleave(block[1])[: numbers.shape[1]]
        numbers[row * block[0] : (row + 1) * block[0]] *= columns
    return numbers


@dataclass(slots=True)
class _Compressed:
    """Integers int16 or float8 [outer, inner], scales and zero points float32 [outer, groups], groups int64 [inner].

    `size` is the number of inputs of a group. `groups` is None where inputs stand in the order of the groups.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    size: int
    groups: Tensor | None


def _compressed_numbers(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """The numbers of a weight, float32 [outer, inner]. Raises `QuantizedRefused` for integers outside of the bits."""
    integers, inner = _compressed(weight, tensors), weight.shape[1]
    groups = torch.arange(inner) // integers.size if integers.groups is None else integers.groups
    result = integers.values.float()
    if integers.zeros is not None:
        result -= integers.zeros[:, groups]
    return result.mul_(integers.scales[:, groups])


def _compressed_as_stored(weight: Weight, tensors: dict[str, Tensor], kind: str) -> QuantizedWeight | None:
    """The weight as `kind`, which is that of the file; None for groups of unequal size.

    Raises `QuantizedRefused` for integers outside of the bits.
    """
    integers, inner, order = _compressed(weight, tensors), weight.shape[1], None
    values = integers.values
    if integers.groups is not None:
        order = torch.argsort(integers.groups, stable=True)
        if not torch.equal(integers.groups[order], torch.arange(inner) // integers.size):
            return None
        values = values[:, order]
    if kind not in (INT4, INT8):
        # NOTE: few types of float8 can be indexed, so their bytes are.
        data = integers.values.view(torch.int8)
        data = data if order is None else data[:, order]
        return QuantizedWeight(
            kind, data.contiguous().view(integers.values.dtype), integers.scales, integers.size, None, order
        )
    zeros = integers.zeros
    if kind == INT4:
        # NOTE: integers of 4 bits count from 0 in memory, from -8 here.
        values = values + 8
        zeros = 8 + (torch.zeros_like(integers.scales) if zeros is None else zeros)
    return QuantizedWeight(
        kind, values.to(torch.int8).contiguous(), integers.scales, integers.size, zeros, order
    )


def _compressed(weight: Weight, tensors: dict[str, Tensor]) -> _Compressed:
    scheme, (outer, inner) = weight.scheme, weight.shape
    size = scheme.group or inner
    half = 1 << (scheme.bits - 1)
    if scheme.packed:
        values = _unpacked(tensors["weight_packed"], scheme.bits)[:, :inner] - half
    elif scheme.floats:
        values = tensors["weight"]
    else:
        values = tensors["weight"].to(torch.int16)
        least, most = int(values.min()), int(values.max())
        if least < -half or most >= half:
            raise QuantizedRefused(
                f"{scheme.method}: {short(weight.parts['weight'].name)} has integers from {least} to {most}; of "
                f"{scheme.bits} bits are {-half} to {half - 1}"
            )
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = (_unpacked(zeros.T, scheme.bits)[:, :outer] - half).T
    scales = _grid(tensors["weight_scale"].float(), weight)
    if scheme.strategy == "block":
        size = scheme.block[1]
    zeros = None if zeros is None or not zeros.any() else _grid(zeros.float(), weight)
    groups = tensors.get("weight_g_idx")
    # NOTE: -1 throughout says that inputs stand in their order.
    groups = None if groups is None or bool((groups < 0).all()) else groups.long()
    return _Compressed(values, scales, zeros, size, groups)


def _grid(found: Tensor, weight: Weight) -> Tensor:
    """Numbers of the strategy as [outer, groups]."""
    scheme, outer = weight.scheme, weight.shape[0]
    if scheme.strategy == "tensor":
        return found.reshape(1, 1).repeat(outer, 1)
    if scheme.strategy == "channel":
        return found.reshape(outer, 1).contiguous()
    if scheme.strategy == "block":
        return found.repeat_interleave(scheme.block[0], 0)[:outer].contiguous()
    return found.contiguous()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Integers from 0 on of words int32 [rows, words], lowest bits first: int16 [rows, words * 32 / bits]."""
    data = words.contiguous().view(torch.uint8)
    if bits == _BYTE_BITS:
        return data.to(torch.int16)
    return torch.stack([data & 0xF, data >> 4], -1).flatten(1).to(torch.int16)


def _table(*, sees: bool) -> Any:
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING


def brings(config: Any, *, sees: bool) -> bool:
    """Whether transformers brings the model of a configuration."""
    return type(config) in _table(sees=sees)


def build(
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
        refuse_numbers(plan)
        del config.quantization_config
    count, turn = WeightCount(plan.values, context.progress), threading.Lock()
    with BUILDING:
        chosen, known, shared = _chosen(table[type(config)], config, quantizer, plan)
    weights: dict[str, Any] = {}
    for name, weight in plan.quantized.items():
        # A name that the model does not have is one that transformers changes; experts become one tensor.
        keeps = name in chosen or (bool(known) and name not in known and ".experts." not in name)
        weights[name] = _Numbers(name, weight, context.dtype, count, turn, quantizer if keeps else None)
    # What a quantised checkpoint leaves as numbers, its maker has left so on purpose.
    plain = quantizer if plan.scheme is None else None
    for name, part in plan.plain.items():
        holds = name in chosen or name == shared
        weights[name] = _Plain(part, count, turn, plain if holds else None, is_table=name == shared)
    with BUILDING, count.raising():
        model, report = table[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=weights,
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


def _chosen(
    factory: Any, config: Any, quantizer: Quantizer | None, plan: Plan
) -> tuple[frozenset[str], frozenset[str], str]:
    """The weights of a model to quantise, all of its weights, and the table that is the head too (`table_of`).

    None of them without a quantizer.
    """
    if quantizer is None:
        return frozenset(), frozenset(), ""
    with torch.device("meta"):
        model = factory(config)
    shared = quantizer.table_of(model, plan.plain) if plan.scheme is None else ""
    return quantizer.names(model), frozenset(model.state_dict()), shared


class _Plain:
    """A tensor that is stored as it is, read when indexed, and quantised where there is a quantizer."""

    def __init__(
        self,
        part: Part,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
        *,
        is_table: bool,
    ) -> None:
        """`is_table` is for the table of embeddings that is the head too."""
        self._part, self._count, self._turn = part, count, turn
        self._quantizer, self._is_table = quantizer, is_table

    def __getitem__(self, index: Any) -> torch.Tensor:
        quantizer, part = self._quantizer, self._part
        # NOTE: a weight of another shape than the model's is told by transformers.
        if quantizer is None or len(part.shape) != 2:
            return self._count.make(lambda: _read(part))
        outer, inner = part.shape
        with self._turn:
            if self._is_table:
                # NOTE: the tensor is a view of the mapped file, and belongs to no name here.
                return self._count.make(lambda: quantizer.hold_table((outer, inner), map(_read, (part,))))
            return self._count.make(lambda: quantizer.hold(part.name, _read(part)))


class _Numbers:
    """A quantised weight, made when indexed. All weights of a model take turns by one lock.

    transformers makes weights in threads, of which each would hold a packed weight and its numbers in float32.
    """

    def __init__(
        self,
        name: str,
        weight: Weight,
        dtype: torch.dtype,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
    ) -> None:
        self._name, self._weight, self._dtype = name, weight, dtype
        self._count, self._turn, self._quantizer = count, turn, quantizer

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._turn:
            return self._count.make(self._made)

    def _made(self) -> torch.Tensor:
        quantizer = self._quantizer
        if quantizer is None:
            return dequantized(self._weight).to(self._dtype)
        quantized = as_stored(self._weight, quantizer.kind_of(self._name))
        return quantizer.hold(self._name, dequantized(self._weight) if quantized is None else quantized)
