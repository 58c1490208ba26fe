"""Parts of the picture families that no tiny model over HTTP reaches: missing packages, broken values, bounds."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.pipelines.document_question_answering import normalize_box

from ipc.errors import InputTooLong, InvalidInput
from ipc.wire.extraction import Extraction
from ipc.wire.messages import ExtractCall, InputItem
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from workers.adapters.base import Adapter, ItemFailure, LoadContext, Prepared
from workers.adapters.document_qa import words_of
from workers.adapters.registry import resolve
from workers.adapters.shared.image_extracting import Size, around, pixel_box
from workers.adapters.shared.tokenizing import TextTokenizer
from workers.loading.failure import classify


def load(family: str, directory: Path) -> Adapter:
    """An adapter on CPU."""
    return resolve(family).load(
        LoadContext(directory, "tiny", torch.device("cpu"), torch.float32, None, {}, lambda *_: None)
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models lie."""
    return tmp_path_factory.mktemp("vision")


def one(adapter: Adapter, image: Image.Image, **call: Any) -> Prepared | ItemFailure:
    """One picture prepared."""
    asked = ExtractCall([InputItem(images=[encoded(image)])], **call)
    return adapter.prepare(asked.items, asked)[0]


@pytest.mark.parametrize(("family", "package"), [("detection", "PIL.Image"), ("owlv2", "scipy.ndimage")])
def test_a_missing_package_is_a_dependency_failure_that_names_the_extra(
    place: Path, monkeypatch: pytest.MonkeyPatch, family: str, package: str
) -> None:
    directory = build({"detection": "detr"}.get(family, family), place / f"missing-{family}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        load(family, directory)
    found = classify(caught.value)
    assert found.error_class == "DEPENDENCY" and "the extra vision (pip install" in found.message


def test_a_detector_whose_values_are_no_numbers_fails_that_picture_alone(place: Path) -> None:
    adapter = load("detection", build("rtdetr", place / "rtdetr"))
    sound, broken = one(adapter, picture(1)), one(adapter, picture(2))
    assert isinstance(sound, Prepared) and isinstance(broken, Prepared)
    before = adapter.extract(adapter.collate([sound]))
    broken.payload.inputs["pixel_values"][:] = np.nan
    found = adapter.extract(adapter.collate([broken, sound]))
    assert isinstance(found[0], ItemFailure) and found[0].code == "INFERENCE_ERROR"
    assert isinstance(found[1], Extraction) and isinstance(before[0], Extraction)
    labels = [each.label for each in before[0].objects]
    assert labels and [each.label for each in found[1].objects] == labels
    scores = [each.score for each in before[0].objects]
    assert [each.score for each in found[1].objects] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("size", [(1, 500), (4000, 100), (21, 1)])
def test_a_strip_that_would_grow_beyond_bounds_is_refused_alone(place: Path, size: tuple[int, int]) -> None:
    adapter = load("donut", build("donut", place / f"donut{size[0]}"))
    failed = one(adapter, Image.new("RGB", size), options={"task": "<s_cord-v2>"})
    assert isinstance(failed, ItemFailure)
    assert failed.code == "INVALID_INPUT" and f"{size[0]} x {size[1]}" in failed.message


def test_large_pictures_are_made_smaller_before_they_are_padded_to_a_square(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load("owlv2", build("owlv2", place / "owlv2"))
    module = sys.modules[type(adapter).__module__]
    monkeypatch.setattr(module, "LONGEST_SIDE", 128)
    large = one(adapter, picture(1, 400, 300), labels=["cat"])
    small = one(adapter, picture(1, 400, 300).resize((128, 96), Image.Resampling.BICUBIC), labels=["cat"])
    assert isinstance(large, Prepared) and isinstance(small, Prepared)
    assert large.payload.size == Size(300, 400), "boxes are in pixels of the picture that was sent"
    difference = large.payload.inputs["pixel_values"] - small.payload.inputs["pixel_values"]
    assert np.abs(difference).mean() < 0.1


@pytest.mark.parametrize(
    ("corners", "box"),
    [
        ((1.4, 2.6, 10.5, 20.4), [1, 3, 9, 17]),
        ((-5.0, -0.4, 200.0, 60.0), [0, 0, 100, 50]),
        ((99.9, 10.0, 130.0, 20.0), [100, 10, 0, 10]),
    ],
)
def test_boxes_are_whole_pixels_inside_the_picture(corners: tuple[float, ...], box: list[int]) -> None:
    assert pixel_box(corners, Size(50, 100)) == box


def test_the_box_around_points_holds_them_whatever_their_order() -> None:
    assert around([30, 5, 10, 40, 20, 20], Size(50, 100)) == [10, 5, 20, 35]


def test_words_have_the_box_around_them_in_either_form() -> None:
    metadata = {"words": ["a", "b", "c"], "boxes": [[10, 20, 5, 5], [30, 10, 10, 5], [90, 40, 5, 5]]}
    words = words_of(InputItem(metadata=metadata), "metadata").on_page(Size(50, 100))
    assert (words.text(0, 1), words.around(0, 1)) == ("a b", [10, 10, 40, 25])
    metadata = {"words": ["a"], "boxes": [[100, 200, 150, 400]], "box_format": "normalized"}
    words = words_of(InputItem(metadata=metadata), "metadata").on_page(Size(50, 100))
    np.testing.assert_allclose(words.around(0, 0), [10, 10, 15, 20])


@pytest.mark.parametrize("size", [Size(96, 72), Size(1654, 2339), Size(640, 7)])
def test_boxes_from_0_to_1000_stay_as_given_and_those_in_pixels_are_cut_as_by_the_processors(
    size: Size,
) -> None:
    given = [[at, 0, at, 1000] for at in range(1001)]
    metadata = {"words": ["a"] * 1001, "boxes": given, "box_format": "normalized"}
    assert words_of(InputItem(metadata=metadata), "metadata").scaled(size).tolist() == given
    boxes = [[at, at % size.height, 1, 0] for at in range(size.width)]
    words = words_of(InputItem(metadata={"words": ["a"] * len(boxes), "boxes": boxes}), "metadata")
    wanted = [normalize_box([x, y, x + 1, y], size.width, size.height) for x, y, *_ in boxes]
    assert words.scaled(size).tolist() == wanted


@pytest.mark.parametrize("box", [[0, 0, float("nan"), 1], [0, 0, 1, True], "0011", [0, 0, 1e9, 1], None])
def test_boxes_that_are_none_are_refused(box: Any) -> None:
    item = InputItem(metadata={"words": ["a"], "boxes": [box]})
    with pytest.raises(InvalidInput, match=r"items\[3\]\.metadata\.boxes\[0\]"):
        words_of(item, "items[3].metadata")


def test_labels_of_owlv2_are_tokenized_where_pictures_are_prepared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = load("owlv2", build("owlv2", place / "owlv2-labels"))
    read: list[int] = []
    encode = TextTokenizer.encode
    monkeypatch.setattr(
        TextTokenizer, "encode", lambda self, texts: (read.append(len(texts)), encode(self, texts))[1]
    )
    call = ExtractCall([InputItem(images=[encoded(picture(1))])], ["cat", "river"])
    adapter.refuse_unsupported(call)
    assert not read, "the endpoint's thread checks calls; it answers nobody while it tokenizes"
    assert isinstance(adapter.prepare(call.items, call)[0], Prepared) and sum(read) == 2
    with pytest.raises(InvalidInput, match="label_template"):
        adapter.refuse_unsupported(ExtractCall(call.items, ["cat"], options={"label_template": "no place"}))


def test_labels_that_never_fit_are_refused_before_they_are_tokenized(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter: Any = load("grounding_dino", build("grounding_dino", place / "dino-labels"))
    monkeypatch.setattr(adapter, "_tokenizer", None)
    with pytest.raises(InputTooLong, match=r"params.labels: \d+ characters"):
        adapter.refuse_unsupported(ExtractCall([InputItem(images=[b""])], ["cat" * 1000] * 5))


def test_donut_without_a_task_has_the_task_of_its_checkpoint(place: Path) -> None:
    adapter: Any = load("donut", build("donut", place / "own-task"))
    tokenizer, configs = (
        adapter._processor.tokenizer,
        (adapter._model.config, adapter._model.generation_config),
    )

    def task(start: str | None, added: dict[str, int]) -> str:
        for config in configs:
            config.decoder_start_token_id = tokenizer.convert_tokens_to_ids(start) if start else None
        processor = SimpleNamespace(
            tokenizer=SimpleNamespace(get_added_vocab=lambda: added, get_vocab=dict),
            image_processor=None,
        )
        return str(type(adapter)(adapter._model, processor).default_task)

    tags: dict[str, int] = tokenizer.get_added_vocab()
    alone = {tag: number for tag, number in tags.items() if tag != "<s_docvqa>"} | {"<s_synthdog>": 999}
    assert task("<s_cord-v2>", tags) == "<s_cord-v2>" and task("<s_docvqa>", tags) == "<s_docvqa>"
    assert [task(start, alone) for start in (None, "<s>")] == ["<s_cord-v2>"] * 2
    assert task(None, tags) == ""


def test_a_picture_model_takes_options_of_others_and_thresholds_of_any_size(place: Path) -> None:
    adapter = load("detection", build("rtdetr", place / "lenient"))
    image = picture(1)

    def found(**call: Any) -> list[Any]:
        asked = ExtractCall([InputItem(images=[encoded(image)])], **call)
        adapter.refuse_unsupported(asked)
        [result] = adapter.extract(adapter.collate([one(adapter, image, **call)]))
        assert isinstance(result, Extraction)
        return result.objects

    everything = found(options={"score_threshold": 0.0})
    assert everything and found(options={"score_threshold": -3}) == everything
    assert found(options={"score_threshold": 2}) == []
    options = {"score_threshold": 0.0, "box_threshold": 0.9, "task": "<OD>"}
    assert found(options=options, output_schema={"a": 1}) == everything
