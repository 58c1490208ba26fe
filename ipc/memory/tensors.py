"""Named tensors laid out one after another in a block of bytes, and read back as numpy views.

Starts are aligned to 64 bytes. Shapes and dtypes that come from the other process are checked against the bytes that
are really there before a view is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ipc.errors import ProtocolError
from ipc.wire.messages import TensorRef

ALIGNMENT = 64
MAX_DIMS = 8
ELEMENT_NBYTES = {
    name: np.dtype(name).itemsize
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    )
}


def layout(parts: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[list[TensorRef], int]:
    """Places (name, dtype, shape) one after another; returns the references and the total bytes."""
    refs: list[TensorRef] = []
    at = 0
    for name, dtype, shape in parts:
        at = -(-at // ALIGNMENT) * ALIGNMENT
        refs.append(TensorRef(name, dtype, list(shape), at))
        at += nbytes_of(dtype, shape)
    return refs, at


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a C-contiguous tensor. Raises `ProtocolError` for an unknown dtype or an impossible shape."""
    element_nbytes = ELEMENT_NBYTES.get(dtype)
    if element_nbytes is None:
        raise ProtocolError(f"dtype {dtype!r} is not a tensor dtype")
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise ProtocolError(f"shape {list(shape)} is not a tensor shape")
    return math.prod(shape) * element_nbytes


def raw(buffer: memoryview, ref: TensorRef) -> memoryview:
    """Bytes of one tensor of uint8. Raises `ProtocolError` for a tensor that reaches beyond the buffer."""
    nbytes = nbytes_of(ref.dtype, ref.shape)
    if ref.start < 0 or ref.start + nbytes > len(buffer):
        raise ProtocolError(f"tensor {ref.name!r} lies outside its block")
    return buffer[ref.start : ref.start + nbytes].toreadonly()


def view(buffer: memoryview | bytes, ref: TensorRef) -> np.ndarray:
    """numpy view of one tensor; read-only if the buffer is. Raises `ProtocolError` for one beyond the buffer."""
    nbytes = nbytes_of(ref.dtype, ref.shape)
    if ref.start < 0 or ref.start + nbytes > len(buffer):
        raise ProtocolError(f"tensor {ref.name!r} lies outside its block")
    flat = np.frombuffer(buffer, dtype=ref.dtype, count=math.prod(ref.shape), offset=ref.start)
    try:
        return flat.reshape(ref.shape)
    except ValueError as error:
        # An empty tensor may have a dimension that numpy cannot count.
        raise ProtocolError(f"tensor {ref.name!r}: {error}") from error
