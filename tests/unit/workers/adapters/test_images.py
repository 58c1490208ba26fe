"""Images to pixels on the preparing threads: what is broken fails alone, and decoders are never kept busy."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.settings import Limits
from ipc.wire.messages import InputItem
from tests.conformance.hostile_images import FAILED, USED
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from workers import images as pixels
from workers.adapters.base import ItemFailure, LoadContext
from workers.adapters.registry import resolve
from workers.adapters.shared import images
from workers.loading.failure import classify


def item(data: bytes) -> InputItem:
    """An item of one image."""
    return InputItem(images=[data])


@pytest.mark.parametrize("name", USED)
def test_unusual_files_are_seen_as_they_look(name: str) -> None:
    data, looks = USED[name]
    found = images.first_image(item(data))
    assert found.mode == "RGB" and found.size == looks.size
    np.testing.assert_array_equal(np.asarray(found), np.asarray(looks.convert("RGB")))


@pytest.mark.parametrize("name", FAILED)
def test_broken_files_fail_alone_and_soon(name: str) -> None:
    began = time.thread_time()
    found = images.first_image(item(FAILED[name]))
    assert time.thread_time() - began < 2
    assert isinstance(found, ItemFailure) and found.code == "INVALID_INPUT"
    assert found.message.startswith("images[0]: ") and "0x" not in found.message


def test_the_limit_of_pixels_is_that_of_the_settings() -> None:
    data = encoded(picture(1, 60, 40))
    try:
        pixels.limit_pixels(60 * 40 - 1)
        refused = images.first_image(item(data))
        assert isinstance(refused, ItemFailure) and "limits.max_image_pixels" in refused.message
        pixels.limit_pixels(60 * 40)
        assert images.first_image(item(data)).size == (60, 40)
    finally:
        pixels.limit_pixels(Limits().max_image_pixels)


def test_an_image_that_a_processor_cannot_take_fails_alone() -> None:
    def refuse(image: object) -> int:
        raise ValueError("absolute aspect ratio must be smaller than 200")

    found = images.from_first_image(item(encoded(picture(1))), refuse)
    assert isinstance(found, ItemFailure) and "processor" in found.message


def assert_does_not_load(family: str, directory: Path, extra: str) -> None:
    """Loading fails for good, and says which extra is missing."""
    device = torch.device("cpu")
    context = LoadContext(directory, "m", device, torch.float32, None, {}, lambda phase, fraction: None)
    with pytest.raises(ImportError) as missing:
        resolve(family).load(context)
    failure = classify(missing.value)
    assert (failure.error_class, failure.permanent) == ("DEPENDENCY", True)
    assert f"the extra {extra} (pip install" in str(missing.value)


@pytest.mark.parametrize("family", ["clip", "colpali", "colqwen2"])
def test_without_pillow_a_model_does_not_load_and_the_extra_is_named(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(family, tmp_path / family)
    for name in [name for name in sys.modules if name == "PIL" or name.startswith("PIL.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert_does_not_load(family, directory, "vision")


@pytest.mark.parametrize("module", ["sentencepiece", "google.protobuf"])
def test_without_its_tokenizers_packages_siglip_does_not_load_and_the_extra_is_named(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build("siglip", tmp_path / "siglip")
    monkeypatch.setitem(sys.modules, module, None)
    assert_does_not_load("siglip", directory, "siglip")
