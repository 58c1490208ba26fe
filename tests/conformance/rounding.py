"""The contract's table of output dtypes, number by number, written apart from the code that serves them."""

from __future__ import annotations

from typing import Any

import numpy as np


def reference(row: np.ndarray, dtype: str) -> tuple[list[Any], str, dict[str, float]]:
    """(values, reported dtype, extras) of one float32 row, number by number as in the contract's table."""
    one = np.float32
    if dtype == "int8":
        scale = max(abs(x) for x in row)
        return [round(one(one(x / scale) * one(127))) for x in row], "int8", {"scale": scale}
    if dtype == "uint8":
        low, span = min(row), one(max(row) - min(row))
        values = [round(one(one(one(x - low) / span) * one(255))) for x in row]
        return values, "uint8", {"scale": span, "offset": low}
    if dtype in ("binary", "ubinary"):
        bits = "".join("1" if x > 0 else "0" for x in row)
        bits += "0" * (-len(bits) % 8)
        return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)], "binary", {}
    return list(row.astype(dtype)), dtype, {}


ARRAY_TYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "int8": "|i1",
    "uint8": "|u1",
    "binary": "|u1",
    "ubinary": "|u1",
}
