"""Linear layers for inference whose weights stay quantised in memory.

1. A weight of integers or float8, with scales (`QuantizedWeight`), comes from a file or from numbers (`quantize`).
2. A layer multiplies by the weight: int8 with one scale for each output on a CPU by oneDNN's integers (`Int8Linear`),
   integers that one scale does not reach as two such outputs (`PairedInt8Linear`), 4 bits by torch's packed form
   (`Int4Linear`), all else by numbers that are made anew in each call (`MadeLinear`).
   `proven_linears` chooses the layer, and proves its product.

On a CPU the result of a row is the same bit for bit in any company. Sums of integers are exact, torch's form for 4 bits
takes rows one by one, and numbers made anew meet a fixed number of rows (`ROWS`), some of them empty.

PERF: figures of all these forms, and of those that were not chosen, stand in docs/adr/0081.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INT8, INT4, FP8 = "int8", "int4", "fp8"
ROWS = 32
"""Rows of one product with numbers that are made anew on a CPU."""
TILE_NBYTES = 1 << 20
"""Bytes of numbers that a product on a CPU makes at a time, which stay in the processor's caches; so does a load."""
GROUP = 32
"""Inputs with the same scale where numbers become 4 bits."""
PACKED_GROUPS = (32, 64, 128, 256)
_OUTPUTS, _CUDA_INPUTS = 16, 128
"""What torch's packed forms of 4 bits count in."""
_PACKED_OUTPUTS = 64
"""Outputs of a block of the packed form on a CPU, at most."""
LEAST_STEP = 2.0**-8
"""The least scale of a group of 4 bits, as a part of its largest number, which bfloat16 rounds by as much."""
_MOST_INT8, _MOST_INT4, _MOST_FP8 = 127, 15, 448.0
_PART = 2 * _MOST_INT8
"""A row of numbers is so many times one row of int8, and another, whose numbers need no bound: 16 bits in all."""
_WHOLE = _MOST_INT8 * _PART
_ZERO = 128
"""PERF: with VNNI and without AMX oneDNN multiplies signed rows by reference code, a thousandfold slower."""
_REFERENCE = 256
"""PERF: so many results or fewer oneDNN computes by reference code: 128 x 576 takes 5.7 ms for 2 rows, 0.06 for 3."""
_LEAST_ROW = 2.0**-110
"""A row of int8 is scaled as if one of its numbers had this size: less by `_WHOLE` is no normal float32."""
_BITS: dict[torch.dtype, tuple[torch.dtype, int, int]] = {
    torch.float32: (torch.int32, 20, 120),
    torch.bfloat16: (torch.int16, 4, 120),
    torch.float16: (torch.int16, 7, 8),
}
"""Integers of a type's width, places by which bits of a float8 move there, and the power of two that is lacking."""


