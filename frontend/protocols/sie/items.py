"""Items of a request to what workers take: checked texts and images."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.media import check_image
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


def inputs_of(items: Sequence[Item], entry: ModelEntry, limits: Limits) -> list[InputItem]:
    """What workers take for each item. Raises `InvalidInput` for what this model cannot take."""
    return [input_of(item, f"items[{index}]", entry, limits) for index, item in enumerate(items)]


def input_of(item: Item, where: str, entry: ModelEntry, limits: Limits) -> InputItem:
    """One item as workers take it; `where` is its JSON path.

    Raises `InvalidInput` for media this model does not take, and for an item without any input it does.
    """
    for name in MEDIA:
        given = getattr(item, name)
        if given is not None and given != [] and name.rstrip("s") not in entry.inputs:
            raise InvalidInput(f"{where}.{name}: model '{entry.id}' takes {', '.join(entry.inputs)} only")
    images = _images(item, where, limits)
    if not images and (item.text is None or "text" not in entry.inputs):
        needed = " or ".join(f"{where}.{'images' if kind == 'image' else kind}" for kind in entry.inputs)
        raise InvalidInput(f"{needed}: missing")
    if item.text is not None:
        check_texts([item.text], f"{where}.text", limits)
    return InputItem(item.text, None, images, item.metadata)


def _images(item: Item, where: str, limits: Limits) -> list[bytes]:
    found = []
    for index, image in enumerate(item.images or ()):
        place = f"{where}.images[{index}]"
        if index >= limits.max_images:
            raise InvalidInput(
                f"{where}.images: {len(item.images or ())} given, the limit is {limits.max_images} "
                "(limits.max_images)"
            )
        if image.data is None:
            raise InvalidInput(f"{place}.data: missing")
        check_image(image.data, f"{place}.data", limits)
        found.append(image.data)
    return found
