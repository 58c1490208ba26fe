"""Objects in pictures over HTTP with tiny models, against transformers called directly."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conformance import sights
from tests.conformance.conftest import Families
from tests.conformance.sights import DETR, DINO, NEEDS_TIMM, OWL, RTDETR, Thing
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Answer, Server
from tests.tiny.pictures import encoded, picture

PICTURES = [picture(1), picture(2, 72, 96), picture(3, 200, 60), picture(4), picture(5, 33, 47), picture(6)]
LABELS = ["cat", "river bridge", "a camera"]
SCORE_LIMIT, BOX_LIMIT = 1e-4, 1
"""How far scores and pixels may be off."""


@pytest.fixture
def place(families: Families) -> Path:
    """Where the models lie."""
    return families.place / "sights"


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


def ask(server: Server, model: str, images: Sequence[bytes], form: Form = MSGPACK, **params: Any) -> Answer:
    """POST pictures in one encoding."""
    data = [base64.b64encode(image).decode() if form is JSON else image for image in images]
    items = [{"images": [{"data": one, "format": "jpeg"}]} for one in data]
    return form.post(server, f"/v1/extract/{model}", {"items": items, "params": params})


def objects_in(
    server: Server, model: str, images: Sequence[Image.Image], form: Form = MSGPACK, **params: Any
) -> list[Any]:
    """Objects of each picture in a successful answer."""
    answer = ask(server, model, [encoded(image) for image in images], form, **params)
    assert answer.status == 200, answer.body
    items = form.load(answer.body)["items"]
    for item in items:
        assert set(item) == {"id", "entities", "relations", "classifications", "objects", "data"}
    return [item["objects"] for item in items]


def assert_things(found: Sequence[Any], expected: Sequence[Thing], image: Image.Image) -> None:
    """The same objects, in order of their scores; equal scores may change places."""
    scores = [one["score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    assert len(found) == len(expected), (found, expected)
    left = list(expected)
    for one in found:
        x, y, width, height = one["bbox"]
        assert all(type(value) is int for value in one["bbox"])
        assert 0 <= x <= x + width <= image.width and 0 <= y <= y + height <= image.height
        left.remove(next(thing for thing in left if _same(one, thing)))


def _same(one: Any, thing: Thing) -> bool:
    near = all(abs(a - b) <= 2 * BOX_LIMIT for a, b in zip(one["bbox"], thing.bbox, strict=True))
    return one["label"] == thing.label and abs(one["score"] - thing.score) <= SCORE_LIMIT and near


Reference = Callable[[Path, Image.Image, float], list[Thing]]
REFERENCES: dict[str, tuple[str, Reference]] = {
    DETR: ("score_threshold", lambda place, image, least: sights.detection(place / "detr", image, least)),
    RTDETR: ("score_threshold", lambda place, image, least: sights.detection(place / "rtdetr", image, least)),
    OWL: ("score_threshold", lambda place, image, least: sights.owlv2(place / "owlv2", image, LABELS, least)),
    DINO: (
        "box_threshold",
        lambda place, image, least: sights.grounding_dino(
            place / "grounding_dino", image, LABELS, least, 0.1
        ),
    ),
}


def params_of(model: str, least: float) -> dict[str, Any]:
    """The parameters that ask for what `REFERENCES` compute."""
    options = {REFERENCES[model][0]: least}
    if model == DINO:
        options["text_threshold"] = 0.1
    return {"options": options, **({"labels": LABELS} if model in (OWL, DINO) else {})}


def between(things: Sequence[Thing]) -> float:
    """A threshold in the widest gap of the scores, so that some are over it and none is near."""
    scores = sorted(thing.score for thing in things)
    gaps = [(after - before, before) for before, after in pairwise(scores)]
    width, below = max(gaps)
    return below + width / 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", REFERENCES)
def test_objects_are_those_of_transformers_alone_and_in_a_batch_of_sizes(
    server: Server, place: Path, model: str
) -> None:
    reference = REFERENCES[model][1]
    together = objects_in(server, model, PICTURES, **params_of(model, 0.0))
    assert all(together), "a test without objects shows nothing"
    for image, found in zip(PICTURES, together, strict=True):
        everything = reference(place, image, 0.0)
        assert_things(found, everything, image)
        least = between(everything)
        [alone] = objects_in(server, model, [image], JSON, **params_of(model, least))
        assert 0 < len(alone) < len(found)
        assert_things(alone, reference(place, image, least), image)


def test_requests_with_other_thresholds_labels_and_sizes_share_batches_and_keep_their_own(
    server: Server, place: Path
) -> None:
    words = [["cat"], ["a dog", "cat"], ["camera", "river", "bridge", "Cat"]]

    def one(at: int) -> None:
        image, labels, least = PICTURES[at % len(PICTURES)], words[at % 3], (0.0, 0.2, 0.45)[at % 3]
        form, kind = FORMS[at % 2], (OWL, DINO, DETR, RTDETR)[at % 4]
        if kind == OWL:
            expected = sights.owlv2(place / "owlv2", image, labels, least)
            options = {"score_threshold": least}
        elif kind == DINO:
            expected = sights.grounding_dino(place / "grounding_dino", image, labels, least, 0.0)
            options = {"box_threshold": least, "text_threshold": 0.0}
        else:
            expected, labels = REFERENCES[kind][1](place, image, least), []
            options = {"score_threshold": least}
        [found] = objects_in(server, kind, [image], form, options=options, labels=labels)
        assert_things(found, expected, image)

    with ThreadPoolExecutor(8) as pool:
        for waiting in [pool.submit(one, at) for at in range(48)]:
            waiting.result()


def test_labels_of_a_model_with_its_own_narrow_what_it_finds(server: Server, place: Path) -> None:
    every = sights.detection(place / "detr", PICTURES[0], 0.0)
    name = every[0].label
    [found] = objects_in(server, DETR, PICTURES[:1], options={"score_threshold": 0}, labels=[name])
    assert_things(found, [thing for thing in every if thing.label == name], PICTURES[0])
    answer = ask(server, DETR, [encoded(PICTURES[0])], labels=["unicorn"])
    assert_refused(answer, 400, "INVALID_INPUT", "params.labels", "unicorn", "cat")


def test_a_label_template_takes_the_place_of_the_usual_text(server: Server, place: Path) -> None:
    image, options = PICTURES[0], {"score_threshold": 0, "label_template": "{label}"}
    [found] = objects_in(server, OWL, [image], labels=["a photo of cat"], options=options)
    [usual] = objects_in(server, OWL, [image], labels=["cat"], options={"score_threshold": 0})
    assert [(one["score"], one["bbox"]) for one in found] == [(one["score"], one["bbox"]) for one in usual]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_broken_picture_fails_alone_and_keeps_its_place(server: Server, place: Path, form: Form) -> None:
    jpeg = encoded(PICTURES[3], "JPEG")
    strip = encoded(Image.new("RGB", (1, 20_000)))
    images = [encoded(PICTURES[0]), jpeg[: len(jpeg) // 2], encoded(PICTURES[1]), strip]
    answer = ask(server, DETR, images, form, options={"score_threshold": 0.0}, item_errors=True)
    assert answer.status == 200, answer.body
    items = form.load(answer.body)["items"]
    for at in (1, 3):
        assert items[at]["error"]["code"] == "INVALID_INPUT" and "images[0]" in items[at]["error"]["message"]
        assert not any(
            items[at][key] for key in ("entities", "relations", "classifications", "objects", "data")
        )
    for at, image in ((0, PICTURES[0]), (2, PICTURES[1])):
        assert "error" not in items[at]
        assert_things(items[at]["objects"], sights.detection(place / "detr", image, 0.0), image)
    assert_refused(ask(server, DETR, images[1:2], form), 400, "INVALID_INPUT", "images[0]")


REFUSED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    (OWL, {}, ("params.labels",)),
    (DINO, {"labels": []}, ("params.labels",)),
    (DETR, {"options": {"score_threshold": "high"}}, ("score_threshold", "str")),
    (DETR, {"options": {"score_threshold": True}}, ("score_threshold", "bool")),
    (OWL, {"labels": ["cat"], "options": {"label_template": "a photo"}}, ("label_template", "{label}")),
    (DINO, {"labels": ["cat", "..."]}, ("params.labels[1]",)),
)


@pytest.mark.parametrize(("model", "params", "mentions"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_detector_cannot_use_is_refused_by_name(
    server: Server, model: str, params: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    answer = ask(server, model, [encoded(PICTURES[0])], **params)
    assert_refused(answer, 400, "INVALID_INPUT", *mentions)


@pytest.mark.parametrize(
    ("model", "labels", "mentions"),
    [
        (OWL, ["cat", "w" * 30], ("params.labels[1]", "24 tokens")),
        (DINO, ["cat river " * 12, "dog"], ("params.labels", "32 tokens")),
        (DINO, [f"cat {number}" for number in range(20)], ("params.labels", "20 labels", "32 tokens")),
    ],
)
def test_labels_that_the_model_cannot_read_whole_are_refused(
    server: Server, model: str, labels: list[str], mentions: tuple[str, ...]
) -> None:
    answer = ask(server, model, [encoded(PICTURES[0])], labels=labels)
    assert_refused(answer, 400, "INPUT_TOO_LONG", *mentions)


def test_a_checkpoint_that_needs_a_missing_package_says_so(server: Server) -> None:
    answer = ask(server, NEEDS_TIMM, [encoded(PICTURES[0])])
    message = answer.json()["detail"]["message"]
    assert answer.status in (409, 502) and "timm" in message, answer.body


def test_a_text_is_nothing_to_look_at(server: Server) -> None:
    answer = JSON.post(server, f"/v1/extract/{DETR}", {"items": [{"text": "a cat"}]})
    assert_refused(answer, 400, "INVALID_INPUT", "items[0].images")