@dataclass(slots=True)
class QuantizedWeight:
    """The numbers (values - zeros) * scales of a linear layer, of runs of inputs with the same scale.

    values  int8 or float8_e4m3fn [outer, inner]; those of `int4` are 0 to 15
    scales  float32 [outer, groups]
    zeros   float32 [outer, groups]; None for zeros
    group   inputs of a group; the last one may have fewer
    order   int64 [inner]: which input of a row stands in each column; None where they stand in their order
    """

    kind: str
    values: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def words(self) -> str:
        """The form, as the log tells it."""
        if self.scales.shape[1] == 1:
            return f"{self.kind} with a scale for each output{'' if self.zeros is None else ' and zeros'}"
        return f"{self.kind} in groups of {self.group}"

    def by_outputs(self) -> QuantizedWeight:
        """The numbers, rounded to int8 with one scale for each output; inputs stand in their order."""
        return quantize_runs((part.numbers() for _, part in self.tiles()), self.shape, INT8)

    def in_pairs(self) -> PairedWeight:
        """The numbers as pairs: each output of `by_outputs`, and behind each what its numbers lack."""
        whole = self.by_outputs()
        tiles = zip(self.tiles(), whole.tiles(), strict=True)
        lacking = (part.numbers().sub_(near.numbers()) for (_, part), (_, near) in tiles)
        rest = quantize_runs(lacking, self.shape, INT8)
        values = torch.stack((whole.values, rest.values), 1).flatten(0, 1)
        scales = torch.stack((whole.scales, rest.scales), 1).flatten(0, 1)
        return PairedWeight(INT8, values, scales, self.shape[1])

    def tiles(self, outputs: int = 1) -> Iterator[tuple[int, QuantizedWeight]]:
        """The weight as runs of outputs with the first of each; float32 numbers of a run have `TILE_NBYTES` or less.

        A run has a multiple of `outputs`, but for the last.
        """
        outer, step = self.shape[0], _tile(self.shape[1], outputs)
        each = len(self.values) // outer
        for first in range(0, outer, step):
            run = slice(each * first, each * (first + step))
            zeros = None if self.zeros is None else self.zeros[run]
            yield first, replace(self, values=self.values[run], scales=self.scales[run], zeros=zeros)

    def columns(self) -> Tensor:
        """The numbers in the order of the columns, float32 [outer, inner]."""
        numbers = self.values.float()
        if self.zeros is not None:
            numbers -= _spread(self.zeros, self.group, numbers.shape[1])
        return numbers.mul_(_spread(self.scales, self.group, numbers.shape[1]))

    def numbers(self) -> Tensor:
        """The numbers in the order of the inputs, float32 [outer, inner]."""
        columns = self.columns()
        return (
            columns if self.order is None else torch.empty_like(columns).index_copy_(1, self.order, columns)
        )


