"""Elements of BYTES tensors: each is a 4-byte little-endian length followed by that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from ipc.errors import InvalidInput

_LENGTH = struct.Struct("<I")
PREFIX_NBYTES = _LENGTH.size
LONGEST = (1 << 32) - 1
"""Bytes of the longest element."""


def split(data: bytes | memoryview, count: int, where: str) -> list[memoryview]:
    """The `count` elements of a tensor, as views; `where` names it in errors.

    Raises `InvalidInput` when a length runs past the end, when there are fewer or more elements, or bytes left over.
    """
    view = memoryview(data).cast("B")
    if count and _are_equally_long(view, count):
        step = len(view) // count
        return [view[start + PREFIX_NBYTES : start + step] for start in range(0, len(view), step)]
    elements: list[memoryview] = []
    at, end = 0, len(view)
    while at < end:
        if len(elements) == count:
            raise InvalidInput(f"{where}: expected {count} elements, got {end - at} bytes more after them")
        if end - at < PREFIX_NBYTES:
            raise InvalidInput(
                f"{where}: element {len(elements)} has no complete length: {end - at} of {PREFIX_NBYTES} bytes"
            )
        nbytes = _LENGTH.unpack_from(view, at)[0]
        at += PREFIX_NBYTES
        if nbytes > end - at:
            raise InvalidInput(
                f"{where}: element {len(elements)} says {nbytes} bytes, but {end - at} are left"
            )
        elements.append(view[at : at + nbytes])
        at += nbytes
    if len(elements) != count:
        raise InvalidInput(f"{where}: expected {count} elements, got {len(elements)}")
    return elements


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
