"""What the formats of quantised checkpoints share: schemes, tensors and weights, and refusals that name all three.

A file may come from anybody: a message names format, tensor and numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

FLOATS = ("F16", "BF16", "F32")
_MOST_SHOWN = 100
_NBYTES = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1}


class QuantizedRefused(ValueError):
    """Quantised weights are of a form that is not read, or damaged; the message names format and tensor."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a checkpoint are quantised.

    `group` is the number of inputs of a group, 0 for one group of all; `block` has the rows and columns of a block of
    FP8, and is empty for one scale a tensor. `ordered` weights of GPTQ have a `g_idx`. `zero_offset` is added to stored
    zero points.

    A layer of compressed-tensors has one of the schemes `choices`. `packed` weights stand in words, `floats` are
    float8, `strategy` says what has a scale: tensor, channel (an output), group or block; `zeros` are zero points.
    """

    method: str
    bits: int
    group: int = 0
    block: tuple[int, ...] = ()
    ordered: bool = False
    zero_offset: int = 0
    packed: bool = False
    floats: bool = False
    strategy: str = ""
    zeros: bool = False
    choices: tuple[Scheme, ...] = ()


class Part(NamedTuple):
    """A tensor of a file, whose bytes begin at `begin`."""

    name: str
    file: Path
    shape: list[int]
    kind: str
    begin: int

    def data(self) -> bytes:
        """The bytes of the tensor. Raises `QuantizedRefused` for a file that is cut off, and OSError."""
        nbytes = prod(self.shape) * _NBYTES[self.kind]
        with self.file.open("rb") as stream:
            # NOTE: a header may state more bytes than there is memory, so the size of the file is asked first.
            left = max(0, os.fstat(stream.fileno()).st_size - self.begin)
            if left < nbytes:
                raise QuantizedRefused(
                    f"{self.file.name} is cut off: {short(self.name)} has {left} of {nbytes} bytes"
                )
            stream.seek(self.begin)
            return stream.read(nbytes)


class Weight(NamedTuple):
    """A quantised weight: tensors by the end of their names, its shape [outer, inner] as numbers, and its scheme."""

    parts: dict[str, Part]
    shape: tuple[int, int]
    scheme: Scheme


def one_of(method: str, stated: Mapping[str, Any], field: str, known: tuple[Any, ...]) -> Any:
    value = stated.get(field)
    if not any(type(value) is type(each) and value == each for each in known):
        listed = ", ".join(map(str, known))
        raise QuantizedRefused(
            f"{method}: quantization_config.{field} {short(value)} is not read; read are {listed}"
        )
    return value


def group_of(method: str, stated: Mapping[str, Any], field: str) -> int:
    size: Any = stated.get(field)
    if size != -1 and not is_size(size):
        raise QuantizedRefused(
            f"{method}: quantization_config.{field}: expected -1 or a number from 1 on, got {short(size)}"
        )
    return 0 if size == -1 else int(size)


def is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


class Layer:
    """The tensors of one linear layer, taken by the end of their names."""

    def __init__(self, scheme: Scheme, base: str, parts: Mapping[str, Part]) -> None:
        self.scheme, self._base, self._parts = scheme, base, parts

    def by(self, scheme: Scheme) -> Layer:
        """The same layer by another scheme."""
        return Layer(scheme, self._base, self._parts)

    def has(self, end: str) -> bool:
        """Whether there is such a tensor."""
        return f"{self._base}.{end}" in self._parts

    def take(self, end: str, kinds: tuple[str, ...], axes: int | None = 2) -> Part:
        """A tensor of one of these types, with `axes` sizes from 1 on, None for any. Raises `QuantizedRefused`."""
        name, method = f"{self._base}.{end}", self.scheme.method
        part = self._parts.get(name)
        if part is None:
            raise QuantizedRefused(f"{method}: the tensor {short(name)} is missing")
        if part.kind not in kinds:
            raise QuantizedRefused(
                f"{method}: {short(name)} is of {short(part.kind)}; expected {' or '.join(kinds)}"
            )
        if axes is not None and (len(part.shape) != axes or 0 in part.shape):
            raise QuantizedRefused(
                f"{method}: {short(name)} is {part.shape}; expected {axes} sizes from 1 on"
            )
        return part

    def fit(self, part: Part, *shapes: list[int]) -> None:
        """Raise `QuantizedRefused` unless a tensor has one of the shapes."""
        if part.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise QuantizedRefused(
                f"{self.scheme.method}: {short(part.name)} is {part.shape}; expected {expected}"
            )


def short(value: Any) -> str:
    """A value of a file that may come from anybody, in a message."""
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
