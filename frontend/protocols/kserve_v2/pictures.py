"""JPEG and PNG files as arrays, as OpenCV reads images unchanged: BGR, alpha and 16 bits kept; and resizing.

1. Orientation tags are not applied. Grey with alpha becomes four channels, palettes become colours, CMYK becomes BGR.
   Pillow knows no mode for 16 bits per channel in colour: such a PNG is unpacked twice, for its high and its low bytes.
2. Resizing is bilinear with half-pixel centres and no filter over areas, as OpenCV's INTER_LINEAR does it. OpenVINO
   Model Server casts a picture to the datatype of the model before the resize, so that a float model gets the values
   between the integers. The same values come out here without a large copy: only integer results are rounded.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc import extras
from ipc.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from PIL.Image import Image


_DEEP = {2: ("RGB", "RGB;16B", "RGB;16L"), 6: ("RGBA", "RGBA;16B", "RGBA;16L")}
"""Mode, and how Pillow unpacks high and low bytes, by the colour type of a PNG file (PNG specification, 11.2.1)."""
_GREY_ALPHA = 4
_DEEP_CHANNELS = {2: 3, _GREY_ALPHA: 4, 6: 4}
"""Channels of PNG files of 16 bits by their colour type; grey has one channel."""
_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error, MemoryError)


def decode(data: bytes, where: str) -> np.ndarray:
    """Pixels [height, width, channels] of uint8 or uint16, channels 1 (grey), 3 (BGR) or 4 (BGRA).

    The caller limits sizes. Raises `InvalidInput` for a file that cannot be decoded to its end, `Unsupported` without
    Pillow.
    """
    with _telling(where):
        if _is_deep(data):
            pixels = _deep(data, data[25])
        else:
            with _opened(data) as image:
                pixels = np.asarray(_plain(image))
    if pixels.ndim == 2:
        return pixels[:, :, np.newaxis]
    order = [2, 1, 0, 3][: pixels.shape[2]]
    return pixels[:, :, order]


def channels_of(data: bytes, where: str) -> int:
    """Channels of the array of `decode`, by the header of the file. Raises as `decode`."""
    with _telling(where), _opened(data) as image:
        if _is_deep(data):
            return _DEEP_CHANNELS.get(data[25], 1)
        return {"L": 1, "RGB": 3, "RGBA": 4}[_plain_mode(image)]


@contextmanager
def _telling(where: str) -> Iterator[None]:
    """Turn the errors of decoders into `InvalidInput`."""
    try:
        from PIL import Image
    except ImportError:
        raise Unsupported(f"encoded images need {extras.needed('vision')}") from None
    try:
        yield
    except (*_ERRORS, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{where}: cannot be decoded as an image ({type(error).__name__})") from None


def _is_deep(data: bytes) -> bool:
    """Whether it is a PNG file of 16 bits per channel."""
    return data.startswith(b"\x89PNG") and data[24:25] == b"\x10"


def _opened(data: bytes) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))


def _plain(image: Image) -> Image:
    """An image of up to 8 bits in one of the modes L, RGB and RGBA."""
    mode = _plain_mode(image)
    if image.mode == mode:
        image.load()
        return image
    return image.convert(mode)


def _plain_mode(image: Image) -> str:
    if image.mode in ("1", "L"):
        return "L"
    if image.mode in ("LA", "RGBA") or (image.mode in ("P", "PA") and "transparency" in image.info):
        return "RGBA"
    return "RGB"


def _deep(data: bytes, colour_type: int) -> np.ndarray:
    """A PNG file of 16 bits per channel."""
    if colour_type in _DEEP:
        mode, high, low = _DEEP[colour_type]
        deep: np.ndarray = _unpacked(data, mode, high).astype(np.uint16) << 8 | _unpacked(data, mode, low)
        return deep
    if colour_type == _GREY_ALPHA:
        # Grey and alpha of two bytes each lie in the file as four channels of one byte do.
        four = _unpacked(data, "RGBA", "RGBA").astype(np.uint16)
        grey, alpha = four[:, :, 0] << 8 | four[:, :, 1], four[:, :, 2] << 8 | four[:, :, 3]
        return np.stack([grey, grey, grey, alpha], axis=2)
    with _opened(data) as image:
        return np.asarray(image).astype(np.uint16)


def _unpacked(data: bytes, mode: str, raw_mode: str) -> np.ndarray:
    with _opened(data) as opened:
        image: Any = opened
        image._mode = mode
        image.tile = [tile._replace(args=raw_mode) for tile in image.tile]
        return np.asarray(image)


def resize(pixels: np.ndarray, height: int, width: int, dtype: np.dtype) -> np.ndarray:
    """`pixels` [h, w, channels] of uint8 or uint16 as [height, width, channels] of `dtype`, which can hold them."""
    if pixels.shape[:2] == (height, width):
        return pixels.astype(dtype)
    # PERF: the order that makes the smaller array in between; it bounds memory for very wide or high images too.
    if height * pixels.shape[1] <= width * pixels.shape[0]:
        made = _along(_along(pixels, height, 0), width, 1)
    else:
        made = _along(_along(pixels, width, 1), height, 0)
    resized: np.ndarray = (made if dtype.kind == "f" else np.rint(made)).astype(dtype)
    return resized


def _along(values: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Linear interpolation to `size` places along one axis, in float32."""
    given = values.shape[axis]
    if given == size:
        return values.astype(np.float32)
    places = (np.arange(size) + 0.5) * (given / size) - 0.5
    places = places.clip(0, given - 1)
    lower = np.floor(places).astype(np.intp)
    shape = [1, 1, 1]
    shape[axis] = size
    share = (places - lower).astype(np.float32).reshape(shape)
    low = values.take(lower, axis).astype(np.float32)
    high = values.take(np.minimum(lower + 1, given - 1), axis).astype(np.float32)
    between: np.ndarray = low + (high - low) * share
    return between
