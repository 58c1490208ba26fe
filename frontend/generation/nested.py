"""Checks of values whose form a request chooses: schemas of functions and grammars, arguments of calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from frontend.generation.errors import InvalidField

MAX_DEPTH = 48
"""Levels of a value. Chat templates bound a conversation with all its parts by some more."""


def check_nested(value: Any, field: str) -> None:
    """Raise `InvalidField` for a value that is nested too deeply, or has a NUL character in a text."""
    for level in _levels(value, field):
        if any(isinstance(part, str) and "\0" in part for part in level):
            raise InvalidField(field, "holds a NUL character")


def check_depth(value: Any, field: str) -> None:
    """Raise `InvalidField` for a value that is nested too deeply."""
    for _ in _levels(value, field):
        pass


def _levels(value: Any, field: str) -> Iterator[list[Any]]:
    """The parts of a value, level by level. Raises `InvalidField` where a value has too many levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        yield level
        level = [inner for part in level for inner in _parts(part)]
        if not level:
            return
    raise InvalidField(field, f"nested over {MAX_DEPTH} levels")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()
