"""Encoded images to RGB pixels, within bounds, on the preparing threads.

1. Only the formats that frontends accept are opened. A file with too many PNG chunks or JPEG scans is refused: a few
   bytes of these can keep a decoder busy for hours.
2. The size that the decoder found is checked again, as a file may have several headers. Long thin strips are refused:
   processors scale the short side to the model's size, which would make strips huge.
3. The first frame of an animation is read, turned upright, and brought to eight bits per channel.

An image that cannot be decoded or processed fails its item alone. `VisualEncoder` is the base of the families that
encode texts and images with one model.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from ipc.extras import require
from ipc.settings import Limits
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, ItemFailure
from workers.adapters.shared.building import parameter_bytes
from workers.adapters.shared.options import OptionReader

log = logging.getLogger(__name__)

MOST_ASPECT = 200
"""Most times that one side is longer than the other; processors of the Qwen2-VL family have the same limit."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_PNG_CHUNKS = 16384
"""Most chunks of a PNG; common writers make some 8000 of 64 Mi pixels that do not compress."""
_JPEG_SCANS = 128
"""Most scans of a JPEG; progressive files have about ten, and every scan passes over all pixels."""
_max_pixels = Limits().max_image_pixels

T = TypeVar("T")


class _Refused(ValueError):
    """An image that is not decoded; the message is the reason."""


def require_vision() -> Any:
    """The module PIL.Image. Raises ImportError that names the extra when pillow is not installed."""
    return require("PIL.Image", "vision")


def limit_pixels(pixels: int) -> None:
    """Set the most pixels of an image in this process; called once, when a worker starts."""
    global _max_pixels
    _max_pixels = pixels


def first_image(item: InputItem) -> Any:
    """The first image of an item as a PIL image in RGB, turned upright; `ItemFailure` when it cannot be decoded."""
    try:
        return _decoded(item.images[0])
    except _Refused as refusal:
        return ItemFailure("INVALID_INPUT", f"images[0]: {refusal}")
    except Exception as error:
        # Pillow's decoders raise many kinds of errors on broken files; all of them mean the same here.
        return ItemFailure("INVALID_INPUT", f"images[0]: cannot be decoded ({type(error).__name__})")


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


def _decoded(data: bytes) -> Any:
    if _png_chunks(data) > _PNG_CHUNKS:
        raise _Refused(f"a PNG of more than {_PNG_CHUNKS} chunks")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > _JPEG_SCANS:
        raise _Refused(f"a JPEG of more than {_JPEG_SCANS} scans")
    pillow = require_vision()
    pillow.MAX_IMAGE_PIXELS = _max_pixels
    with pillow.open(io.BytesIO(data), formats=_FORMATS) as opened:
        opened.seek(0)
        width, height = opened.size
        if width * height > _max_pixels:
            raise _Refused(
                f"{width} x {height} pixels, the limit is {_max_pixels} in all (limits.max_image_pixels)"
            )
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise _Refused(f"{width} x {height} pixels, one side may be {MOST_ASPECT} times the other")
        upright = require("PIL.ImageOps", "vision").exif_transpose(opened)
        return _eight_bits(upright).convert("RGB")


def _png_chunks(data: bytes) -> int:
    """Chunks of a PNG, counted to the end mark or just above the limit; 0 for other formats."""
    if not data.startswith(b"\x89PNG"):
        return 0
    at, count = 8, 0
    while at < len(data) and count <= _PNG_CHUNKS and data[at + 4 : at + 8] != b"IEND":
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        count += 1
    return count


def _eight_bits(image: Any) -> Any:
    """`image`; of an image with sixteen bits the upper eight, where Pillow would clip."""
    if not image.mode.startswith("I"):
        return image
    return require_vision().fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))


def load_image_processor(directory: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The image processor of a model directory, with `options` over the stored ones, in its Pillow form.

    With torchvision transformers would choose another form, which scales images differently. Raises ImportError without
    pillow.
    """
    require_vision()
    # NOTE: by its module: without torchvision, transformers 5.17 gives a class that refuses under the short name.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        str(directory), trust_remote_code=trust_remote_code, local_files_only=True, backend="pil", **options
    )


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
