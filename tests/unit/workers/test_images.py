"""Sizes of images from their headers, and transparency on a background."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.conformance.hostile_images import FAILED, USED, chunk
from tests.tiny.pictures import encoded, picture
from workers.images import WHITE, RefusedImage, decoded, upright_size


@pytest.mark.parametrize("name", USED)
def test_the_header_tells_the_size_of_the_upright_image(name: str) -> None:
    data, looks = USED[name]
    assert upright_size(data) == (looks.height, looks.width)


@pytest.mark.parametrize("name", FAILED)
def test_broken_files_are_refused(name: str) -> None:
    with pytest.raises(RefusedImage) as refused:
        upright_size(FAILED[name])
        decoded(FAILED[name], WHITE)
    assert "0x" not in str(refused.value)


@pytest.mark.parametrize("late", [False, True])
def test_the_orientation_of_a_png_counts_before_and_behind_its_pixels(late: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    found = exif.tobytes().removeprefix(b"Exif\0\0")
    whole = encoded(picture(3, 60, 20))
    place = whole.index(b"IEND") - 4 if late else whole.index(b"IDAT") - 4
    data = whole[:place] + chunk(b"eXIf", found) + whole[place:]
    assert upright_size(data) == (60, 20)
    assert decoded(data).size == (20, 60)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_lies_on_the_background(mode: str) -> None:
    image = picture(2).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    out = io.BytesIO()
    image.convert(mode).save(out, "PNG")
    layer = Image.open(io.BytesIO(out.getvalue())).convert("RGBA")
    share = np.asarray(layer)[..., 3:].astype(float) / 255
    laid = np.asarray(layer)[..., :3] * share + 255 * (1 - share)
    np.testing.assert_allclose(np.asarray(decoded(out.getvalue(), WHITE)), laid, atol=1)
    assert np.abs(np.asarray(decoded(out.getvalue())) - laid).max() > 1


def test_a_colour_that_stands_for_transparent_lies_on_the_background() -> None:
    pixels = zlib.compress(b"\0" + bytes((1, 2, 3, 9, 9, 9)))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0))
    clear = chunk(b"tRNS", struct.pack(">HHH", 9, 9, 9))
    data = b"\x89PNG\r\n\x1a\n" + head + clear + chunk(b"IDAT", pixels) + chunk(b"IEND")
    assert np.asarray(decoded(data, WHITE)).tolist() == [[[1, 2, 3], [255, 255, 255]]]


def test_images_of_print_become_rgb() -> None:
    image = picture(4).convert("CMYK")
    data = encoded(image, "JPEG")
    looks = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(decoded(data, WHITE)), np.asarray(looks))
