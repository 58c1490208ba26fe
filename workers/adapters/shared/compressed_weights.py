"""The numbers of weights of compressed-tensors, and the weights as they stay quantised in memory.

`workers.loading.compressed_tensors` tells of the tensors and has held their shapes against the scheme of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.adapters.shared.quantized_linears import INT4, INT8, QuantizedWeight
from workers.loading.quantized_parts import QuantizedRefused, Weight, short

_BYTE_BITS = 8


@dataclass(slots=True)
class _Stored:
    """Integers int16 or float8 [outer, inner], scales and zero points float32 [outer, groups], groups int64 [inner].

    `size` is the number of inputs of a group. `groups` is None where inputs stand in the order of the groups.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    size: int
    groups: Tensor | None


def numbers(weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
    """The numbers of a weight, float32 [outer, inner]. Raises `QuantizedRefused` for integers outside of the bits."""
    found, inner = _read(weight, tensors), weight.shape[1]
    groups = torch.arange(inner) // found.size if found.groups is None else found.groups
    result = found.values.float()
    if found.zeros is not None:
        result -= found.zeros[:, groups]
    return result.mul_(found.scales[:, groups])


def stored(weight: Weight, tensors: dict[str, Tensor], kind: str) -> QuantizedWeight | None:
    """The weight as `kind`, which is that of the file; None for groups of unequal size.

    Raises `QuantizedRefused` for integers outside of the bits.
    """
    found, inner, order = _read(weight, tensors), weight.shape[1], None
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


def _read(weight: Weight, tensors: dict[str, Tensor]) -> _Stored:
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
    return _Stored(values, scales, zeros, size, groups)


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
