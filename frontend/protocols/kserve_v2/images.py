"""BYTES elements as encoded images, and strings as padded rows, for model inputs that take neither.

1. A model input of four dimensions that is sent as BYTES holds one JPEG or PNG image per element. Headers are looked at
   first: size and pixels of each image and of all of them are bounded before anything is decoded (`frontend.media`).
2. Images are decoded as OpenCV does when it leaves them unchanged (`picture_decoding`), brought to the model's height
   and width, and cast to its datatype. Values stay what they are: no scaling, no mean.
3. A model input of UINT8 with one or two dimensions that is sent as BYTES holds one string per element (`strings`).
"""

from __future__ import annotations

import numpy as np

from frontend import media
from frontend.protocols.kserve_v2 import picture_decoding, strings
from frontend.protocols.kserve_v2.resizing import resize
from frontend.rendering import off_loop
from frontend.tensors.request import InputTensor
from ipc import bytes_elements
from ipc.datatypes import BYTES, DATATYPES
from ipc.errors import BodyTooLarge, InvalidInput
from ipc.model_config import ModelConfig, TensorConfig
from ipc.settings import Limits

KINDS = ("jpeg", "png")
DATATYPES_OF_IMAGES = ("FP32", "FP64", "FP16", "UINT8", "INT8", "UINT16", "INT16", "INT32")


def to_convert(config: ModelConfig, inputs: list[InputTensor]) -> list[tuple[InputTensor, TensorConfig]]:
    """The inputs that were sent as BYTES though the model takes numbers, where that means images or strings."""
    found = []
    for tensor in inputs:
        if tensor.datatype == BYTES and tensor.data is not None:
            expected = config.input(tensor.name)
            if expected is not None and expected.datatype != BYTES and _may_convert(config, expected):
                found.append((tensor, expected))
    return found


async def convert_all(config: ModelConfig, inputs: list[InputTensor], limits: Limits) -> None:
    """Convert all of them, one after another, in the rendering threads. Raises as `convert`."""
    for tensor, expected in to_convert(config, inputs):
        await off_loop(convert, tensor, expected, config.batches, limits)


def convert(tensor: InputTensor, expected: TensorConfig, batches: bool, limits: Limits) -> None:
    """Replace a BYTES input by the tensor that the model takes. This is long work.

    Raises `InvalidInput` for what is no image, or one that does not fit the model.
    """
    where = f"input '{tensor.name[:200]}'"
    if len(tensor.shape) != 1:
        raise InvalidInput(f"{where}: expected shape [N] for N images or strings, got {tensor.shape}")
    if not tensor.shape[0]:
        raise InvalidInput(f"{where}: expected at least one element, got none")
    assert tensor.data is not None
    elements = bytes_elements.split(tensor.data, tensor.shape[0], where)
    if len(expected.dims) + batches == 1:
        _put(tensor, expected, strings.packed(elements, where))
        return
    if batches or expected.dims[0] in (-1, len(elements)):
        dims = expected.dims if batches else expected.dims[1:]
    else:
        raise InvalidInput(f"{where}: expected {expected.dims[0]} elements, got {len(elements)}")
    if len(dims) == 1:
        _put(tensor, expected, strings.rows(elements, expected, where))
    else:
        _put(tensor, expected, _images(elements, expected, dims, where, limits))


def _may_convert(config: ModelConfig, expected: TensorConfig) -> bool:
    return len(expected.dims) + config.batches in (2, 4) or strings.takes_packed(config, expected)


def _put(tensor: InputTensor, expected: TensorConfig, made: np.ndarray) -> None:
    tensor.datatype, tensor.shape = expected.datatype, list(made.shape)
    tensor.data = made.data.cast("B") if made.size else b""


def _images(
    elements: list[memoryview], expected: TensorConfig, dims: tuple[int, ...], where: str, limits: Limits
) -> np.ndarray:
    if expected.datatype not in DATATYPES_OF_IMAGES:
        raise InvalidInput(f"{where}: images are not converted to {expected.datatype}")
    transposed = expected.format == "NCHW"
    channels, height, width = dims if transposed else (dims[2], dims[0], dims[1])
    encoded = [bytes(element) for element in elements]
    first_width, first_height = _check_headers(encoded, where, limits)
    height = first_height if height < 0 else height
    width = first_width if width < 0 else width
    dtype = np.dtype(DATATYPES[expected.datatype].array)
    most_channels = channels if channels > 0 else 4
    nbytes = len(encoded) * height * width * most_channels * dtype.itemsize
    if nbytes > limits.max_body_bytes:
        raise BodyTooLarge(
            f"{where}: {len(encoded)} images of {width} x {height} pixels take {nbytes} bytes as {expected.datatype}, "
            f"the limit is {limits.max_body_bytes} (limits.max_body_bytes)"
        )
    made: np.ndarray | None = None
    for index, data in enumerate(encoded):
        place = f"{where}: image {index}"
        pixels = picture_decoding.decode(data, place)
        _check_pixels(pixels, dims, (channels, height, width), transposed, place)
        if made is None:
            channels = pixels.shape[2]
            made = np.empty((len(encoded), height, width, channels), dtype)
        made[index] = _cast(resize(pixels, height, width), dtype)
    assert made is not None
    return np.ascontiguousarray(made.transpose(0, 3, 1, 2)) if transposed else made


def _check_headers(encoded: list[bytes], where: str, limits: Limits) -> tuple[int, int]:
    """Width and height of the first image, after a look at the headers of all."""
    pixels = 0
    sizes = []
    for index, data in enumerate(encoded):
        place = f"{where}: image {index}"
        media.check_image(data, place, limits)
        kind = media.sniff(data)
        if kind not in KINDS:
            raise InvalidInput(f"{place}: expected a {' or '.join(KINDS)} image, got {kind}")
        size = media.dimensions(data, kind)
        assert size is not None
        sizes.append(size)
        pixels += size[0] * size[1]
    most = limits.max_image_pixels * limits.max_images
    if pixels > most:
        raise InvalidInput(
            f"{where}: {pixels} pixels in {len(encoded)} images, the limit is {most} "
            "(limits.max_image_pixels * limits.max_images)"
        )
    return sizes[0]


def _check_pixels(
    pixels: np.ndarray, dims: tuple[int, ...], wanted: tuple[int, int, int], transposed: bool, place: str
) -> None:
    channels, height, width = wanted
    if channels >= 0 and pixels.shape[2] != channels:
        raise InvalidInput(f"{place}: expected {channels} channels, got {pixels.shape[2]}")
    fixed_height, fixed_width = dims[1:] if transposed else dims[:2]
    same = (fixed_height >= 0 or pixels.shape[0] == height) and (fixed_width >= 0 or pixels.shape[1] == width)
    if not same:
        raise InvalidInput(
            f"{place}: {pixels.shape[1]} x {pixels.shape[0]} pixels, but the first image has {width} x {height} "
            "and the model takes any size"
        )


def _cast(pixels: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "f":
        return pixels.astype(dtype)
    bounds = np.iinfo(dtype)
    return pixels.clip(max(bounds.min, 0), min(bounds.max, np.iinfo(pixels.dtype).max)).astype(dtype)
