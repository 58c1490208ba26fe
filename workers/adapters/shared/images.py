"""The first image of an item, and the base of the families that encode texts and images with one model.

An image that cannot be decoded or processed fails its item alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, ItemFailure
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.options import OptionReader
from workers.images import RefusedImage, decoded

log = logging.getLogger(__name__)

T = TypeVar("T")


def first_image(item: InputItem) -> Any:
    """The first image of an item as a PIL image in RGB, turned upright; `ItemFailure` when it cannot be decoded."""
    try:
        return decoded(item.images[0])
    except RefusedImage as refusal:
        return ItemFailure("INVALID_INPUT", f"images[0]: {refusal}")


def from_first_image(item: InputItem, process: Callable[[Any], T]) -> T | ItemFailure:
    """`process` applied to the first image of an item; `ItemFailure` for an image that cannot be used."""
    image = first_image(item)
    if isinstance(image, ItemFailure):
        return image
    try:
        return process(image)
    except (ArithmeticError, TypeError, ValueError) as error:
        log.warning(
            "an image of %d x %d pixels could not be processed (%s)", *image.size, type(error).__name__
        )
        return ItemFailure("INVALID_INPUT", "images[0]: the model's processor cannot take this image")


class VisualEncoder(Adapter):
    """Base of these families. Of an item with images the first image is encoded, of any other item the text.

    `overflows` is what may be done with texts that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`).
    """

    overflows: ClassVar[Collection[str]] = ("truncate", "error")

    def __init__(self, model: Any, limit: int) -> None:
        """Take over a loaded model; `limit` is its longest text in tokens."""
        self._model, self._limit = model, limit

    @property
    def max_sequence_length(self) -> int:
        """Longest text in tokens, with all tokens around the text."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return parameter_bytes(self._model)

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse overflow policies that are not in `overflows`."""
        super().refuse_unsupported(call)
        OptionReader(call).refuse_overflow(self.overflows)
