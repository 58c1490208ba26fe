"""Checkpoints of compressed-tensors: what config.json and the headers of the weight files say of each weight.

A checkpoint has groups of layers, each with bits, scales and a form of storage. Which group a layer belongs to is told
by patterns over names and classes of modules. They are not read: each layer has the tensors of one of the groups, and
tensors say so with more certainty than patterns of a file that may come from anybody.

Let a linear layer have `inner` inputs and `outer` outputs:

- `pack-quantized`: `weight_packed` int32 [outer, inner * bits / 32], lowest bits first, of numbers from 0 on;
  `weight_shape` has outer and inner. `weight_zero_point` int32 [outer * bits / 32, groups] packs outputs.
- `int-quantized`, `naive-quantized`, `float-quantized`: `weight` int8 or float8 [outer, inner], `weight_zero_point` of
  the shape of the scales.
- `weight_scale` has one number, [outer, 1], [outer, groups], or one number for each block. The numbers are
  (stored - zero point) * scale. `weight_g_idx` int32 [inner] is the group of each input; -1 throughout says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from workers.loading.quantized_parts import (
    FLOATS,
    Layer,
    Part,
    QuantizedRefused,
    Scheme,
    Weight,
    is_size,
    one_of,
    short,
)

METHOD = "compressed-tensors"
_PACKED, _INTEGERS, _FLOATS8 = "pack-quantized", "int-quantized", "float-quantized"
_FORMATS = (_PACKED, _INTEGERS, "naive-quantized", _FLOATS8)
_MIXED = "mixed-precision"
_STRATEGIES = ("tensor", "channel", "group", "block")
_ORDERS = (None, False, "weight", "static", "group", "dynamic")
_WORD_BITS, _BYTE_BITS = 32, 8
ENDS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
"""Ends of tensors that lead to a quantised layer, beside weights of int8 and float8."""


def read(stated: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`, with those of its groups. Raises `QuantizedRefused`."""
    form = one_of(METHOD, stated, "format", (*_FORMATS, _MIXED))
    one_of(METHOD, {"quantization_status": "compressed", **stated}, "quantization_status", ("compressed",))
    for field in ("sparsity_config", "transform_config"):
        entry = stated.get(field) or {}
        if (
            not isinstance(entry, dict)
            or entry.get("format", "dense") != "dense"
            or entry.get("config_groups")
        ):
            raise QuantizedRefused(f"{METHOD}: quantization_config.{field} {short(entry)} is not read")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.config_groups: expected an object of groups, got {short(groups)}"
        )
    choices: list[Scheme] = []
    for name, group in groups.items():
        where = f"config_groups.{short(name)}"
        if not isinstance(group, dict):
            raise QuantizedRefused(
                f"{METHOD}: quantization_config.{where}: expected an object, got {short(group)}"
            )
        # NOTE: a group without weights is about the cache, or about what stands between layers.
        if group.get("weights") is not None:
            choices.append(_group(where, group["weights"], group.get("format") or form))
    if not choices:
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.config_groups: none of {len(groups)} has weights"
        )
    # NOTE: integers in bytes do not say how many bits they have, and a group of 8 bits reads both.
    schemes = tuple(sorted(dict.fromkeys(choices), key=lambda choice: not _is_of_bytes(choice)))
    return Scheme(METHOD, max(choice.bits for choice in schemes), choices=schemes)


def _is_of_bytes(scheme: Scheme) -> bool:
    return scheme.bits == _BYTE_BITS and not scheme.packed and not scheme.floats


