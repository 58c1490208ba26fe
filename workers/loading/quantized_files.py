"""Checkpoints of quantised weights: what config.json and the headers of the weight files say of each weight.

1. `read_scheme` reads `quantization_config`: the format (GPTQ, AWQ, FP8, compressed-tensors), bits and size of groups.
2. `plan` finds the tensors that make up each quantised weight, and holds every shape and type against the scheme. No
   weight is read and no model library is imported, so a start can refuse what a load would refuse.
3. `refuse_numbers` reads the small tensors, scales and groups of inputs. Scales are about a thirtieth of the weights.

Let a linear layer have `inner` inputs and `outer` outputs, and let a group be a run of inputs with the same scale:

- GPTQ: `qweight` int32 [inner * bits / 32, outer] packs inputs, lowest bits first; `qzeros` int32
  [groups, outer * bits / 32] packs outputs; `scales` [groups, outer]. `g_idx` int32 [inner] is the group of each input.
  Zero points are stored minus one, but in `checkpoint_format` gptq_v2.
- AWQ (version gemm): `qweight` int32 [inner, outer / 8] and `qzeros` int32 [groups, outer / 8] pack outputs, in the
  order 0 2 4 6 1 3 5 7; `scales` [groups, outer].
- FP8: `weight` float8 [outer, inner] with one `weight_scale` or `weight_scale_inv`, or with a `weight_scale_inv` for
  each block of `weight_block_size`. Both are factors of the stored numbers.
- compressed-tensors: `workers.loading.compressed_tensors`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workers.loading import compressed_tensors
from workers.loading.quantized_parts import (
    FLOATS,
    Layer,
    Part,
    QuantizedRefused,
    Scheme,
    Weight,
    group_of,
    is_size,
    one_of,
    short,
)
from workers.loading.stored_files import DamagedWeightsError, placed_tensors

OWN_WAY = ("mxfp4",)
"""Formats that transformers turns into numbers itself."""
_SERVED = "gptq, awq (version gemm), fp8, compressed-tensors"
_WORD_BITS = 32
_UNUSED = tuple(
    f".{what}_{end}"
    for what in ("input", "output", "activation", "q", "k", "v")
    for end in ("scale", "zero_point")
)
"""Ends of what belongs to activations and caches, which numbers of the model's own precision do without."""
_SMALL = ("I8", "U8", "F8_E4M3", "F8_E5M2")
"""Types of weights that need a scale."""
_MOST_CONFIG_BYTES = 16 << 20
_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits that are all set in what is no finite number."""


class Plan(NamedTuple):
    """The weights of a checkpoint by the names that they have as numbers: quantised ones, and others as they are.

    `scheme` is None where no weight is quantised.
    """

    scheme: Scheme | None
    quantized: dict[str, Weight]
    plain: dict[str, Part]

    @property
    def values(self) -> int:
        """Numbers in all weights."""
        packed = sum(prod(weight.shape) for weight in self.quantized.values())
        return packed + sum(prod(part.shape) for part in self.plain.values())


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None without one, and for formats that transformers reads (`OWN_WAY`).

    Raises `QuantizedRefused`.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise QuantizedRefused(f"config.json: quantization_config: expected an object, got {short(stated)}")
    method = stated.get("quant_method")
    if method in OWN_WAY:
        return None
    readers = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, compressed_tensors.METHOD: compressed_tensors.read}
    if not isinstance(method, str) or method not in readers:
        raise QuantizedRefused(
            f"config.json: quantization_config.quant_method {short(method)} is not read; read are {_SERVED}. Name the "
            "model that was quantised, or the same model in GGUF"
        )
    return readers[method](stated)


def _gptq(stated: Mapping[str, Any]) -> Scheme:
    bits = one_of("gptq", stated, "bits", (4, 8))
    form = one_of("gptq", {"checkpoint_format": "gptq", **stated}, "checkpoint_format", ("gptq", "gptq_v2"))
    dynamic = stated.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise QuantizedRefused(
            f"gptq: quantization_config.dynamic: expected an object of layers, got {short(dynamic)}"
        )
    differing = [name for name in dynamic if not str(name).startswith("-:")]
    if differing:
        raise QuantizedRefused(
            f"gptq: quantization_config.dynamic: layers with bits of their own are not read, first "
            f"{short(differing[0])}"
        )
    ordered = one_of("gptq", {"desc_act": False, **stated}, "desc_act", (False, True))
    return Scheme("gptq", bits, group_of("gptq", stated, "group_size"), (), ordered, int(form == "gptq"))


def _awq(stated: Mapping[str, Any]) -> Scheme:
    bits = one_of("awq", stated, "bits" if "bits" in stated else "w_bit", (4,))
    version = stated.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise QuantizedRefused(f"awq: quantization_config.version {short(version)} is not read; read is gemm")
    one_of("awq", {"zero_point": True, **stated}, "zero_point", (True,))
    return Scheme(
        "awq", bits, group_of("awq", stated, "group_size" if "group_size" in stated else "q_group_size")
    )


def _fp8(stated: Mapping[str, Any]) -> Scheme:
    one_of("fp8", {"fmt": "e4m3", **stated}, "fmt", ("e4m3", "float8_e4m3fn"))
    block = stated.get("weight_block_size") or ()
    if block and not (isinstance(block, list) and len(block) == 2 and all(map(is_size, block))):
        raise QuantizedRefused(
            f"fp8: quantization_config.weight_block_size: expected two numbers from 1 on, got {short(block)}"
        )
    return Scheme("fp8", 8, block=tuple(block))


def read_plan(directory: Path) -> Plan | None:
    """The plan of a directory, None where its weights are not quantised. Raises `QuantizedRefused` and OSError."""
    scheme = read_scheme(stated_config(directory))
    return None if scheme is None else plan(scheme, sorted(directory.glob("*.safetensors")))


def stated_config(directory: Path) -> dict[str, Any]:
    """The object in config.json; empty without the file, and for what is no object.

    Raises `QuantizedRefused` for a file that is no JSON, and OSError.
    """
    path = directory / "config.json"
    if not path.is_file():
        return {}
    with path.open("rb") as stream:
        data = stream.read(_MOST_CONFIG_BYTES + 1)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise QuantizedRefused("config.json: no JSON") from error
    return config if isinstance(config, dict) else {}


def plain_plan(directory: Path) -> Plan | None:
    """The weights of a directory whose weights are numbers; None without safetensors files, or for a format of
    `OWN_WAY`. Raises `QuantizedRefused` for a damaged file, and OSError.
    """
    files = sorted(directory.glob("*.safetensors"))
    is_plain = not stated_config(directory).get("quantization_config")
    return Plan(None, {}, _parts(files)) if files and is_plain else None


def _parts(files: list[Path]) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for file in files:
        try:
            stored, start = placed_tensors(file)
        except DamagedWeightsError as error:
            raise QuantizedRefused(str(error)) from error
        parts |= {
            name: Part(name, file, tensor.shape, tensor.kind, start + tensor.begin)
            for name, tensor in stored.items()
        }
    return parts


def plan(scheme: Scheme, files: list[Path]) -> Plan:
    """The weights in `files`. Raises `QuantizedRefused` for tensors that do not fit the scheme, and OSError."""
    parts = _parts(files)
    quantized: dict[str, Weight] = {}
    used: set[str] = set()
    # NOTE: an incomplete layer may lack any of its tensors, so each of them leads to the layer.
    ends, check = _LAYERS[scheme.method]
    for base in sorted(
        {
            name.rpartition(".")[0]
            for name, part in parts.items()
            if name.rpartition(".")[2] in ends or (name.endswith(".weight") and part.kind in _SMALL)
        }
    ):
        weight = _bounded(check(Layer(scheme, base, parts)))
        quantized[f"{base}.weight"] = weight
        used |= {part.name for part in weight.parts.values()}
        used |= {f"{base}.g_idx"} if scheme.method == "gptq" else set()
    plain = {name: part for name, part in parts.items() if name not in used and not name.endswith(_UNUSED)}
    strange = next((part for part in plain.values() if part.kind in _SMALL), None)
    if strange is not None:
        raise QuantizedRefused(f"{scheme.method}: {short(strange.name)} is {strange.kind} without a scale")
    twice = sorted(quantized.keys() & plain.keys())
    if twice:
        raise QuantizedRefused(f"{scheme.method}: {short(twice[0])} stands beside its quantised form")
    if not quantized:
        raise QuantizedRefused(
            f"{scheme.method}: none of the {len(parts)} tensors in safetensors files is a quantised weight, though "
            "config.json says so"
        )
    return Plan(scheme, quantized, plain)


def _bounded(weight: Weight) -> Weight:
    """The weight with groups and blocks that are no larger than the weight is.

    Numbers of a group are repeated for all of its inputs, and config.json may state a size that fits no memory.
    """
    scheme, inner = weight.scheme, weight.shape[1]
    block = tuple(map(min, scheme.block, weight.shape))
    return weight._replace(scheme=dataclasses.replace(scheme, group=min(scheme.group, inner), block=block))


def _packed(layer: Layer, shape: Callable[[int, int, int], tuple[int, int]]) -> Weight:
    """A weight of packed integers; `shape` gives outer and inner by those of `qweight` and the values of a word."""
    scheme = layer.scheme
    words = layer.take("qweight", ("I32",))
    zeros, scales = layer.take("qzeros", ("I32",)), layer.take("scales", FLOATS)
    each = _WORD_BITS // scheme.bits
    outer, inner = shape(words.shape[0], words.shape[1], each)
    groups = -(-inner // scheme.group) if scheme.group else 1
    if outer % each:
        raise QuantizedRefused(
            f"{scheme.method}: {short(words.name)} is {words.shape}: {outer} outputs are no multiple of the "
            f"{each} zero points of {scheme.bits} bits in a word"
        )
    layer.fit(scales, [groups, outer])
    layer.fit(zeros, [groups, outer // each])
    return Weight({"qweight": words, "qzeros": zeros, "scales": scales}, (outer, inner), scheme)


def _check_gptq(layer: Layer) -> Weight:
    weight = _packed(layer, lambda rows, columns, each: (columns, rows * each))
    if layer.scheme.ordered or layer.has("g_idx"):
        order = layer.take("g_idx", ("I32", "I64"), axes=1)
        layer.fit(order, [weight.shape[1]])
        weight.parts["g_idx"] = order
    return weight


def _check_awq(layer: Layer) -> Weight:
    return _packed(layer, lambda rows, columns, each: (columns * each, rows))


def _check_fp8(layer: Layer) -> Weight:
    weight = layer.take("weight", ("F8_E4M3",))
    outer, inner = weight.shape
    block = layer.scheme.block
    end = "weight_scale_inv" if block or layer.has("weight_scale_inv") else "weight_scale"
    if block:
        scale = layer.take(end, FLOATS)
        layer.fit(scale, [-(-outer // block[0]), -(-inner // block[1])])
    else:
        scale = layer.take(end, FLOATS, axes=None)
        layer.fit(scale, [], [1], [1, 1])
    return Weight({"weight": weight, "scale": scale}, (outer, inner), layer.scheme)


def refuse_numbers(plan: Plan) -> None:
    """Raise `QuantizedRefused` for scales that are no finite numbers, and for groups that do not exist; OSError."""
    for weight in plan.quantized.values():
        for end, part in weight.parts.items():
            if end.endswith("g_idx"):
                _refuse_groups(weight, part)
            elif "scale" in end and part.kind in FLOATS:
                _refuse_unfinite(weight, part)


def _refuse_unfinite(weight: Weight, part: Part) -> None:
    words = np.frombuffer(part.data(), f"<u{4 if part.kind == 'F32' else 2}")
    mask = _EXPONENT[part.kind]
    wrong = np.flatnonzero(words & mask == mask)
    if wrong.size:
        first = [int(each) for each in np.unravel_index(wrong[0], part.shape or (1,))]
        raise QuantizedRefused(
            f"{weight.scheme.method}: {short(part.name)} has {wrong.size} of {words.size} numbers that are not finite, "
            f"first {first}"
        )


def _refuse_groups(weight: Weight, part: Part) -> None:
    order = np.frombuffer(part.data(), "<i8" if part.kind == "I64" else "<i4")
    scales = next(each for end, each in weight.parts.items() if "scale" in end)
    # NOTE: compressed-tensors writes -1 throughout where inputs stand in their order.
    if part.name.endswith("weight_g_idx") and (order == -1).all():
        return
    count = prod(scales.shape) // weight.shape[0]
    least, most = int(order.min()), int(order.max())
    if least < 0 or most >= count:
        raise QuantizedRefused(
            f"{weight.scheme.method}: {short(part.name)} has groups from {least} to {most}, and there are {count} "
            "groups"
        )


_ENDS = ("qweight", "qzeros", "scales", "g_idx")
_LAYERS: dict[str, tuple[tuple[str, ...], Callable[[Layer], Weight]]] = {
    "gptq": (_ENDS, _check_gptq),
    "awq": (_ENDS, _check_awq),
    "fp8": ((), _check_fp8),
    compressed_tensors.METHOD: (compressed_tensors.ENDS, compressed_tensors.check),
}
"""By format the ends of tensors that lead to a layer, and what finds its weight."""
