"""Datatypes of tensors by their name in the tensor protocols, and their forms in memory and in model configurations.

Raw tensors are little-endian and row-major. An element of BYTES is a 4-byte little-endian length followed by the bytes.
BF16, which numpy lacks, is carried as its 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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
