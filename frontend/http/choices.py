"""Fields whose values are a fixed set of words.

1. Where a handler checks the words by a constant, `one_of` tells the same constant in the schema.
2. Where the decoder checks the words, its message repeats the word that it got. `mismatch_of` cuts a long one, and adds
   the words that the field takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from msgspec import Meta, ValidationError, inspect

_SHOWN = 200
_WRONG_WORD = "Invalid enum value"
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


def one_of(words: Iterable[str], description: str | None = None, *, required: bool = False) -> Meta:
    """What the schema of a text says: one of `words`, or null unless the text is `required`."""
    known = [*words] if required else [*words, None]
    return Meta(description=description, extra_json_schema={"enum": known})


def mismatch_of(error: ValidationError, kind: Any) -> str:
    """What the decoder of a `kind` says of a wrong type or an unknown word, with the JSON path of the value."""
    text = str(error)
    said, at, place = text.rpartition(" - at `")
    if len(text) > 2 * _SHOWN:
        said, place = f"{said[:_SHOWN]}...", place[-_SHOWN:]
    if said.startswith(_WRONG_WORD):
        words = _words_at(kind, tuple(_STEP.findall(place)))
        said += (
            f", expected {' or '.join(filter(None, (', '.join(words[:-1]), *words[-1:])))}" if words else ""
        )
    return f"{said}{at}{place}"


@lru_cache(maxsize=256)
def _words_at(kind: Any, steps: tuple[str, ...]) -> list[str]:
    """The words that a field takes. Each step is the name of a field, or empty for an entry of an array or a map."""
    found = list(_plain(inspect.type_info(kind)))
    for name in steps:
        found = [plain for one in found for inner in _inner(one, name) for plain in _plain(inner)]
    literals = [one.values for one in found if isinstance(one, inspect.LiteralType)]
    return [repr(word) for values in literals for word in values]


def _plain(found: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, without what is said about them."""
    if isinstance(found, inspect.Metadata):
        yield from _plain(found.type)
    elif isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _plain(one)
    else:
        yield found


def _inner(found: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if name and isinstance(found, inspect.StructType):
        yield from (field.type for field in found.fields if field.encode_name == name)
    elif not name and isinstance(found, inspect.ListType | inspect.VarTupleType):
        yield found.item_type
    elif not name and isinstance(found, inspect.DictType):
        yield found.value_type
