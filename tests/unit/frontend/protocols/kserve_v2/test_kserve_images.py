"""Encoded images as tensors, compared with PNG files written by hand and with a resize in plain loops."""

from __future__ import annotations

import io
import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from frontend.protocols.kserve_v2 import conversions
from frontend.protocols.kserve_v2.conversions import decode, resize
from frontend.tensors.request import InputTensor
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import BodyTooLarge, InvalidInput
from ipc.memory import datatypes
from ipc.settings import Limits
from tests.fakes.tensors import finish

RNG = np.random.default_rng(3)
LIMITS = Limits()


def png(pixels: np.ndarray[Any, Any], filters: bool = True) -> bytes:
    """A PNG file of [h, w, channels] of uint8 or uint16 in RGB(A) order, with all kinds of row filters."""
    height, width, channels = pixels.shape
    depth = pixels.dtype.itemsize * 8
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    raw = pixels.astype(f">u{depth // 8}").tobytes()
    stride, step = len(raw) // height, channels * depth // 8
    rows, before = [], bytes(stride)
    for y in range(height):
        row = raw[y * stride : (y + 1) * stride]
        kind = y % 5 if filters else 0
        rows.append(bytes([kind]) + _filtered(row, before, step, kind))
        before = row
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _filtered(row: bytes, above: bytes, step: int, kind: int) -> bytes:
    """The filters of the PNG specification, section 9."""
    made = bytearray()
    for x, value in enumerate(row):
        a = row[x - step] if x >= step else 0
        b = above[x]
        c = above[x - step] if x >= step else 0
        p = a + b - c
        paeth = min((a, b, c), key=lambda v: abs(p - v))
        made.append((value - (0, a, b, (a + b) // 2, paeth)[kind]) & 0xFF)
    return bytes(made)


def pixels(channels: int, deep: bool, height: int = 7, width: int = 6) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 65536 if deep else 256, (height, width, channels)).astype(
        np.uint16 if deep else np.uint8
    )


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_keeps_alpha_and_depth_and_comes_as_bgr(channels: int, deep: bool) -> None:
    made = pixels(channels, deep)
    found = decode(png(made), "x")
    expected = {
        1: lambda: made,
        2: lambda: made[:, :, [0, 0, 0, 1]],
        3: lambda: made[:, :, ::-1],
        4: lambda: made[:, :, [2, 1, 0, 3]],
    }[channels]()
    assert found.dtype == made.dtype
    assert (found == expected).all()


def encoded(values: np.ndarray[Any, Any], kind: str = "PNG", **more: Any) -> bytes:
    """A file by Pillow, from RGB or grey pixels."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **more)
    return file.getvalue()


def test_a_palette_becomes_colours() -> None:
    made = pixels(3, False) // 64 * 64
    image = Image.fromarray(made).quantize(256)
    file = io.BytesIO()
    image.save(file, "PNG")
    assert (decode(file.getvalue(), "x") == np.asarray(image.convert("RGB"))[:, :, ::-1]).all()


def test_jpeg_comes_as_bgr_and_is_not_turned_by_its_orientation() -> None:
    made = np.zeros((16, 48, 3), np.uint8)
    made[:, :24] = (255, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(made, "JPEG", quality=95), encoded(made, "JPEG", quality=95, exif=exif)
    found = decode(turned, "x")
    assert found.shape == (16, 48, 3)
    assert (found == decode(plain, "x")).all()
    assert found[8, 8, 2] > 240 and found[8, 8, 0] < 16
    assert decode(encoded(made[:, :, 0], "JPEG"), "x").shape == (16, 48, 1)


@pytest.mark.parametrize("cut", [30, 60, -60, -200])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_cut_file_is_refused(kind: str, cut: int) -> None:
    whole = encoded(pixels(3, False, 40, 40), kind)
    with pytest.raises(InvalidInput, match="cannot be decoded"):
        decode(whole[:cut], "x")


def bilinear(values: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """The definition, pixel by pixel in double precision."""
    h, w, channels = values.shape
    made = np.zeros((height, width, channels))
    for y in range(height):
        sy = min(max((y + 0.5) * h / height - 0.5, 0), h - 1)
        y0 = math.floor(sy)
        y1 = min(y0 + 1, h - 1)
        for x in range(width):
            sx = min(max((x + 0.5) * w / width - 0.5, 0), w - 1)
            x0 = math.floor(sx)
            x1 = min(x0 + 1, w - 1)
            fy, fx = sy - y0, sx - x0
            top = values[y0, x0] * (1 - fx) + values[y0, x1] * fx
            bottom = values[y1, x0] * (1 - fx) + values[y1, x1] * fx
            made[y, x] = top * (1 - fy) + bottom * fy
    return made


@pytest.mark.parametrize("size", [(7, 6), (14, 12), (3, 2), (1, 1), (20, 3), (2, 30)])
@pytest.mark.parametrize("deep", [False, True])
def test_resizing_is_bilinear_with_half_pixel_centres(size: tuple[int, int], deep: bool) -> None:
    made = pixels(3, deep)
    expected = bilinear(made, *size)
    found = resize(made, *size, made.dtype)
    assert found.dtype == made.dtype and np.abs(found - expected).max() <= 0.51
    found = resize(made, *size, np.dtype(np.float32))
    assert found.dtype == np.float32 and np.abs(found - expected).max() <= 0.01 * (1 + 50 * deep)


def model(dims: tuple[int, ...], datatype: str = "FP32", layout: str = "NHWC", batch: int = 8) -> ModelConfig:
    tensor = TensorConfig(name="x", datatype=datatype, dims=dims, format=layout)
    return ModelConfig(name="m", max_batch_size=batch, inputs=(tensor,))


def converted(
    config: ModelConfig, *elements: bytes, limits: Limits = LIMITS
) -> tuple[InputTensor, np.ndarray[Any, Any]]:
    given = InputTensor("x", "BYTES", [len(elements)], datatypes.join(elements))
    conversions.defer(config, [given], limits)
    data = finish(given)
    kind = {"FP32": "<f4", "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "FP16": "<f2"}[given.datatype]
    return given, np.frombuffer(data, kind).reshape(given.shape)


@pytest.mark.parametrize("layout", ["NHWC", "NONE", "NCHW"])
@pytest.mark.parametrize("batch", [0, 8])
def test_images_fill_the_model_input_in_its_layout(layout: str, batch: int) -> None:
    one, two = pixels(3, False), pixels(3, False)
    dims = (3, 7, 6) if layout == "NCHW" else (7, 6, 3)
    config = model(dims if batch else (2, *dims), layout=layout, batch=batch)
    tensor, found = converted(config, png(one), png(two))
    expected = np.stack([one, two])[:, :, :, ::-1].astype("<f4")
    assert tensor.shape == [2, *dims]
    assert (found == (expected.transpose(0, 3, 1, 2) if layout == "NCHW" else expected)).all()


@pytest.mark.parametrize(
    ("datatype", "deep"), [("UINT8", False), ("FP16", False), ("UINT16", True), ("FP32", True)]
)
def test_values_are_cast_and_not_scaled(datatype: str, deep: bool) -> None:
    made = pixels(1, deep)
    _, found = converted(model((7, 6, 1), datatype), png(made))
    assert (found == made).all()


@pytest.mark.parametrize(
    ("datatype", "most"), [("FP32", 1e-4), ("FP16", 0.07), ("UINT8", 0.51), ("INT8", 0.51)]
)
def test_a_picture_is_cast_before_it_is_resized(datatype: str, most: float) -> None:
    made = pixels(3, False)
    _, found = converted(model((5, 9, 3), datatype), png(made))
    cast = made.clip(0, 127) if datatype == "INT8" else made
    expected = bilinear(cast[:, :, ::-1], 5, 9)
    assert np.abs(found[0].astype(np.float64) - expected).max() <= most
    assert datatype not in ("FP32", "FP16") or (found[0] % 1).any(), "values between the integers stay"


def test_a_dynamic_size_is_that_of_the_first_image() -> None:
    tensor, _ = converted(model((-1, -1, 3)), png(pixels(3, False)), png(pixels(3, False)))
    assert tensor.shape == [2, 7, 6, 3]
    with pytest.raises(InvalidInput, match="image 1: 5 x 7 pixels, but the first image has 6 x 7"):
        converted(model((-1, -1, 3)), png(pixels(3, False)), png(pixels(3, False, width=5)))


@pytest.mark.parametrize(
    ("config", "elements", "words"),
    [
        (model((7, 6, 3)), [png(pixels(1, False))], "image 0: expected 3 channels, got 1"),
        (model((7, 6, 3)), [png(pixels(4, False))], "expected 3 channels, got 4"),
        (model((3, 7, 6)), [png(pixels(3, False))], "expected 6 channels, got 3"),
        (model((7, 6, 3)), [], "at least one element"),
        (model((2, 7, 6, 3), batch=0), [png(pixels(3, False))], "expected 2 elements, got 1"),
        (model((7, 6, 3)), [b"no image"], "image 0: not an image"),
        (model((7, 6, 3)), [encoded(pixels(3, False), "BMP")], "expected a jpeg or png image, got bmp"),
        (model((7, 6, 3), "BOOL"), [png(pixels(3, False))], "not converted to BOOL"),
    ],
)
def test_images_that_do_not_fit_are_refused(config: ModelConfig, elements: list[bytes], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        converted(config, *elements)


def test_lying_lengths_are_refused() -> None:
    given = InputTensor("x", "BYTES", [1], b"\xff\0\0\0abc")
    conversions.defer(model((7, 6, 3)), [given], LIMITS)
    with pytest.raises(InvalidInput, match="says 255 bytes, but 3 are left"):
        finish(given)


def test_pixels_are_bounded_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "decode", lambda *_: pytest.fail("it was decoded"))
    large = png(pixels(3, False, 20, 20))
    with pytest.raises(InvalidInput, match="20 x 20 pixels, the limit is 399"):
        converted(model((7, 6, 3)), large, limits=Limits(max_image_pixels=399))
    with pytest.raises(InvalidInput, match="1200 pixels in 3 images, the limit is 800"):
        converted(model((7, 6, 3)), *[large] * 3, limits=Limits(max_image_pixels=400, max_images=2))
    with pytest.raises(BodyTooLarge, match=r"limits\.max_body_bytes"):
        converted(model((-1, -1, 3)), *[large] * 3, limits=Limits(max_body_bytes=14399))


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_open_channels_are_those_of_the_first_image(channels: int, deep: bool, layout: str) -> None:
    made = png(pixels(channels, deep))
    expected = decode(made, "x").astype("<f4")
    dims, axes = ((-1, 7, 6), (2, 0, 1)) if layout == "NCHW" else ((7, 6, -1), (0, 1, 2))
    _, found = converted(model(dims, layout=layout), made)
    assert (found[0] == expected.transpose(axes)).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "L;t", "P;t"])
def test_channels_are_known_by_the_header(mode: str) -> None:
    image, file = Image.fromarray(pixels(3, False)).convert(mode[:1] if ";" in mode else mode), io.BytesIO()
    more: Any = {"transparency": 1} if ";t" in mode else {}
    image.save(file, "JPEG" if mode == "CMYK" else "PNG", **more)
    found = file.getvalue()
    assert conversions.channels_of(found, "x") == decode(found, "x").shape[2]
    with pytest.raises(InvalidInput, match="cannot be decoded"):
        conversions.channels_of(found[:30], "x")


def test_what_cannot_fit_is_refused_before_any_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions.image_headers, "check_image", lambda *_: pytest.fail("a header was read"))
    with pytest.raises(BodyTooLarge, match=r"2 images take 1008 bytes or more"):
        converted(model((7, 6, 3)), b"one", b"two", limits=Limits(max_body_bytes=1007))
    many = InputTensor("x", "BYTES", [datatypes.MOST_ELEMENTS + 1], b"")
    with pytest.raises(InvalidInput, match="elements of BYTES"):
        conversions.defer(model((-1, 7, 6, 3), batch=0), [many], LIMITS)


def test_inputs_that_are_no_images_stay_as_they_are() -> None:
    plain = InputTensor("x", "FP32", [1, 7, 6, 3], b"")
    strings = InputTensor("x", "BYTES", [1], b"")
    assert conversions.to_convert(model((7, 6, 3)), [plain]) == []
    assert conversions.to_convert(model((1,), "BYTES"), [strings]) == []
    assert conversions.to_convert(model((1, 2), "FP32"), [strings]) == []
