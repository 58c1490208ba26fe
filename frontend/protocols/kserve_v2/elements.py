"""The `data` of a tensor in JSON, flat or nested in any way, to its raw bytes. The text is known to be JSON.

1. Numbers and truth values are read in bulk. The text is cut into pieces that end before a comma, so that intermediate
   values stay small and other threads get their turn.
2. Brackets and white space are taken out of a piece, which leaves tokens between commas; an empty token was an empty
   list. Tokens of integers and truth values may hold no other characters than such values do.
3. Strings are read one by one.
4. A text with an element that does not fit the datatype is read again, slowly, for a message that names the place.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from frontend.http.fields import has_more_values
from frontend.protocols.kserve_v2.schemas import MOST_DEPTH
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES

PIECE_NBYTES = 1 << 16
FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))
_NESTING = b"[] \t\r\n"
_as_floats = msgspec.json.Decoder(list[float])
_as_integers = msgspec.json.Decoder(list[int])


def parse(text: bytes, datatype: str) -> np.ndarray | None:
    """The elements as an array of `datatype`; None if an element has another type, or is out of range."""
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
    # PERF: two to three times as fast as making Python integers. A number above 64 bits becomes the largest or
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
"""The reader of a piece, and the characters that a piece may hold (empty: the reader finds out by itself)."""


def rounded(values: np.ndarray, datatype: str) -> np.ndarray | None:
    """float64 `values` rounded to a floating datatype; None if a value would become infinite."""
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
    """Why a number does not fit `datatype`; "" if it fits."""
    if datatype in FLOATS:
        fits = (
            abs(value) <= sys.float_info.max and rounded(np.array([value], np.float64), datatype) is not None
        )
        return "" if fits else f"{value!r:.40} is out of range for {datatype}"
    if isinstance(value, float):
        return f"expected an integer for {datatype}, got {value!r:.40}"
    bounds = np.iinfo(DATATYPES[datatype].array)
    if bounds.min <= value <= bounds.max:
        return ""
    return f"{value!r:.40} is out of range for {datatype}, which goes from {bounds.min} to {bounds.max}"


class _Real(float):
    """A number with a point or an exponent, which messages tell as it is written."""

    _text: str

    def __new__(cls, text: str) -> _Real:
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __repr__(self) -> str:
        return self._text


_as_values = msgspec.json.Decoder(float_hook=_Real)
MOST_OBJECTS = 1 << 20
"""Elements that become Python objects one by one: strings, and the elements that generate counts."""
LONGEST_EXPLAINED_NBYTES = 1 << 20
_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")


def read(text: bytes, datatype: str, count: int, where: str) -> bytes | memoryview:
    """Raw bytes of `count` elements of `datatype` from JSON `text`; `where` names the tensor in errors.

    Raises `InvalidInput` for elements of another type or out of range, for too few or too many, and for lists nested
    deeper than `MOST_DEPTH`.
    """
    if datatype == BYTES:
        return datatypes.join(_strings(text, count, where), where)
    _check_depth(text, where)
    values = parse(text, datatype)
    if values is None:
        raise InvalidInput(_mistake(text, datatype, where))
    _check_count(len(values), count, where)
    return values.data.cast("B")


def count_of(text: bytes, where: str) -> int:
    """How many elements JSON `text` has. Raises `InvalidInput` as `read` does."""
    return sum(1 for _ in _leaves(_loaded(text, where), where))


def _check_count(got: int, expected: int, where: str) -> None:
    if got != expected:
        raise InvalidInput(f"{where}: expected {expected} elements, got {got}")


def _check_depth(text: bytes, where: str) -> None:
    if text.count(b"[") <= MOST_DEPTH:
        return
    brackets = np.frombuffer(text.translate(None, _BUT_BRACKETS), np.uint8)
    if (
        np.cumsum(np.where(brackets == ord("["), np.int32(1), np.int32(-1)), dtype=np.int32).max()
        > MOST_DEPTH
    ):
        raise _too_deep(where)


def _too_deep(where: str) -> InvalidInput:
    return InvalidInput(f"{where}: data is nested deeper than {MOST_DEPTH} levels")


def _strings(text: bytes, count: int, where: str) -> list[bytes]:
    elements = [
        _element(value, where, index) for index, value in enumerate(_leaves(_loaded(text, where), where))
    ]
    _check_count(len(elements), count, where)
    return elements


def _element(value: Any, where: str, index: int) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("b64"), str) and len(value) == 1:
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput(f"{where}: element {index}: 'b64' is not valid base64") from None
    raise InvalidInput(
        f"{where}: element {index}: expected a string or an object with 'b64' for BYTES, got {_kind(value)}"
    )


def _loaded(text: bytes, where: str) -> Any:
    if has_more_values(text, MOST_OBJECTS):
        raise InvalidInput(
            f"{where}: more than {MOST_OBJECTS} elements or lists in JSON; send them in binary"
        )
    try:
        return _as_values.decode(text)
    except RecursionError:
        raise _too_deep(where) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"{where}: data cannot be read: {str(error)[:200]}") from None


def _leaves(value: Any, where: str) -> Iterator[Any]:
    """The elements of nested lists in order, without recursion."""
    if not isinstance(value, list):
        yield value
        return
    open_lists = [iter(value)]
    while open_lists:
        for item in open_lists[-1]:
            if isinstance(item, list):
                if len(open_lists) == MOST_DEPTH:
                    raise _too_deep(where)
                open_lists.append(iter(item))
                break
            yield item
        else:
            open_lists.pop()


def _mistake(text: bytes, datatype: str, where: str) -> str:
    """Why `text` is no data of `datatype`: the first element that is wrong."""
    if len(text) > LONGEST_EXPLAINED_NBYTES:
        return f"{where}: an element is no {datatype}, or out of its range"
    for index, value in enumerate(_leaves(_loaded(text, where), where)):
        if wrong := _wrong(value, datatype):
            return f"{where}: element {index}: {wrong}"
    return f"{where}: a number is out of range for {datatype}"


def _wrong(value: Any, datatype: str) -> str:
    if datatype == "BOOL":
        return "" if isinstance(value, bool) else f"expected true or false for BOOL, got {_kind(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number for {datatype}, got {_kind(value)}"
    return wrong(value, datatype)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {str: "a string", dict: "an object", list: "a list", int: "an integer", float: "a number"}
    return names.get(type(value), "something else")
