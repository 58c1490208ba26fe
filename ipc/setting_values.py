"""Values of settings: sizes with units, lists in one text, and in words what a field takes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SHOWN = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def is_size(field: str) -> bool:
    """Whether a field is a number of bytes, which its name says."""
    return "bytes" in field.split("_")


def size(text: str) -> int | str:
    """`256MiB`, `1.5 GiB`, `64 kB` or `4096` in bytes; the text itself when it is no size."""
    found = _SIZE.fullmatch(text)
    unit = (_UNITS | _DECIMAL).get(found[2].lower()) if found else None
    if found is None or unit is None:
        return text
    nbytes = float(found[1]) * unit if "." in found[1] else int(found[1]) * unit
    return int(nbytes) if nbytes == int(nbytes) else text


def shown_size(nbytes: int) -> str:
    """A number of bytes with the largest unit that divides it: `256MiB`; without one where none does."""
    for unit, factor in _SHOWN:
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)


def of_text(field: str, kind: Any, text: str) -> Any:
    """What one text stands for: the parts of a list, with commas between them, a size in bytes, or the text."""
    if isinstance(inspect.type_info(kind), inspect.VarTupleType):
        return [part.strip() for part in text.split(",") if part.strip()]
    return size(text) if is_size(field) else text


def shown(field: str, value: Any) -> str:
    """A value as messages and pages show it: JSON, sizes with their unit."""
    if is_size(field) and type(value) is int:
        return shown_size(value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return repr(value)


def taken(field: str, kind: Any) -> str:
    """What a field of this type (`msgspec.inspect`) takes, in words."""
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        word = "whole number" if isinstance(kind, inspect.IntType) else "number"
        bounds = (("above", kind.gt), ("at least", kind.ge), ("below", kind.lt), ("at most", kind.le))
        if is_size(field):
            word = "bytes, or a size like 256MiB"
        return ", ".join(
            [word, *(f"{text} {_bound(field, bound)}" for text, bound in bounds if bound is not None)]
        )
    if isinstance(kind, inspect.StrType):
        lengths = (("at least", kind.min_length), ("at most", kind.max_length))
        limits = [f"{text} {length} characters" for text, length in lengths if length is not None]
        return ", ".join([f"text like `{kind.pattern}`" if kind.pattern else "text", *limits])
    if isinstance(kind, inspect.VarTupleType):
        return f"list of {taken(field, kind.item_type).replace('text', 'texts', 1)}"
    return "map"


def _bound(field: str, bound: float) -> str:
    return shown_size(int(bound)) if is_size(field) else f"{bound:g}"
