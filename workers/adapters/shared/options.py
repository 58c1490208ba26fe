"""Read the options of a call: types and ranges are checked, and a wrong value is refused by the option's name.

Options of other families are ignored; protocols may tell their clients so (`Adapter.uses`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from ipc.catalog.option_names import OVERFLOW_POLICIES
from ipc.errors import InvalidInput
from ipc.wire.messages import Call

_SHOWN = 64
NO_LIMIT = 2**63
_MOST = 1_000_000


class OptionReader:
    """The options of one call; every method raises `InvalidInput` that names field, value and limit."""

    def __init__(self, call: Call) -> None:
        self._options = call.options
        self._before, self._overflow = call.names.options, call.overflow

    def threshold(self, name: str, default: float) -> float:
        """Any number. A threshold below 0 lets everything pass, one above 1 nothing."""
        value = self._options.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if math.isnan(value):
            raise self.refused(name, value, "is no number")
        return float(value)

    def whole(self, name: str, default: int, low: int, high: int = NO_LIMIT) -> int:
        """A whole number within `low`..`high`; without `high`, of any size."""
        value = self._options.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "int", value)
        if value < low and high == NO_LIMIT:
            raise self.refused(name, value, f"is below {low}")
        if not low <= value <= high:
            raise self.refused(name, value, f"is outside {low}..{high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._options.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "bool", value)
        return value

    def choice(self, name: str, default: str, values: Sequence[str]) -> str:
        """One of `values`."""
        value = self.text(name, default)
        if value not in values:
            raise self.refused(name, value, f"is not one of {', '.join(values)}")
        return value

    def text(self, name: str, default: str, longest: int = 1000) -> str:
        """A text of at most `longest` characters."""
        value = self._options.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "str", value)
        if len(value) > longest:
            raise InvalidInput(
                f"{self._before}{name}: {len(value)} characters, the limit for this option is {longest}"
            )
        return value

    def texts(self, name: str, most: int, longest: int) -> list[str]:
        """Texts of 1 to `longest` characters, at most `most`, each once; none when absent."""
        value = self._options.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "array of str", value)
        if len(value) > most:
            raise InvalidInput(f"{self._before}{name}: {len(value)} given, the limit is {most}")
        for at, text in enumerate(value):
            if not isinstance(text, str):
                raise self._wrong(f"{name}[{at}]", "str", text)
            if not text.strip() or len(text) > longest:
                raise self.refused(f"{name}[{at}]", text, f"must have 1 to {longest} characters")
        return list(dict.fromkeys(value))

    def numbers(self, name: str, names: Sequence[str]) -> dict[str, float] | None:
        """A map from some of `names` to numbers from 0 to a million, not all 0; None when absent."""
        value = self._options.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "object", value)
        for key, number in value.items():
            if key not in names:
                raise self.refused(name, key, f"is not one of {', '.join(names)}")
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise self._wrong(f"{name}.{key}", "a number", number)
            if not 0 <= number <= _MOST:
                raise self.refused(f"{name}.{key}", number, f"is outside 0..{_MOST}")
        if not any(value.values()):
            raise InvalidInput(f"{self._before}{name}: at least one weight must be above 0")
        return {key: float(number) for key, number in value.items()}

    def refuse_overflow(self, offered: Collection[str]) -> None:
        """Refuse an overflow policy that is not one of `offered`."""
        if self._overflow not in offered:
            known = ", ".join(name for name, found in OVERFLOW_POLICIES.items() if found in offered)
            raise self.refused(
                "overflow_policy", self._overflow, f"is not offered by this model, only {known}"
            )

    def _wrong(self, name: str, expected: str, value: Any) -> InvalidInput:
        return InvalidInput(f"{self._before}{name}: expected {expected}, got {type(value).__name__}")

    def refused(self, name: str, value: object, reason: str) -> InvalidInput:
        """The error for a value that cannot be used; the caller raises the error."""
        return InvalidInput(f"{self._before}{name}: {str(value)[:_SHOWN]!r} {reason}")
