"""Output dtypes of vectors, applied per row on the CPU, exactly as the SIE contract says.

float32   as produced
float16   cast
int8      s = max|x|; round_half_even(x / s * 127), all steps in float32; a zero row stays zero
uint8     (x - min) / (max - min) * 255, rounded half to even; a constant row gives zero
binary    bit = x > 0, packed most significant bit first, padded with zeros to whole bytes
ubinary   the same bytes as binary, reported as binary
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ipc.errors import InferenceFailed

OUTPUT_DTYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in their output dtype; `scale` and `offset` have one float32 per row where the dtype has them."""

    values: np.ndarray
    dtype: str
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None


def quantize(rows: np.ndarray, dtype: str) -> Quantized:
    """float32 [n, d] rows to `dtype` (one of `OUTPUT_DTYPES`); binary gives uint8 [n, ceil(d / 8)]."""
    if dtype == "float32":
        return Quantized(rows, "float32")
    if dtype == "float16":
        return Quantized(to_half(rows), "float16")
    if dtype == "int8":
        return _int8(rows)
    if dtype == "uint8":
        return _uint8(rows)
    return Quantized(np.packbits(rows > 0, axis=-1), "binary")


def to_half(values: np.ndarray) -> np.ndarray:
    """float16 of float32 values. Raises `InferenceFailed` for a value beyond the range of float16."""
    with np.errstate(over="ignore"):
        halved = values.astype(np.float16)
    if not np.isfinite(halved).all():
        raise InferenceFailed("a value of the model is beyond the range of output_dtype float16")
    return halved


def _int8(rows: np.ndarray) -> Quantized:
    scale = np.abs(rows).max(axis=-1, initial=0, keepdims=True).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)
    values = np.rint(rows / divisor * np.float32(127)).astype(np.int8)
    return Quantized(values, "int8", scale[..., 0])


def _uint8(rows: np.ndarray) -> Quantized:
    low = rows.min(axis=-1, keepdims=True)
    span = (rows.max(axis=-1, keepdims=True) - low).astype(np.float32)
    divisor = np.where(span == 0, np.float32(1), span)
    values = np.rint((rows - low) / divisor * np.float32(255)).astype(np.uint8)
    return Quantized(values, "uint8", span[..., 0], low[..., 0])


def shorten(rows: np.ndarray, dimensions: int) -> np.ndarray:
    """The first `dimensions` values of each row; rows of unit length are scaled to unit length again (Matryoshka)."""
    if dimensions == rows.shape[-1]:
        return rows
    unit = np.abs(np.linalg.norm(rows, axis=-1, keepdims=True) - 1) < 1e-3
    cut = rows[..., :dimensions]
    norm = np.linalg.norm(cut, axis=-1, keepdims=True)
    return np.where(unit & (norm > 0), cut / np.where(norm == 0, 1, norm), cut).astype(np.float32)