class PairedWeight(QuantizedWeight):
    """A weight with two rows of values for each output, the sum of whose numbers are those of the output."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, int]:
        """See the base."""
        return self.values.shape[0] // 2, self.values.shape[1]

    def numbers(self) -> Tensor:
        """See the base."""
        return self.columns().view(*self.shape[:1], 2, -1).sum(1)


def _spread(groups: Tensor, size: int, inner: int) -> Tensor:
    """A value for each input out of those of groups [outer, groups]; of one group, [outer, 1]."""
    return groups if groups.shape[1] == 1 else groups.repeat_interleave(size, 1)[:, :inner]


def _tile(inner: int, outputs: int = 1) -> int:
    """Outputs of `inner` inputs whose float32 numbers have `TILE_NBYTES` or less: a multiple of `outputs`."""
    return max(1, TILE_NBYTES // (4 * inner * outputs)) * outputs


def quantize(numbers: Tensor, kind: str) -> QuantizedWeight:
    """A weight of numbers [outer, inner] as `kind`, rounded to nearest.

    int8 and fp8 have one scale for each output. int4 has a scale and a zero, both of them floats, for each 32 inputs; a
    width that is no multiple of 32 becomes int8.
    """
    return quantize_runs([numbers], (numbers.shape[0], numbers.shape[1]), kind)


def quantize_runs(runs: Iterable[Tensor], shape: tuple[int, int], kind: str) -> QuantizedWeight:
    """A weight of `shape` as `kind`, as `quantize` makes one, out of runs [any, inner] that have its rows in order.

    Raises ValueError for fewer rows or more.
    """
    outer, inner = shape
    if kind == INT4 and inner % GROUP:
        kind = INT8
    whole: QuantizedWeight | None = None
    first = 0
    for run in runs:
        # PERF: a tile at a time, each into its place, as the steps of the whole would take several times its memory.
        for part in run.split(_tile(inner)):
            rows = _quantized(part.float(), kind)
            if whole is None:
                whole = QuantizedWeight(
                    kind,
                    rows.values.new_empty(outer, inner),
                    rows.scales.new_empty(outer, rows.scales.shape[1]),
                    rows.group,
                    None if rows.zeros is None else rows.zeros.new_empty(outer, rows.zeros.shape[1]),
                )
            place = slice(first, first + len(part))
            first = place.stop
            whole.values[place], whole.scales[place] = rows.values, rows.scales
            if whole.zeros is not None and rows.zeros is not None:
                whole.zeros[place] = rows.zeros
    if whole is None or first != outer:
        raise ValueError(f"a weight of {outer} outputs has rows for {first}")
    return whole


def _quantized(numbers: Tensor, kind: str) -> QuantizedWeight:
    outer, inner = numbers.shape
    if kind == INT4:
        groups = numbers.view(outer, -1, GROUP)
        least, most = groups.amin(2), groups.amax(2)
        scales = ((most - least) / _MOST_INT4).maximum(torch.maximum(most, -least) * LEAST_STEP)
        # The packed form holds a scale and the number of value 8 in bfloat16, so values and zeros are made from these.
        scales = scales.clamp_(min=torch.finfo(torch.float32).tiny).bfloat16().float()
        eighth = torch.where(most > least, (least + most + scales) / 2, least)
        zeros = 8 - eighth.bfloat16().float() / scales
        values = groups.div(scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, _MOST_INT4)
        return QuantizedWeight(INT4, values.view(outer, inner).to(torch.int8), scales, GROUP, zeros)
    most = numbers.abs().amax(1, keepdim=True)
    if kind == FP8:
        scales = (most / _MOST_FP8).clamp_(min=torch.finfo(torch.float32).tiny)
        return QuantizedWeight(FP8, (numbers / scales).to(torch.float8_e4m3fn), scales, inner)
    scales = (most / _MOST_INT8).clamp_(min=torch.finfo(torch.float32).tiny)
    return QuantizedWeight(INT8, (numbers / scales).round_().to(torch.int8), scales, inner)


class QuantizedLinear(nn.Module):
    """A linear layer over a quantised weight. `weight` has shape and type of the numbers, and no data."""

    rounding: ClassVar[float] = 0.0
    """How far the logits of two passes over equal texts may lie apart as this form rounds its rows.

    The mean difference of logits, as a part of their mean size; 0 where rows stay as they are. Two passes add up their
    numbers in another order, and the least difference before a layer may become one of its roundings.
    """
    words: ClassVar[str] = ""
    """The product, as the log tells it."""
    weight: Tensor
    bias: Tensor | None
    order: Tensor | None

    def __init__(
        self, stored: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Rows and results are of `dtype`; all is kept on `device`. Raises RuntimeError where torch lacks the form."""
        super().__init__()
        self.out_features, self.in_features = stored.shape
        self.kind, self.dtype, self.device = stored.kind, dtype, device
        # NOTE: no parameter, as the bytes of parameters count as memory.
        self.weight = torch.empty(stored.shape, dtype=dtype, device="meta")
        self.register_buffer("bias", None if bias is None else bias.to(device, dtype), persistent=False)
        order = None if stored.order is None else stored.order.to(device)
        self.register_buffer("order", order, persistent=False)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of data that no buffer holds."""
        return 0

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        flat = rows.reshape(-1, self.in_features)
        if self.order is not None:
            flat = flat.index_select(1, self.order)
        result = self.product(flat)
        if self.bias is not None:
            result += self.bias
        return result.view(*rows.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """Rows [n, in_features] in the order of the columns to a new tensor [n, out_features]."""
        raise NotImplementedError

    @property
    def bare(self) -> Callable[[Tensor], Tensor]:
        """What `forward` computes, for rows [n, in_features] that lie side by side; results are of any float type."""
        return self.product if self.order is None and self.bias is None else self

    def take(self, others: Sequence[Self]) -> None:
        """Add the outputs of `others` behind those of this layer, all of the same `form`.

        Raises RuntimeError where torch lacks what that takes.
        """
        layers = (self, *others)
        self.out_features = sum(layer.out_features for layer in layers)
        self.weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        self._chain("bias", layers, 0)

    @property
    def form(self) -> tuple[object, ...]:
        """What layers have in common that can become one."""
        return type(self), self.kind, self.dtype, self.device, self.in_features, self.bias is None

    def _chain(self, name: str, layers: Sequence[QuantizedLinear], dim: int) -> None:
        """A buffer of all layers in the place of this layer's."""
        if getattr(self, name) is not None:
            setattr(self, name, torch.cat([getattr(layer, name) for layer in layers], dim).contiguous())


