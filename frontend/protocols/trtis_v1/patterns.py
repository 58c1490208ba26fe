"""What the parts of a path must look like; a path that does not fit is unknown: 400 without body and NV-Status."""

from __future__ import annotations

from falcon.routing import BaseConverter

_MOST_DIGITS = 20
"""One more than the largest int64 has: what is cut there is a version, or a size, that nothing has."""


def number_of(text: str) -> int | None:
    """Digits as a number, None for anything else."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text.lstrip("0")[:_MOST_DIGITS] or "0")


class Digits(BaseConverter):
    """A number without a sign."""

    def convert(self, value: str) -> int | None:
        """The number; None, which fits no route, for anything else."""
        return number_of(value)


class Name(BaseConverter):
    """A name that is not empty; it has no slash, or it would be two parts of the path."""

    def convert(self, value: str) -> str | None:
        """The name; None, which fits no route, where there is none."""
        return value or None


CONVERTERS = {"digits": Digits, "name": Name}
"""By the name that routes call them by."""
