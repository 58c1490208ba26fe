"""Headers of images: whatever bytes come, they are refused or bounded at once, and sizes of real files are read."""

from __future__ import annotations

import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from frontend.http.image_headers import FORMATS, check_image, dimensions, sniff
from ipc.errors import InvalidInput
from ipc.settings import Limits
from tests.conformance.hostile_images import FAILED, REFUSED, USED, saved
from tests.tiny.pictures import encoded, picture

LIMITS = Limits()
WHERE = "items[3].images[1].data"
FILES = {form: encoded(picture(1, 61, 43), form.upper()) for form in FORMATS}
MAGICS = [file[:size] for file in FILES.values() for size in (2, 3, 12, 16, 30)]


def assert_bounded(data: bytes) -> None:
    """Refused by name, or an image whose header is within the limits."""
    try:
        check_image(data, WHERE, LIMITS)
    except InvalidInput as refusal:
        assert refusal.message.startswith(WHERE) and len(refusal.message) < 300
    else:
        kind = sniff(data)
        assert kind is not None
        size = dimensions(data, kind)
        assert size is not None and 0 < size[0] * size[1] <= LIMITS.max_image_pixels


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", *MAGICS]), st.binary(max_size=120))
def test_any_bytes_are_bounded_or_refused(magic: bytes, rest: bytes) -> None:
    assert_bounded(magic + rest)


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_cut_anywhere_is_bounded_or_refused(form: str) -> None:
    for size in range(len(FILES[form])):
        assert_bounded(FILES[form][:size])


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_with_wrong_bytes_is_bounded_or_refused(form: str) -> None:
    chosen = random.Random(form)
    for _ in range(3000):
        broken = bytearray(FILES[form])
        for _ in range(chosen.randrange(1, 4)):
            broken[chosen.randrange(min(64, len(broken)))] = chosen.randrange(256)
        assert_bounded(bytes(broken))


WRITTEN = {
    "lossless WebP": lambda image: saved(image, "WEBP", lossless=True),
    "WebP with alpha": lambda image: saved(image.convert("RGBA"), "WEBP"),
    "animated WebP": lambda image: saved(
        image, "WEBP", save_all=True, append_images=[Image.new("RGB", image.size)]
    ),
    "progressive JPEG": lambda image: saved(image, "JPEG", progressive=True),
    "JPEG with a profile": lambda image: saved(
        image, "JPEG", icc_profile=bytes(200_000), comment=b"a" * 9000
    ),
    "JPEG with filling": lambda image: saved(image, "JPEG").replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1),
    **{form: lambda image, form=form: saved(image, form.upper()) for form in FORMATS},
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("size", [(1, 1), (61, 43), (300, 2000), (4097, 33)])
def test_the_size_is_read_from_what_other_programs_write(name: str, size: tuple[int, int]) -> None:
    data = WRITTEN[name](picture(2).resize(size))
    kind = sniff(data)
    assert kind is not None and kind in name.lower()
    assert dimensions(data, kind) == size


def test_rows_of_a_bitmap_may_run_downwards() -> None:
    data = bytearray(encoded(picture(1, 61, 43), "BMP"))
    data[22:26] = struct.pack("<i", -43)
    assert dimensions(bytes(data), "bmp") == (61, 43)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_picture_is_refused_at_once(name: str) -> None:
    data, reason = REFUSED[name]
    began = time.thread_time()
    with pytest.raises(InvalidInput, match=r"^items\[3\]\.images\[1\]\.data: ") as refusal:
        check_image(data, WHERE, LIMITS)
    assert time.thread_time() - began < 0.1
    assert reason in refusal.value.message


@pytest.mark.parametrize("name", [*FAILED, *USED])
def test_what_only_a_decoder_can_judge_passes(name: str) -> None:
    check_image(FAILED[name] if name in FAILED else USED[name][0], WHERE, LIMITS)


def test_limits_are_named_with_what_was_found() -> None:
    with pytest.raises(InvalidInput, match=r"2623 pixels|61 x 43 pixels, the limit is 2622 in all"):
        check_image(FILES["png"], WHERE, Limits(max_image_pixels=61 * 43 - 1))
    check_image(FILES["png"], WHERE, Limits(max_image_pixels=61 * 43))
    nbytes = len(FILES["png"])
    with pytest.raises(InvalidInput, match=f"{nbytes} bytes, the limit is {nbytes - 1}"):
        check_image(FILES["png"], WHERE, Limits(max_image_bytes=nbytes - 1))
