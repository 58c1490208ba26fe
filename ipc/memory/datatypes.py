"""Datatypes of tensors by their name in the tensor protocols, and their forms in memory and in model configurations.

Raw tensors are little-endian and row-major. An element of BYTES is a 4-byte little-endian length followed by the bytes.
BF16, which numpy lacks, is carried as its 16 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ipc.errors import InvalidInput

_LENGTH = struct.Struct("<I")
PREFIX_NBYTES = _LENGTH.size
LONGEST = (1 << 32) - 1
"""Bytes of the longest element."""
MOST_ELEMENTS = 1 << 20
"""Elements of all BYTES inputs of a request: each becomes an object, many times the size of a short element."""
_SHORT_NBYTES = 256


class Datatype(NamedTuple):
    """`name` on the wire, `config` in configurations, `array` as numpy knows it, `nbytes` an element (0: varies)."""

    name: str
    config: str
    array: str
    nbytes: int


BYTES = "BYTES"
DATATYPES = {
    name: Datatype(name, config, array, nbytes)
    for name, config, array, nbytes in (
        ("BOOL", "TYPE_BOOL", "bool", 1),
        ("UINT8", "TYPE_UINT8", "uint8", 1),
        ("UINT16", "TYPE_UINT16", "uint16", 2),
        ("UINT32", "TYPE_UINT32", "uint32", 4),
        ("UINT64", "TYPE_UINT64", "uint64", 8),
        ("INT8", "TYPE_INT8", "int8", 1),
        ("INT16", "TYPE_INT16", "int16", 2),
        ("INT32", "TYPE_INT32", "int32", 4),
        ("INT64", "TYPE_INT64", "int64", 8),
        ("FP16", "TYPE_FP16", "float16", 2),
        ("BF16", "TYPE_BF16", "uint16", 2),
        ("FP32", "TYPE_FP32", "float32", 4),
        ("FP64", "TYPE_FP64", "float64", 8),
        (BYTES, "TYPE_STRING", "uint8", 0),
    )
}
BY_CONFIG = {datatype.config: datatype for datatype in DATATYPES.values()}
MAX_ELEMENTS = 1 << 59
"""The largest product of a shape's dimensions, those of 0 left out: numpy counts the bytes of 8-byte elements so."""


def elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape; 1 for `[]`. Raises `ValueError` for a negative dim, and as `MAX_ELEMENTS` says."""
    if min(shape, default=0) < 0:
        raise ValueError(f"shape {list(shape)} has a negative dimension")
    count = math.prod(shape)
    if (count or math.prod(dim or 1 for dim in shape)) > MAX_ELEMENTS:
        raise ValueError(f"shape {list(shape)} is too large: the product of its dimensions is above 2^59")
    return count


def check_counts(counts: Iterable[tuple[str, int]]) -> None:
    """Raise `InvalidInput` when the BYTES tensors of a request have too many elements together.

    Each is given as its name in errors and the number of its elements.
    """
    before = 0
    for where, count in counts:
        if before + count > MOST_ELEMENTS:
            others = f" and those before it {before}" if before else ""
            shown = count if count <= 1 << 62 else "more than 2^62"
            raise InvalidInput(
                f"{where}: it has {shown} elements of BYTES{others}, a request may have {MOST_ELEMENTS}"
            )
        before += count


def split(data: bytes | memoryview, count: int, where: str) -> list[memoryview]:
    """The `count` elements of a tensor, as views; `where` names it in errors.

    Raises `InvalidInput` when a length runs past the end, when there are fewer or more elements, or bytes left over.
    """
    view = memoryview(data).cast("B")
    return [view[start:stop] for start, stop in _bounds(view, count, where)]


def objects(data: bytes | memoryview, count: int, where: str) -> np.ndarray:
    """The `count` elements of a tensor as an array of `bytes`, objects [count]. Raises as `split`."""
    view = memoryview(data).cast("B")
    array = np.empty(count, dtype=object)
    # PERF: one copy of many short elements costs less than a view of each.
    source = bytes(view) if len(view) < _SHORT_NBYTES * count else view
    for index, (start, stop) in enumerate(_bounds(view, count, where)):
        array[index] = bytes(source[start:stop])
    return array


def _bounds(view: memoryview, count: int, where: str) -> Iterator[tuple[int, int]]:
    """Where each element begins and ends."""
    if count and _are_equally_long(view, count):
        step = len(view) // count
        yield from ((start + PREFIX_NBYTES, start + step) for start in range(0, len(view), step))
        return
    index, at, end = 0, 0, len(view)
    while at < end:
        if index == count:
            raise InvalidInput(f"{where}: expected {count} elements, got {end - at} bytes more after them")
        if end - at < PREFIX_NBYTES:
            raise InvalidInput(
                f"{where}: element {index} has no complete length: {end - at} of {PREFIX_NBYTES} bytes"
            )
        nbytes = _LENGTH.unpack_from(view, at)[0]
        at += PREFIX_NBYTES
        if nbytes > end - at:
            raise InvalidInput(f"{where}: element {index} says {nbytes} bytes, but {end - at} are left")
        yield at, at + nbytes
        index += 1
        at += nbytes
    if index != count:
        raise InvalidInput(f"{where}: expected {count} elements, got {index}")


def _are_equally_long(view: memoryview, count: int) -> bool:
    """Whether these are `count` elements of the same length and nothing else."""
    # PERF: rows of equal texts and images, and single elements, need no loop over lengths.
    step = len(view) // count
    if len(view) % count or not PREFIX_NBYTES <= step <= PREFIX_NBYTES + LONGEST:
        return False
    length = np.frombuffer(_LENGTH.pack(step - PREFIX_NBYTES), np.uint8)
    lengths = np.frombuffer(view, np.uint8).reshape(count, step)[:, :PREFIX_NBYTES]
    return bool((lengths == length).all())


def join(elements: Iterable[bytes | memoryview], where: str = "element") -> bytes:
    """The raw tensor of these elements. Raises `InvalidInput` for one that no length can state."""
    parts: list[bytes | memoryview] = []
    for index, element in enumerate(elements):
        if len(element) > LONGEST:
            raise InvalidInput(f"{where}: element {index} has {len(element)} bytes, the limit is {LONGEST}")
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)
