"""JSON of the vectors of an answer, by number type, and of the texts that the answer repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frontend.engine.quantize import quantize
from frontend.http.rendering import off_loop_if
from frontend.http.sending import Buffer
from frontend.protocols.sie.outputs import INLINE_NBYTES
from frontend.protocols.sie.render import base64_of, json_array

_FLOATS = ("float", "base64")


async def texts_of(texts: Sequence[str]) -> list[Buffer]:
    """JSON of the texts of a request."""
    return list(await json_array(len(texts), sum(map(len, texts)) // max(1, len(texts)), texts.__getitem__))


async def array_of(rows: np.ndarray, kind: str) -> list[Buffer]:
    """JSON of all vectors, float32 [n, d], in one type."""
    large = kind not in _FLOATS and rows.nbytes > INLINE_NBYTES
    values = rows if kind in _FLOATS else await off_loop_if(large, _packed, rows, kind)

    def entry_at(index: int) -> Any:
        if kind == "base64":
            return base64_of(values[index])
        return values[index]

    return list(await json_array(len(values), values[:1].nbytes, entry_at))


def _packed(rows: np.ndarray, kind: str) -> np.ndarray:
    """The vectors in an integer type; `binary` is `ubinary` less 128, as signed bytes."""
    values = quantize(rows, kind).values
    return (values ^ 0x80).view(np.int8) if kind == "binary" else values
