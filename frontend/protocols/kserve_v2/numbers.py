"""Numbers and truth values in JSON text to arrays, in bulk.

1. The text is known to be JSON. It is read in pieces that end before a comma, so that what is made in between stays
   small and other threads get their turn.
2. Brackets and white space are taken out of a piece, which leaves tokens between commas; an empty token was an empty
   list. Tokens of integers and truth values may hold no other characters than those do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from ipc.memory.datatypes import DATATYPES

PIECE_NBYTES = 1 << 16
FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))
_NESTING = b"[] \t\r\n"
_as_floats = msgspec.json.Decoder(list[float])
_as_integers = msgspec.json.Decoder(list[int])


def parse(text: bytes, datatype: str) -> np.ndarray | None:
    """The elements as an array of `datatype`; None when one is no such element, or out of its range."""
    read, characters = _READERS.get(datatype, (_read_integers, b"0123456789-,"))
    pieces = []
    for piece in _pieces(text):
        flat = piece.translate(None, _NESTING)
        if characters and flat.translate(None, characters):
            return None
        if b",," in flat or flat.startswith(b",") or flat.endswith(b","):
            flat = b",".join(token for token in flat.split(b",") if token)
        if flat:
            values = read(flat, datatype)
            if values is None:
                return None
            pieces.append(values)
    return np.concatenate(pieces) if pieces else np.empty(0, DATATYPES[datatype].array)


def _pieces(text: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(text):
        end = text.find(b",", at + PIECE_NBYTES)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


def _read_truths(piece: bytes, datatype: str) -> np.ndarray:
    digits = piece.replace(b"true", b"1").replace(b"false", b"0").replace(b",", b"")
    truths: np.ndarray = np.frombuffer(digits, np.uint8) == ord("1")
    return truths


def _read_floats(piece: bytes, datatype: str) -> np.ndarray | None:
    try:
        values = _as_floats.decode(b"[" + piece + b"]")
    except msgspec.DecodeError:
        # NOTE: a long string may hold the comma behind which its piece ends.
        return None
    return rounded(np.fromiter(values, np.float64, len(values)), datatype)


def _read_integers(piece: bytes, datatype: str) -> np.ndarray | None:
    dtype = np.dtype(DATATYPES[datatype].array)
    bounds = np.iinfo(dtype)
    signed = dtype.kind == "i"
    if not signed and b"-" in piece:
        return (
            None
            if piece.replace(b"-0", b"").count(b"-")
            else _read_integers(piece.replace(b"-", b""), datatype)
        )
    # PERF: two to three times as fast as making Python integers. What does not fit 64 bits becomes the largest or
    # smallest of them, so those are looked at again.
    wide = np.iinfo(np.int64 if signed else np.uint64)
    values = np.fromstring(piece, wide.dtype, sep=",")
    low, high = int(values.min()), int(values.max())
    if low < bounds.min or high > bounds.max:
        return None
    if high == wide.max or (signed and low == wide.min):
        return _read_large(piece, dtype)
    return values.astype(dtype, copy=False)


def _read_large(piece: bytes, dtype: np.dtype) -> np.ndarray | None:
    try:
        return np.array(_as_integers.decode(b"[" + piece + b"]"), dtype)
    except (msgspec.ValidationError, OverflowError):
        return None


_READERS: dict[str, tuple[Callable[[bytes, str], np.ndarray | None], bytes]] = {
    **dict.fromkeys(FLOATS, (_read_floats, b"")),
    "BOOL": (_read_truths, b"truefals,"),
}
"""What reads a piece, and the characters that it may hold (empty: the reader finds out by itself)."""


def rounded(values: np.ndarray, datatype: str) -> np.ndarray | None:
    """float64 `values` rounded to a floating datatype; None when one would become infinite."""
    if datatype == "FP64":
        return values
    with np.errstate(over="ignore"):
        single: np.ndarray = values.astype(np.float32 if datatype == "BF16" else DATATYPES[datatype].array)
    if datatype == "BF16":
        bits = single.view(np.uint32)
        # To the nearest, ties to even: half of the last bit that stays, less one when that bit is zero.
        single = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return None if ((single & 0x7F80) == 0x7F80).any() else single
    return single if np.isfinite(single).all() else None


def wrong(value: Any, datatype: str) -> str:
    """Why a number is none of `datatype`; "" when it is one."""
    if datatype in FLOATS:
        fits = abs(value) <= 1.8e308 and rounded(np.array([value], np.float64), datatype) is not None
        return "" if fits else f"{value!r:.40} is out of range for {datatype}"
    if isinstance(value, float):
        return f"expected an integer for {datatype}, got {value!r:.40}"
    bounds = np.iinfo(DATATYPES[datatype].array)
    if bounds.min <= value <= bounds.max:
        return ""
    return f"{value!r:.40} is out of range for {datatype}, which goes from {bounds.min} to {bounds.max}"