class Int8Linear(QuantizedLinear):
    """int8 with one scale for each output, by oneDNN's products of integers on a CPU.

    A row is the sum of two rows of int8, of which one counts 254 times, with a scale of its own. So a row has 16 bits,
    the products are exact, and a result differs from that of the numbers by about 3e-5 of the largest. oneDNN gets
    these rows as uint8 with the zero point 128.
    """

    rounding = 0.02
    words = "int8 with a scale for each output"
    _scales: Tensor

    def __init__(
        self, stored: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(stored, bias, dtype, device)
        self._packed = torch.ops.onednn.qlinear_prepack(stored.values, None)
        self._run = torch.ops.onednn.qlinear_pointwise
        self.register_buffer("_scales", stored.scales.flatten().contiguous(), persistent=False)
        self.register_buffer("_zeros", torch.zeros(len(stored.values), dtype=torch.int32), persistent=False)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the integers in oneDNN's layout."""
        return self.in_features * self.out_features

    def product(self, rows: Tensor) -> Tensor:
        """See the base."""
        count = len(rows)
        rows = rows.float()
        # PERF: a step of few rows takes as long before and behind the product as in it, by the number of calls.
        step = rows.abs().amax(1, keepdim=True).clamp_(min=_LEAST_ROW).mul_(1 / _WHOLE)
        whole = rows / step
        high = (whole * (1 / _PART)).round_()
        low = whole.sub_(high, alpha=_PART).round_()
        parts = torch.cat([high, low]).add_(_ZERO).to(torch.uint8)
        if (lacking := _REFERENCE // len(self._scales) + 1 - 2 * count) > 0:
            parts = F.pad(parts, (0, 0, 0, lacking))
        scaled = parts, 1.0, _ZERO, self._packed, self._scales, self._zeros
        sums = self._run(*scaled, None, 1.0, 0, torch.float32, "none", [], "")
        return torch.add(sums[count : 2 * count], sums[:count], alpha=_PART).mul_(step).to(self.dtype)

    def take(self, others: Sequence[Self]) -> None:
        """See the base."""
        super().take(others)
        layers = (self, *others)
        values = torch.cat([layer._packed.to_dense().t() for layer in layers])
        self._packed = torch.ops.onednn.qlinear_prepack(values, None)
        self._chain("_scales", layers, 0)
        self._chain("_zeros", layers, 0)


class PairedInt8Linear(Int8Linear):
    """A `PairedWeight`: integers in groups that no single scale of an output is near to."""

    words = "int8 with two scales for each output"

    @property
    def packed_nbytes(self) -> int:
        """See the base."""
        return 2 * super().packed_nbytes

    def product(self, rows: Tensor) -> Tensor:
        """See the base."""
        return super().product(rows).view(len(rows), -1, 2).sum(-1)


class Int4Linear(QuantizedLinear):
    """4 bits in groups, by torch's packed products. Rows, scales and sums are rounded to bfloat16."""

    rounding = 0.1
    words = "packed int4"

    def __init__(
        self, stored: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(stored, bias, dtype, device)
        self._group = _packed_group(stored)
        if device.type == "cpu":
            # PERF: packing takes int32, of a tile of outputs here.
            packed = stored.values.new_empty(self.out_features, self.in_features // 2, dtype=torch.uint8)
            for first, part in stored.tiles(_PACKED_OUTPUTS):
                packed[first : first + len(part.values)] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                    part.values.int(), 1
                )
            self._run: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            pairs = stored.values.to(device, torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs[:, ::2] << 4 | pairs[:, 1::2], 8)
            self._run = torch.ops.aten._weight_int4pack_mm
        self.register_buffer("_packed", packed, persistent=False)
        scales = stored.scales
        # The form computes (value - 8) * scale + offset.
        offset = 8 * scales if stored.zeros is None else (8 - stored.zeros) * scales
        both = torch.stack([scales, offset], -1).transpose(0, 1)
        both = both.repeat_interleave(stored.group // self._group, 0).contiguous()
        self.register_buffer("_scales", both.to(device, torch.bfloat16), persistent=False)

    def product(self, rows: Tensor) -> Tensor:
        """See the base."""
        result: Tensor = self._run(
            rows.to(torch.bfloat16).contiguous(), self._packed, self._group, self._scales
        )
        return result.to(self.dtype)

    @property
    def bare(self) -> Callable[[Tensor], Tensor]:
        """See the base. Results are bfloat16."""
        if self.order is not None or self.bias is not None:
            return self
        run, packed, group, scales = self._run, self._packed, self._group, self._scales
        return lambda rows: run(rows.to(torch.bfloat16), packed, group, scales)

    def take(self, others: Sequence[Self]) -> None:
        """See the base."""
        layers = (self, *others)
        if any(layer.out_features % _PACKED_OUTPUTS for layer in layers[:-1]):
            raise RuntimeError(f"outputs of a packed layer are no multiple of {_PACKED_OUTPUTS}")
        super().take(others)
        self._chain("_packed", layers, 0)
        self._chain("_scales", layers, 1)

    @property
    def form(self) -> tuple[object, ...]:
        """See the base."""
        return *super().form, self._group


class MadeLinear(QuantizedLinear):
    """Any form: each call makes the numbers, on a CPU a tile of outputs at a time, and multiplies by them."""

    words = "numbers that each call makes"
    values: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(
        self, stored: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(stored, bias, dtype, device)
        self._group = stored.group
        on_cpu = device.type == "cpu"
        self._bits = _BITS[dtype] if on_cpu and stored.kind == FP8 else None
        lacking = 1.0 if self._bits is None else 2.0 ** self._bits[2]
        self._tile = (
            max(1, TILE_NBYTES // (self.in_features * dtype.itemsize)) if on_cpu else self.out_features
        )
        self.register_buffer("values", stored.values.to(device), persistent=False)
        # NOTE: float16 has no place for most scales, so they stay float32 and the numbers are rounded once.
        self.register_buffer("scales", (stored.scales * lacking).to(device), persistent=False)
        zeros = None if stored.zeros is None else stored.zeros.to(device)
        self.register_buffer("zeros", zeros, persistent=False)

    def product(self, rows: Tensor) -> Tensor:
        """See the base."""
        if self.device.type != "cpu":
            return F.linear(rows, self._numbers(0, self.out_features))
        count = len(rows)
        # PERF: a product of few rows takes as long as one of 32, as making the numbers takes longer than both.
        padded = F.pad(rows, (0, 0, 0, -count % ROWS))
        result = rows.new_empty(len(padded), self.out_features)
        for first in range(0, self.out_features, self._tile):
            numbers = self._numbers(first, first + self._tile).t()
            for row in range(0, len(padded), ROWS):
                result[row : row + ROWS, first : first + self._tile] = padded[row : row + ROWS] @ numbers
        return result[:count]

    def _numbers(self, first: int, last: int) -> Tensor:
        """The numbers of some outputs."""
        values, scales = self.values[first:last], self.scales[first:last]
        if self._bits is None:
            numbers = values.to(torch.float32 if self.dtype == torch.float32 else self.dtype)
        else:
            # PERF: torch takes 15 times as long to make numbers of float8 on a CPU. The sign, exponent and fraction
            # move to their places in the wider type; the exponent's offset is part of the scale.
            width, places, _ = self._bits
            mask = torch.iinfo(width).min | (0x7F << places)
            numbers = values.view(torch.int8).to(width).bitwise_left_shift_(places).bitwise_and_(mask)
            numbers = numbers.view(self.dtype)
        inner, size = self.in_features, self._group
        grouped = scales.shape[1] > 1 and inner % size == 0
        shaped = numbers.view(len(values), -1, size) if grouped else numbers
        for each, apply in (
            (None if self.zeros is None else self.zeros[first:last], "sub_"),
            (scales, "mul_"),
        ):
            if each is not None:
                factor = each[..., None] if grouped else _spread(each, size, inner)
                getattr(shaped, apply)(factor)
        return numbers


def packs(stored: QuantizedWeight, device: torch.device) -> bool:
    """Whether torch's packed form takes a weight of 4 bits."""
    outer, inner = stored.shape
    fits = _packed_group(stored) > 0 and outer % _OUTPUTS == 0
    return fits and (device.type == "cpu" or inner % _CUDA_INPUTS == 0)


def _packed_group(stored: QuantizedWeight) -> int:
    """The largest group of the packed form that makes up a group of the weight; 0 without one."""
    if stored.shape[1] % stored.group:
        return 0
    return max((size for size in PACKED_GROUPS if stored.group % size == 0), default=0)