def _group(where: str, stated: Any, form: Any) -> Scheme:
    """The scheme of the weights of one group."""
    if not isinstance(stated, dict):
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.{where}.weights: expected an object, got {short(stated)}"
        )
    known = {f"{where}.weights.{field}": value for field, value in stated.items()}

    def chosen(field: str, values: tuple[Any, ...], missing: Any = None) -> Any:
        name = f"{where}.weights.{field}"
        return one_of(METHOD, {name: missing, **known}, name, values)

    form = one_of(METHOD, {f"{where}.format": form}, f"{where}.format", _FORMATS)
    floats = chosen("type", ("int", "float"), "int") == "float"
    if (form == _FLOATS8 and not floats) or (form in (_PACKED, _INTEGERS) and floats):
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.{where}: weights of type {stated.get('type', 'int')} have no format {form}"
        )
    bits = chosen("num_bits", (8,) if floats else (4, 8), 8)
    symmetric = chosen("symmetric", (True,) if floats else (True, False), True)
    chosen("dynamic", (False,), False)
    chosen("actorder", _ORDERS)
    size: Any = stated.get("group_size")
    block: Any = stated.get("block_structure")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = chosen("strategy", _STRATEGIES, default) if stated.get("strategy") is not None else default
    if strategy == "group" and not is_size(size):
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.{where}.weights.group_size: expected a number from 1 on, got {short(size)}"
        )
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and all(map(is_size, block))):
        raise QuantizedRefused(
            f"{METHOD}: quantization_config.{where}.weights.block_structure: expected two numbers from 1 on, got "
            f"{short(block)}"
        )
    return Scheme(
        METHOD,
        bits,
        group=size if strategy == "group" else 0,
        block=tuple(block) if strategy == "block" else (),
        packed=form == _PACKED,
        floats=floats,
        strategy=strategy,
        zeros=not symmetric,
    )


def check(layer: Layer) -> Weight:
    """The weight of a layer, by the first of the groups whose tensors the layer has. Raises `QuantizedRefused`."""
    why: list[QuantizedRefused] = []
    for scheme in layer.scheme.choices:
        try:
            return _checked(layer.by(scheme))
        except QuantizedRefused as error:
            why.append(error)
    if len(why) == 1:
        raise why[0]
    raise QuantizedRefused(f"{why[0]}; and the layer is of no other of {len(why)} groups")


def _checked(layer: Layer) -> Weight:
    scheme = layer.scheme
    parts: dict[str, Part] = {}
    if scheme.packed:
        words, size = (
            layer.take("weight_packed", ("I32",)),
            layer.take("weight_shape", ("I64", "I32"), axes=1),
        )
        layer.fit(size, [2])
        outer, inner = (
            int(each) for each in np.frombuffer(size.data(), "<i8" if size.kind == "I64" else "<i4")
        )
        expected = [outer, -(-inner * scheme.bits // _WORD_BITS)]
        if min(outer, inner) < 1 or words.shape != expected:
            raise QuantizedRefused(
                f"{METHOD}: {short(words.name)} is {words.shape}; weight_shape {[outer, inner]} wants {expected} of "
                f"{scheme.bits} bits"
            )
        parts |= {"weight_packed": words, "weight_shape": size}
    else:
        parts["weight"] = layer.take("weight", ("F8_E4M3",) if scheme.floats else ("I8",))
        outer, inner = parts["weight"].shape
    if scheme.group and inner % scheme.group:
        raise QuantizedRefused(
            f"{METHOD}: {short(next(iter(parts.values())).name)}: {inner} inputs are no multiple of the group_size "
            f"{scheme.group}"
        )
    scale = layer.take("weight_scale", FLOATS, axes=None)
    layer.fit(scale, *_grids(scheme, outer, inner))
    parts["weight_scale"] = scale
    if scheme.zeros or layer.has("weight_zero_point"):
        # NOTE: the format packs zero points of outputs and groups alone.
        can_pack = scheme.packed and scheme.strategy in ("channel", "group")
        zeros = layer.take("weight_zero_point", ("I32", "I8") if can_pack else ("I8",), axes=None)
        packed = [-(-outer * scheme.bits // _WORD_BITS), inner // (scheme.group or inner)]
        layer.fit(zeros, packed if zeros.kind == "I32" else scale.shape)
        parts["weight_zero_point"] = zeros
    if layer.has("weight_g_idx"):
        order = layer.take("weight_g_idx", ("I32", "I64"), axes=1)
        layer.fit(order, [inner])
        parts["weight_g_idx"] = order
    return Weight(parts, (outer, inner), scheme)


def _grids(scheme: Scheme, outer: int, inner: int) -> list[list[int]]:
    """The shapes that scales may have."""
    if scheme.strategy == "tensor":
        return [[1], [], [1, 1]]
    if scheme.strategy == "channel":
        return [[outer, 1], [outer]]
    if scheme.strategy == "group":
        return [[outer, inner // scheme.group]]
    return [[-(-outer // scheme.block[0]), -(-inner // scheme.block[1])]]
