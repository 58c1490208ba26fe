"""What the fields of a request are called in the caller's own form, so that a worker's message can name them."""

from __future__ import annotations

import msgspec


class FieldNames(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Paths as messages have them; {} in `item` and `text` stands for the index of an item.

    `options` is the path before the name of an option, with its dot; it may be empty.
    """

    item: str = "items[{}]"
    text: str = "items[{}].text"
    query: str = "query.text"
    options: str = "params.options."


IN_PARAMS = FieldNames()
"""The names of encode and extract."""
