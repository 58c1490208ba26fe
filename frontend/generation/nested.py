"""Checks of values whose form a request chooses: schemas of functions and grammars, arguments of calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from frontend.generation.errors import InvalidField
from ipc.wire.generation import MOST_LEVELS

_NUL = b"\\u0000"
"""NUL in JSON text, or a backslash in front of these characters."""


def json_text(value: Any, field: str) -> str:
    """JSON text of a decoded value.

    Raises `InvalidField` for a value with too many levels, a NUL character in a text, or too large an integer.
    """
    check_depth(value, field)
    try:
        text = orjson.dumps(value)
    except TypeError as error:
        raise InvalidField(field, str(error)[:200]) from None
    if _NUL in text and _has_nul(value):
        raise InvalidField(field, "holds a NUL character")
    return text.decode()


def check_depth(value: Any, field: str) -> None:
    """Raise `InvalidField` for a value that is nested too deeply."""
    # PERF: only lists and objects are followed, most values of a schema are neither.
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for part in level for inner in _parts(part) if isinstance(inner, dict | list)]
        if not level:
            return
    raise InvalidField(field, f"nested over {MOST_LEVELS} levels")


def has_long_integer(value: dict[str, Any]) -> bool:
    """Whether an object, of not too many levels, holds an integer that 64 bits cannot."""
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    keys = value if isinstance(value, dict) else ()
    return any(map(_has_nul, keys)) or any(map(_has_nul, _parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
