"""Items of a request to what workers take: checked texts and images."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.protocols.sie.schemas import Item
from ipc.catalog import ModelEntry
from ipc.errors import InvalidInput
from ipc.messages import InputItem
from ipc.settings import Limits

MEDIA = ("images", "audio", "video", "document")


def check_texts(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` that names the item for a text that is too long or holds a NUL."""
    for index, text in enumerate(texts):
        if len(text) * 4 > limits.max_text_bytes:
            nbytes = len(text.encode())
            if nbytes > limits.max_text_bytes:
                place = where.format(index)
                raise InvalidInput(
                    f"{place}: {nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
                )
        if "\0" in text:
            raise InvalidInput(f"{where.format(index)}: NUL character at offset {text.index(chr(0))}")


def check_instruction(instruction: str, items: int, limits: Limits) -> None:
    """Raise `InvalidInput` for an instruction that is too long alone, or together with the items it stands before."""
    check_texts([instruction], "params.instruction", limits)
    if items * len(instruction) > limits.max_body_bytes:
        raise InvalidInput(
            f"params.instruction: {len(instruction)} characters before {items} items, "
            f"the limit is {limits.max_body_bytes} in all (limits.max_body_bytes)"
        )


def check_count(count: int, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no items or too many."""
    if count == 0:
        raise InvalidInput(f"{where}: may not be empty")
    if count > limits.max_items:
        raise InvalidInput(f"{where}: {count} given, the limit is {limits.max_items} (limits.max_items)")


def inputs_of(items: Sequence[Item], entry: ModelEntry, limits: Limits) -> list[InputItem]:
    """What workers take for each item. Raises `InvalidInput` for what this model cannot take."""
    return [input_of(item, f"items[{index}]", entry, limits) for index, item in enumerate(items)]


def input_of(item: Item, where: str, entry: ModelEntry, limits: Limits) -> InputItem:
    """One item as workers take it; `where` is its JSON path.

    Raises `InvalidInput` for media this model does not take, and for an item without any input it does.
    """
    for name in MEDIA:
        if getattr(item, name) is not None and name.rstrip("s") not in entry.inputs:
            raise InvalidInput(f"{where}.{name}: model '{entry.id}' takes {', '.join(entry.inputs)} only")
    if item.text is None:
        raise InvalidInput(f"{where}.text: missing")
    check_texts([item.text], f"{where}.text", limits)
    return InputItem(item.text)
