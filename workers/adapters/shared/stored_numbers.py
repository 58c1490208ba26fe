"""The numbers of quantised weights in safetensors files, and the weights as they stay quantised in memory.

`workers.loading` has held names, types and shapes of the tensors against the format: `quantized_files` those of GPTQ,
AWQ and FP8, `compressed_tensors` those of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.adapters.shared.quantized_linears import FP8, INT4, INT8, QuantizedWeight
from workers.loading import compressed_tensors
from workers.loading.quantized_parts import Part, QuantizedRefused, Scheme, Weight, short
from workers.loading.reading import safe_open

_BITS_INT4 = 4
_BYTE_BITS = 8
_NO_NUMBER = 0x7F
"""The bits of a float8 that is no number, but for its sign."""
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in each four bits of a word, from the lowest on."""


def read(part: Part) -> Tensor:
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
    tensors = {end: read(part) for end, part in weight.parts.items()}
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
    found, inner = _compressed(weight, tensors), weight.shape[1]
    groups = torch.arange(inner) // found.size if found.groups is None else found.groups
    result = found.values.float()
    if found.zeros is not None:
        result -= found.zeros[:, groups]
    return result.mul_(found.scales[:, groups])


def _compressed_as_stored(weight: Weight, tensors: dict[str, Tensor], kind: str) -> QuantizedWeight | None:
    """The weight as `kind`, which is that of the file; None for groups of unequal size.

    Raises `QuantizedRefused` for integers outside of the bits.
    """
    found, inner, order = _compressed(weight, tensors), weight.shape[1], None
    values = found.values
    if found.groups is not None:
        order = torch.argsort(found.groups, stable=True)
        if not torch.equal(found.groups[order], torch.arange(inner) // found.size):
            return None
        values = values[:, order]
    if kind not in (INT4, INT8):
        # NOTE: few types of float8 can be indexed, so their bytes are.
        data = found.values.view(torch.int8)
        data = data if order is None else data[:, order]
        return QuantizedWeight(
            kind, data.contiguous().view(found.values.dtype), found.scales, found.size, None, order
        )
    zeros = found.zeros
    if kind == INT4:
        # NOTE: integers of 4 bits count from 0 in memory, from -8 here.
        values = values + 8
        zeros = 8 + (torch.zeros_like(found.scales) if zeros is None else zeros)
    return QuantizedWeight(kind, values.to(torch.int8).contiguous(), found.scales, found.size, zeros, order)


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
