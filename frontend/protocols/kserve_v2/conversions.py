"""Conversions between BYTES and numbers, for models that take or give images and strings as numbers.

1. A model input of four dimensions that is sent as BYTES holds one JPEG or PNG image per element. Headers are looked at
   first: size and pixels of each image and of all of them are bounded before anything is decoded
   (`frontend.http.image_headers`).
2. Images are decoded as OpenCV does when it leaves them unchanged, cast to the model's datatype,
   and brought to its height and width. Values are not scaled, and no mean is subtracted.
3. A model input of UINT8 with one or two dimensions that is sent as BYTES holds one string per element, as
   OpenVINO Model Server has them. An input of two dimensions gets a row for each string, with zeros behind it: one at
   least, or as many as fill the width that the model states. An input of one dimension of any size gets all of them
   packed: their number, where the first begins and where each ends, four bytes each (little-endian), then the strings
   one after another.
4. A UINT8 output of two dimensions whose name ends with `_string` becomes BYTES: each row up to its first zero.

`defer` only says what inputs will be. They are made when the request was checked and there is room for them, where the
worker reads them (`frontend.tensors.program_calls`).

`decode` makes arrays of JPEG and PNG files as OpenCV does that reads images unchanged (BGR, alpha and 16 bits kept).
`resize` brings arrays to a size.

1. Orientation tags are not applied. Grey with alpha becomes four channels, palettes become colours, CMYK becomes BGR.
   Pillow knows no mode for 16 bits per channel in colour: such a PNG is unpacked twice, for its high and its low bytes.
2. Resizing is bilinear with half-pixel centres and no filter over areas, as OpenCV's INTER_LINEAR does it. OpenVINO
   Model Server casts a picture to the datatype of the model before the resize, so that a float model gets the values
   between the integers. The same values come out here without a large copy: only integer results are rounded.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from frontend.http import image_headers
from frontend.http.threads import Steps
from frontend.tensors.request import InputTensor, Plan
from frontend.tensors.result import OutputTensor, TensorResult
from ipc import extras
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import BodyTooLarge, InvalidInput, Unsupported
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.settings import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

MARKER = "_string"
"""End of the name of an output that is text."""
MOST_NBYTES = 1 << 30
MOST_GROWTH = 8
"""How many times the sent bytes the rows may take, above `FREE_NBYTES`: one long string makes all rows long."""
FREE_NBYTES = 16 << 20
LONG_NBYTES = 64 << 10
"""Rows to be made strings above this size are work for a thread."""
_TYPE = "UINT8"


def takes_packed(config: ModelConfig, expected: TensorConfig) -> bool:
    """Whether an input has the form of packed strings."""
    return not config.batches and expected.datatype == _TYPE and expected.dims == (-1,)


def check_datatype(expected: TensorConfig, where: str) -> None:
    """Raise `InvalidInput` for an input that takes no rows of strings."""
    if expected.datatype != _TYPE:
        raise InvalidInput(
            f"{where}: strings need a model input of {_TYPE} or {BYTES}, not {expected.datatype}"
        )


@dataclass(slots=True, frozen=True)
class Rows:
    """Makes rows of `count` strings, uint8 [count, width]; a `width` of -1 is one byte more than the longest has."""

    count: int
    width: int
    where: str

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Raises `InvalidInput` for strings that are too long, or that take much more as rows than they have."""
        where = self.where
        elements = datatypes.split(data, self.count, where)
        longest, width = max(map(len, elements)), self.width
        if 0 <= width < longest:
            raise InvalidInput(f"{where}: a string of {longest} bytes, the model takes {width}")
        width = longest + 1 if width < 0 else width
        _check_nbytes(width * len(elements), where)
        _check_growth(width * len(elements), sum(map(len, elements)) + 4 * len(elements), where)
        yield
        return Plan([self.count, width])

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """Each string and zeros behind it."""
        rows = np.frombuffer(place, np.uint8).reshape(shape)
        for row, element in zip(rows, datatypes.split(data, self.count, self.where), strict=True):
            row[: len(element)] = np.frombuffer(element, np.uint8)
            row[len(element) :] = 0
            yield


