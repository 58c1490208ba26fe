"""Checks number and size of texts against the limits of the server."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.errors import InvalidInput
from ipc.settings import Limits


def check_texts(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` that names the item for a text that is too long."""
    for index, text in enumerate(texts):
        if len(text) * 4 > limits.max_text_bytes:
            nbytes = len(text.encode())
            if nbytes > limits.max_text_bytes:
                place = where.format(index)
                raise InvalidInput(
                    f"{place}: {nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
                )


def check_shared(text: str, where: str, items: int, limits: Limits) -> None:
    """Raise `InvalidInput` for a text that is too long alone, or together with the items it stands before."""
    check_texts([text], where, limits)
    if items * len(text) > limits.max_body_bytes:
        raise InvalidInput(
            f"{where}: {len(text)} characters before {items} items, "
            f"the limit is {limits.max_body_bytes} in all (limits.max_body_bytes)"
        )


def check_count(count: int, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no items or too many."""
    if count == 0:
        raise InvalidInput(f"{where}: may not be empty")
    if count > limits.max_items:
        raise InvalidInput(f"{where}: {count} given, the limit is {limits.max_items} (limits.max_items)")
