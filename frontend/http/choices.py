"""Fields whose values are a fixed set of words.

The words are a constant that the handler checks by, so that its message names the field. The schema tells the same
constant: decoding does not look at the words.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Meta


def one_of(words: Iterable[str], description: str | None = None, *, required: bool = False) -> Meta:
    """What the schema of a text says: one of `words`, or null unless the text is `required`."""
    known = [*words] if required else [*words, None]
    return Meta(description=description, extra_json_schema={"enum": known})