@dataclass(slots=True, frozen=True)
class Packed:
    """Puts `count` strings one after another behind the table of their ends, uint8 [bytes]."""

    count: int
    where: str

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Raises `InvalidInput` for strings that are too long together."""
        elements = datatypes.split(data, self.count, self.where)
        nbytes = self._table_nbytes + sum(map(len, elements))
        _check_nbytes(nbytes, self.where)
        yield
        return Plan([nbytes])

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """The table, and the strings."""
        elements = datatypes.split(data, self.count, self.where)
        ends = np.cumsum(np.fromiter(map(len, elements), np.int64, self.count))
        at = self._table_nbytes
        place[:at] = np.array([self.count, 0, *ends], "<u4").tobytes()
        for element in elements:
            place[at : at + len(element)] = element
            at += len(element)
            yield

    @property
    def _table_nbytes(self) -> int:
        return 4 * (self.count + 2)


def is_marked(name: str, datatype: str, rank: int) -> bool:
    """Whether an output is text by its name and form; `rank` counts the batch dimension."""
    return datatype == _TYPE and rank == 2 and name.endswith(MARKER)


def is_long(result: TensorResult) -> bool:
    """Whether making strings of a result is work for a thread."""
    marked = (one for one in result.outputs if is_marked(one.name, one.datatype, len(one.shape)))
    return sum(one.data.nbytes for one in marked if one.data is not None) > LONG_NBYTES


def texts_of(output: OutputTensor) -> tuple[str, list[int], memoryview]:
    """Datatype, shape and raw bytes of a marked output. Raises `InvalidInput` for too many strings."""
    assert output.data is not None
    count, width = output.shape
    datatypes.check_counts([(f"output '{output.name}'", count)])
    data = bytes(output.data)
    texts = (data[at : at + width].split(b"\0", 1)[0] for at in range(0, count * width, width or 1))
    parts = list(texts) if width else [b""] * count
    return BYTES, [count], memoryview(datatypes.join(parts))


def _check_growth(nbytes: int, sent: int, where: str) -> None:
    most = max(FREE_NBYTES, MOST_GROWTH * sent)
    if nbytes > most:
        raise InvalidInput(
            f"{where}: {sent} bytes of strings take {nbytes} bytes as rows of one width, the limit is {most}; "
            "send strings of like length together"
        )


def _check_nbytes(nbytes: int, where: str) -> None:
    if nbytes > MOST_NBYTES:
        raise InvalidInput(f"{where}: strings take {nbytes} bytes as a tensor, the limit is {MOST_NBYTES}")


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
        resampled = _along(_along(pixels, height, 0), width, 1)
    else:
        resampled = _along(_along(pixels, width, 1), height, 0)
    resized: np.ndarray = (resampled if dtype.kind == "f" else np.rint(resampled)).astype(dtype)
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


KINDS = ("jpeg", "png")
DATATYPES_OF_IMAGES = ("FP32", "FP64", "FP16", "UINT8", "INT8", "UINT16", "INT16", "INT32")


def to_convert(config: ModelConfig, inputs: list[InputTensor]) -> list[tuple[InputTensor, TensorConfig]]:
    """The inputs that were sent as BYTES though the model takes numbers, where that means images or strings."""
    convertible = []
    for tensor in inputs:
        if tensor.datatype == BYTES and tensor.data is not None:
            expected = config.input(tensor.name)
            if expected is not None and expected.datatype != BYTES and _may_convert(config, expected):
                convertible.append((tensor, expected))
    return convertible


def defer(config: ModelConfig, inputs: list[InputTensor], limits: Limits) -> None:
    """Give each such input the datatype and shape of its array, as far as known, and the recipe that makes the array.

    Raises `InvalidInput` for an input that can be no image or string for the model, whatever its elements are.
    """
    converted = to_convert(config, inputs)
    datatypes.check_counts((_where(tensor), math.prod(tensor.shape)) for tensor, _ in converted)
    for tensor, expected in converted:
        _defer(tensor, expected, config.batches, limits)


def _may_convert(config: ModelConfig, expected: TensorConfig) -> bool:
    return len(expected.dims) + config.batches in (2, 4) or takes_packed(config, expected)


def _where(tensor: InputTensor) -> str:
    return f"input '{tensor.name[:200]}'"


def _defer(tensor: InputTensor, expected: TensorConfig, batches: bool, limits: Limits) -> None:
    where = _where(tensor)
    if len(tensor.shape) != 1:
        raise InvalidInput(f"{where}: expected shape [N] for N images or strings, got {tensor.shape}")
    [count] = tensor.shape
    if count < 1:
        raise InvalidInput(f"{where}: expected at least one element, got none")
    dims = expected.dims if batches else expected.dims[1:]
    if not dims:
        tensor.shape, tensor.recipe = [-1], Packed(count, where)
    elif not batches and expected.dims[0] not in (-1, count):
        raise InvalidInput(f"{where}: expected {expected.dims[0]} elements, got {count}")
    elif len(dims) == 1:
        check_datatype(expected, where)
        tensor.shape, tensor.recipe = [count, *dims], Rows(count, dims[0], where)
    else:
        if expected.datatype not in DATATYPES_OF_IMAGES:
            raise InvalidInput(f"{where}: images are not converted to {expected.datatype}")
        transposed = expected.format == "NCHW"
        tensor.shape = [count, *dims]
        tensor.recipe = Images(count, dims, transposed, expected.datatype, where, limits)
    tensor.datatype = expected.datatype


@dataclass(slots=True, frozen=True)
class Images:
    """Makes a tensor of `count` encoded images; `dims` are the model's for each of them, -1 where it takes any."""

    count: int
    dims: tuple[int, ...]
    transposed: bool
    datatype: str
    where: str
    limits: Limits

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """The shape by the headers of all images; dimensions that the model leaves open are those of the first image.

        Raises `InvalidInput` for an element that is no image, and `BodyTooLarge`.
        """
        self._check_nbytes([self.count, *(max(dim, 1) for dim in self.dims)])
        elements = datatypes.split(data, self.count, self.where)
        width, height, pixels = yield from self._check_headers(elements)
        channels, fixed_height, fixed_width = self._parted(self.dims)
        height = height if fixed_height < 0 else fixed_height
        width = width if fixed_width < 0 else fixed_width
        # NOTE: a file must be opened to know its channels, which is not worth it for a file that is too large anyway.
        if channels < 0:
            self._check_nbytes([self.count, height, width])
            channels = channels_of(bytes(elements[0]), f"{self.where}: image 0")
        each = (channels, height, width) if self.transposed else (height, width, channels)
        self._check_nbytes([self.count, *each])
        return Plan([self.count, *each], pixels)

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """Decode one image after another into the place. Raises `InvalidInput` for a misfit."""
        dtype = np.dtype(DATATYPES[self.datatype].array)
        rows = np.frombuffer(place, dtype).reshape(shape)
        channels, height, width = self._parted(tuple(shape[1:]))
        for index, element in enumerate(datatypes.split(data, self.count, self.where)):
            where = f"{self.where}: image {index}"
            pixels = decode(bytes(element), where)
            self._check_pixels(pixels, (channels, height, width), where)
            yield
            image = resize(_bounded(pixels, dtype), height, width, dtype)
            rows[index] = image.transpose(2, 0, 1) if self.transposed else image
            yield

    def _parted(self, dims: tuple[int, ...]) -> tuple[int, int, int]:
        """Channels, height and width among the dims of one image."""
        if self.transposed:
            channels, height, width = dims
        else:
            height, width, channels = dims
        return channels, height, width

    def _check_nbytes(self, shape: list[int]) -> None:
        nbytes, most = math.prod(shape) * DATATYPES[self.datatype].nbytes, self.limits.max_body_bytes
        if nbytes > most:
            raise BodyTooLarge(
                f"{self.where}: {self.count} images take {nbytes} bytes or more as {self.datatype} {shape}, "
                f"the limit is {most} (limits.max_body_bytes)"
            )

    def _check_headers(self, elements: list[memoryview]) -> Steps[tuple[int, int, int]]:
        """Width and height of the first image, and the pixels of all, after a look at all headers."""
        limits, pixels = self.limits, 0
        first: tuple[int, int] | None = None
        for index, element in enumerate(elements):
            data, where = bytes(element), f"{self.where}: image {index}"
            image_headers.check_image(data, where, limits)
            kind = image_headers.sniff(data)
            if kind not in KINDS:
                raise InvalidInput(f"{where}: expected a {' or '.join(KINDS)} image, got {kind}")
            size = image_headers.dimensions(data, kind)
            assert size is not None
            first = first or size
            pixels += size[0] * size[1]
            yield
        most = limits.max_image_pixels * limits.max_images
        if pixels > most:
            raise InvalidInput(
                f"{self.where}: {pixels} pixels in {len(elements)} images, the limit is {most} "
                "(limits.max_image_pixels * limits.max_images)"
            )
        assert first is not None
        return *first, pixels

    def _check_pixels(self, pixels: np.ndarray, wanted: tuple[int, int, int], where: str) -> None:
        channels, height, width = wanted
        if pixels.shape[2] != channels:
            raise InvalidInput(f"{where}: expected {channels} channels, got {pixels.shape[2]}")
        _, fixed_height, fixed_width = self._parted(self.dims)
        same = (fixed_height >= 0 or pixels.shape[0] == height) and (
            fixed_width >= 0 or pixels.shape[1] == width
        )
        if not same:
            raise InvalidInput(
                f"{where}: {pixels.shape[1]} x {pixels.shape[0]} pixels, but the first image has {width} x {height} "
                "and the model takes any size"
            )


def _bounded(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Pixels that the datatype can hold, as a cast with saturation makes them."""
    if dtype.kind == "f":
        return pixels
    bounds = np.iinfo(dtype)
    return pixels.clip(max(bounds.min, 0), min(bounds.max, np.iinfo(pixels.dtype).max))
