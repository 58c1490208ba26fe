"""Vectors of length 1, for servers that give no others unless a request says so."""

from __future__ import annotations

import numpy as np

from frontend.http.rendering import off_loop_if
from frontend.protocols.sie.outputs import INLINE_NBYTES


async def unit_rows(rows: np.ndarray) -> np.ndarray:
    """`normalized`, in a thread for many rows."""
    return await off_loop_if(rows.nbytes > INLINE_NBYTES, normalized, rows)


def normalized(rows: np.ndarray) -> np.ndarray:
    """float32 rows of length 1; a row of zeros stays."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    found: np.ndarray = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return found
