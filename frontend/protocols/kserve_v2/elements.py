"""The `data` of a tensor in JSON, flat or nested in any way, to its raw bytes.

The text has been checked to be JSON when it comes here. Numbers and truth values are read in bulk (`numbers`), strings
one by one. What is no element of the datatype is looked for again, slowly, for a message that says where it is.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from frontend.http.values import has_more_values
from frontend.protocols.kserve_v2 import numbers
from frontend.protocols.kserve_v2.schemas import MOST_DEPTH
from ipc.errors import InvalidInput
from ipc.memory import bytes_elements
from ipc.memory.datatypes import BYTES

MOST_OBJECTS = 1 << 20
"""Elements that become Python objects one by one: strings, and what generate counts."""
LONGEST_EXPLAINED_NBYTES = 1 << 20
_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]")


def read(text: bytes, datatype: str, count: int, where: str) -> bytes | memoryview:
    """Raw bytes of `count` elements of `datatype` from JSON `text`; `where` names the tensor in errors.

    Raises `InvalidInput` for elements of another type or out of range, for too few or too many, and for lists nested
    deeper than `MOST_DEPTH`.
    """
    if datatype == BYTES:
        return bytes_elements.join(_strings(text, count, where), where)
    _check_depth(text, where)
    values = numbers.parse(text, datatype)
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
        return msgspec.json.decode(text)
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
    return numbers.wrong(value, datatype)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {str: "a string", dict: "an object", list: "a list", int: "an integer", float: "a number"}
    return names.get(type(value), "something else")
