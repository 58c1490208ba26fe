"""Fields whose values are a fixed set of words.

1. Where a handler checks the words by a constant, `one_of` tells the same constant in the schema.
2. Where the decoder checks the words, its message repeats the word that it got. `mismatch_of` cuts a long one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Meta, ValidationError

_SHOWN = 200


def one_of(words: Iterable[str], description: str | None = None, *, required: bool = False) -> Meta:
    """What the schema of a text says: one of `words`, or null unless the text is `required`."""
    known = [*words] if required else [*words, None]
    return Meta(description=description, extra_json_schema={"enum": known})


def mismatch_of(error: ValidationError) -> str:
    """What the decoder says of a value of a wrong type or of an unknown word, with the JSON path of the value."""
    text = str(error)
    said, at, place = text.rpartition(" - at `")
    return text if len(text) <= 2 * _SHOWN else f"{said[:_SHOWN]}...{at}{place[-_SHOWN:]}"
