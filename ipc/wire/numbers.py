"""Integers that messages can carry, and the search for one that they cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1
"""The integers of msgpack."""
_SHOWN = 64


class LongInteger(NamedTuple):
    """An integer that no message can carry, and the path of the integer within its value."""

    path: str
    number: int

    def __str__(self) -> str:
        place = f"{self.path.lstrip('.')}: " if self.path else ""
        return f"{place}{shown(self.number)} is beyond 64 bits: integers go from {SMALLEST} to {LARGEST}"


def long_integer_in(value: Any) -> LongInteger | None:
    """The first integer in lists, maps and structs of `value` that is beyond 64 bits."""
    if isinstance(value, int):
        return None if SMALLEST <= value <= LARGEST else LongInteger("", value)
    for step, part in _parts(value):
        found = long_integer_in(part)
        if found is not None:
            return LongInteger(f"{step}{found.path}", found.number)
    return None


def shown(number: int) -> str:
    """The beginning of an integer for messages."""
    try:
        text = str(number)
    except ValueError:
        # NOTE: Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return [(f".{name}", getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, Mapping):
        return [(f".{str(name)[:_SHOWN]}", part) for name, part in value.items()]
    return [(f"[{at}]", part) for at, part in enumerate(value)] if isinstance(value, list | tuple) else ()
