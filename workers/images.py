"""Encoded images to RGB pixels, within bounds, on the preparing threads.

1. Only the formats that frontends accept are opened. A file with too many PNG chunks or JPEG scans is refused: a few
   bytes of these can keep a decoder busy for hours.
2. The size that the decoder found is checked before pixels are decoded, as a file may have several headers. Long thin
   strips are refused: processors scale the short side to the model's size, which would make strips huge.
3. The first frame of an animation is read, turned upright by its EXIF, and brought to eight bits per channel.
4. `background` is the colour that transparent pixels are laid on. Without a background transparency is dropped.

`upright_size` tells the size of the result from the header alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ipc.extras import require
from ipc.settings import Limits
from workers import image_settings

MOST_ASPECT = 200
"""Most times that one side is longer than the other; processors of the Qwen2-VL family have the same limit."""
WHITE = (255, 255, 255)
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_PNG_CHUNKS = 16384
"""Most chunks of a PNG; common writers make some 8000 of 64 Mi pixels that do not compress."""
_JPEG_SCANS = 128
"""Most scans of a JPEG; progressive files have about ten, and every scan passes over all pixels."""
_ORIENTATION = 0x0112
"""The EXIF tag. Values 5 to 8 swap width and height."""
_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
"""PNG chunks that may hold an orientation."""
_max_pixels = Limits().max_image_pixels


class RefusedImage(ValueError):
    """An image that is not decoded; the message is the reason, with the value and the limit."""


def require_vision() -> Any:
    """The module PIL.Image. Raises ImportError that names the extra when pillow is not installed."""
    return require("PIL.Image", "vision")


def limit_pixels(pixels: int) -> None:
    """Set the most pixels of an image in this process; called once, when a worker starts."""
    global _max_pixels
    _max_pixels = pixels


def most_pixels() -> int:
    """The most pixels of an image in this process."""
    return _max_pixels


def upright_size(data: bytes) -> tuple[int, int]:
    """(height, width) of what `decoded` gives. Raises `RefusedImage`.

    The header tells the size, except for a PNG whose metadata stand behind its pixels: such a file is decoded.
    """
    with _opened(data) as image:
        if _has_late_metadata(data):
            image.load()
        # NOTE: the method of the base class. That of PNG files decodes all pixels to look for metadata behind them.
        swapped = require_vision().Image.getexif(image).get(_ORIENTATION, 1) in (5, 6, 7, 8)
        width, height = image.size
        return (width, height) if swapped else (height, width)


def decoded(data: bytes, background: tuple[int, int, int] | None = None) -> Any:
    """The image as a PIL image in RGB. Raises `RefusedImage`."""
    with _opened(data) as image:
        upright = _eight_bits(require("PIL.ImageOps", "vision").exif_transpose(image))
        if background is None or not upright.has_transparency_data:
            return upright.convert("RGB")
        # NOTE: as transformers' `convert_to_rgb` does, bit by bit.
        layer = upright.convert("RGBA")
        ground = require_vision().new("RGBA", layer.size, background)
        return require_vision().alpha_composite(ground, layer).convert("RGB")


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """The image at its first frame, not yet decoded. All errors within become `RefusedImage`."""
    pillow = require_vision()
    try:
        if _png_chunks(data) > _PNG_CHUNKS:
            raise RefusedImage(f"a PNG of more than {_PNG_CHUNKS} chunks")
        if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > _JPEG_SCANS:
            raise RefusedImage(f"a JPEG of more than {_JPEG_SCANS} scans")
        pillow.MAX_IMAGE_PIXELS = _max_pixels
        with pillow.open(io.BytesIO(data), formats=_FORMATS) as image:
            image.seek(0)
            _check_size(*image.size)
            yield image
    except RefusedImage:
        raise
    except pillow.DecompressionBombError:
        raise RefusedImage(f"over {2 * _max_pixels} pixels, the limit is {_limit()}") from None
    except Exception as error:
        # Pillow's decoders raise many kinds of errors on broken files; all of them mean the same here.
        raise RefusedImage(f"cannot be decoded ({type(error).__name__})") from error


def _check_size(width: int, height: int) -> None:
    if width * height > _max_pixels:
        raise RefusedImage(f"{width} x {height} pixels, the limit is {_limit()}")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise RefusedImage(f"{width} x {height} pixels, one side may be {MOST_ASPECT} times the other")


def _limit() -> str:
    return f"{_max_pixels} in all (limits.max_image_pixels)"


def _chunks(data: bytes) -> Iterator[bytes]:
    """The names of a PNG's chunks up to the end mark; none for other formats."""
    if not data.startswith(b"\x89PNG"):
        return
    at = 8
    while at < len(data) and data[at + 4 : at + 8] != b"IEND":
        yield data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _png_chunks(data: bytes) -> int:
    """Chunks of a PNG, counted to the end mark or just above the limit; 0 for other formats."""
    return sum(1 for _ in zip(range(_PNG_CHUNKS + 1), _chunks(data), strict=False))


def _has_late_metadata(data: bytes) -> bool:
    """Whether metadata of a PNG stand behind its first pixels."""
    names = _chunks(data)
    return b"IDAT" in names and any(name in _METADATA for name in names)


def _eight_bits(image: Any) -> Any:
    """`image`; of an image with sixteen bits the upper eight, where Pillow would clip."""
    if not image.mode.startswith("I"):
        return image
    return require_vision().fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))


def load_image_processor(directory: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The image processor of a model directory, with `options` over the stored ones, in its Pillow form.

    With torchvision transformers would choose another form, which scales images differently. Raises ImportError without
    pillow, and `DamagedFile` for a file whose values make no image processor.
    """
    require_vision()
    name = image_settings.check(directory)
    # NOTE: by its module: without torchvision, transformers 5.17 gives a class that refuses under the short name.
    from transformers.models.auto import image_processing_auto

    processors: Any = image_processing_auto.AutoImageProcessor
    with image_settings.trying(name):
        return processors.from_pretrained(
            str(directory),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            backend="pil",
            **options,
        )
