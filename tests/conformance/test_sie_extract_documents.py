"""Texts, fields and answers read from pictures over HTTP with tiny models, against transformers called directly."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conformance import sights
from tests.conformance.conftest import Families
from tests.conformance.sights import DONUT, FLORENCE, PAGES, WORDS_ONLY
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Answer, Server
from tests.tiny.pictures import encoded, picture
from tests.tiny.texts import sentences

PICTURES = [picture(11), picture(12, 72, 96), picture(13, 150, 60), picture(14, 64, 64)]
TASKS: dict[str, str | None] = {
    "<OCR>": None,
    "<OCR_WITH_REGION>": None,
    "<CAPTION>": None,
    "<OD>": None,
    "<DENSE_REGION_CAPTION>": None,
    "<REGION_PROPOSAL>": None,
    "<CAPTION_TO_PHRASE_GROUNDING>": "a cat by the river",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "the river",
    "<OPEN_VOCABULARY_DETECTION>": "a bridge",
    "<DocVQA>": "What is the capital?",
}
"""Tasks of Florence-2, and the text for those that take one."""
SEARCHED = ("<OCR>", "<OD>", "<DocVQA>")
"""Tasks that are tried with several beams too; a search does not know which task its tokens are for."""
ASKED = "<s_docvqa><s_question>{}</s_question><s_answer>"
WORDS = [*sentences()[0].split(), *sentences()[6].split()]
BOXES = [[10 * at % 80, 4 * at, 9, 4] for at in range(len(WORDS))]
SCORE_LIMIT = 1e-4


@pytest.fixture
def place(families: Families) -> Path:
    """Where the models lie."""
    return families.place / "sights"


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


def ask(
    server: Server,
    model: str,
    images: Sequence[Image.Image],
    form: Form = MSGPACK,
    metadata: Mapping[str, Any] | None = None,
    **params: Any,
) -> Answer:
    """POST pictures in one encoding, each with the same metadata."""
    files = [encoded(image) for image in images]
    data = [base64.b64encode(file).decode() if form is JSON else file for file in files]
    items = [{"images": [{"data": one}], "metadata": metadata} for one in data]
    return form.post(server, f"/v1/extract/{model}", {"items": items, "params": params})


def items_of(
    server: Server, model: str, images: Sequence[Image.Image], form: Form = MSGPACK, **asked: Any
) -> list[Any]:
    """Items of a successful answer."""
    answer = ask(server, model, images, form, **asked)
    assert answer.status == 200, answer.body
    items: list[Any] = form.load(answer.body)["items"]
    for item in items:
        assert set(item) == {"id", "entities", "relations", "classifications", "objects", "data"}
    return items


def box_of(points: Sequence[float], image: Image.Image) -> list[int]:
    """[x, y, width, height] around points x, y, x, y, ... inside the picture."""
    across = [min(max(0, round(x)), image.width) for x in points[0::2]]
    down = [min(max(0, round(y)), image.height) for y in points[1::2]]
    return [min(across), min(down), max(across) - min(across), max(down) - min(down)]


def assert_florence(item: Any, expected: Any, task: str, image: Image.Image) -> None:
    """An item says what the library's result says, in our form."""
    if isinstance(expected, str):
        assert [one["text"] for one in item["entities"]] == ([expected] if expected else [])
        assert all(one["bbox"] is None and one["score"] == 1.0 for one in item["entities"])
    elif "quad_boxes" in expected:
        boxes = [box_of(quad, image) for quad in expected["quad_boxes"]]
        assert [(one["text"], one["bbox"]) for one in item["entities"]] == list(
            zip(expected["labels"], boxes, strict=True)
        )
    else:
        found = [(one["label"], one["bbox"]) for one in item["objects"]]
        names = expected.get("labels", expected.get("bboxes_labels", []))
        assert names
        wanted = [
            (name or "object", box_of(box, image))
            for name, box in zip(names, expected.get("bboxes", []), strict=bool(expected.get("bboxes")))
        ]
        owners = expected.get("polygons_labels", names)
        for name, polygons in zip(owners, expected.get("polygons", []), strict=False):
            wanted.append((name or "object", box_of([value for one in polygons for value in one], image)))
        assert found == wanted, task


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("task", "beams"),
    [
        pytest.param(task, beams, marks=[pytest.mark.long] if beams > 1 and task not in SEARCHED else [])
        for task in TASKS
        for beams in (1, 3)
    ],
)
def test_florence_reads_what_the_library_reads_alone_and_in_a_batch(
    server: Server, place: Path, task: str, beams: int
) -> None:
    options = {"task": task, "num_beams": beams, "max_new_tokens": 24}
    together = items_of(server, FLORENCE, PICTURES, options=options, instruction=TASKS[task])
    [alone] = items_of(server, FLORENCE, PICTURES[:1], JSON, options=options, instruction=TASKS[task])
    prompt = task + (TASKS[task] or "")
    expected = [sights.florence2(place / "florence2", image, prompt, task, 24, beams) for image in PICTURES]
    for image, read, item in zip(PICTURES, expected, together, strict=True):
        assert_florence(item, read, task, image)
    assert_florence(alone, expected[0], task, PICTURES[0])


def test_a_question_beside_a_plain_task_is_answered(server: Server, place: Path) -> None:
    [item] = items_of(server, FLORENCE, PICTURES[:1], instruction="What is it?")
    expected = sights.florence2(place / "florence2", PICTURES[0], "<DocVQA>What is it?", "<DocVQA>", 40)
    assert expected
    assert [(one["text"], one["label"]) for one in item["entities"]] == [(expected, "answer")]


def test_labels_of_a_grounding_task_are_its_phrases(server: Server) -> None:
    options = {"task": "<CAPTION_TO_PHRASE_GROUNDING>"}
    named = items_of(server, FLORENCE, PICTURES[:1], labels=["a cat", "a river"], options=options)
    told = items_of(server, FLORENCE, PICTURES[:1], instruction="a cat, a river", options=options)
    assert named == told


def leaves(tree: Any, path: str = "") -> list[tuple[str, str]]:
    """(path, text) of everything in a tree."""
    if isinstance(tree, dict):
        return [one for key, value in tree.items() for one in leaves(value, f"{path}.{key}".strip("."))]
    if isinstance(tree, list):
        return [one for at, value in enumerate(tree) for one in leaves(value, f"{path}[{at}]")]
    return [(path, tree)] if tree else []


@pytest.mark.sample(3)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("task", "question"), [("<s_cord-v2>", None), ("<s_docvqa>", "What is the capital?"), (ASKED, "Who?")]
)
def test_donut_gives_the_librarys_tree_and_its_texts_alone_and_in_a_batch(
    server: Server, place: Path, task: str, question: str | None, beams: int
) -> None:
    options = {"task": task.replace("{}", "{instruction}"), "num_beams": beams}
    together = items_of(server, DONUT, PICTURES, options=options, instruction=question)
    [alone] = items_of(server, DONUT, PICTURES[:1], JSON, options=options, instruction=question)
    prompt = task if question is None else ASKED.format(question)
    trees = [sights.donut(place / "donut", image, prompt, 20, beams) for image in PICTURES]
    for tree, item in zip([*trees, trees[0]], [*together, alone], strict=True):
        assert item["data"] == (tree if isinstance(tree, dict) else {"items": tree})
        assert [(one["label"], one["text"]) for one in item["entities"]] == leaves(tree)


def pages(question: str, form: str = "pixels", words: Sequence[str] = WORDS) -> dict[str, Any]:
    """What asks a question about the words of a page."""
    return {"metadata": {"words": list(words), "boxes": BOXES[: len(words)], "box_format": form}} | {
        "instruction": question
    }


def corners_of(image: Image.Image, boxes: Sequence[Sequence[int]] = BOXES) -> list[list[int]]:
    """Boxes in pixels as left, top, right, bottom from 0 to 1000."""
    scale = (1000 / image.width, 1000 / image.height)
    return [
        [min(1000, int(value * scale[at % 2])) for at, value in enumerate((x, y, x + width, y + height))]
        for x, y, width, height in boxes
    ]


def assert_answer(item: Any, expected: sights.Answer, words: Sequence[str], image: Image.Image) -> None:
    """The one answer of an item."""
    [entity] = item["entities"]
    assert entity["text"] == " ".join(words[expected.first : expected.last + 1])
    assert abs(entity["score"] - expected.score) <= SCORE_LIMIT
    assert entity["label"] == "answer"
    own = BOXES[expected.first : expected.last + 1]
    points = [value for x, y, width, height in own for value in (x, y, x + width, y + height)]
    assert entity["bbox"] == box_of(points, image)


def test_layoutlmv3_points_at_the_likeliest_words_alone_and_in_a_batch(server: Server, place: Path) -> None:
    for question in ("What is the total?", "Who names the library, and why?"):
        together = items_of(server, PAGES, PICTURES, **pages(question))
        [alone] = items_of(server, PAGES, PICTURES[:1], JSON, **pages(question))
        for image, item in zip([*PICTURES, PICTURES[0]], [*together, alone], strict=True):
            expected = sights.layoutlmv3(place / "layoutlmv3", image, question, WORDS, corners_of(image))
            assert_answer(item, expected, WORDS, image)


def test_layoutlm_answers_as_the_pipeline_does_without_looking(server: Server, place: Path) -> None:
    image = PICTURES[0]
    for question in ("What is the total?", "Who names the library?"):
        [item] = items_of(server, WORDS_ONLY, [image], **pages(question))
        expected = sights.layoutlm(place / "layoutlm", question, WORDS, corners_of(image), None)
        assert_answer(item, expected, WORDS, image)


def test_a_long_page_is_cut_and_says_so_or_read_in_windows(server: Server, place: Path) -> None:
    image, question, words = PICTURES[0], "What is the total?", (WORDS * 6)[:90]
    boxes = [[7 * at % 80, at % 60, 9, 4] for at in range(len(words))]
    asked = {"metadata": {"words": words, "boxes": boxes}, "instruction": question}
    corners = corners_of(image, boxes)
    cut = JSON.load(ask(server, WORDS_ONLY, [image], JSON, **asked).body)
    assert cut["usage"] == {"tokens": [64], "truncated": [0]}
    whole = JSON.load(
        ask(server, WORDS_ONLY, [image], JSON, **asked, options={"overflow_policy": "chunk"}).body
    )
    assert whole["usage"]["truncated"] == [] and whole["usage"]["tokens"][0] > len(words)
    expected = sights.layoutlm(place / "layoutlm", question, words, corners, 16)
    [entity] = whole["items"][0]["entities"]
    assert abs(entity["score"] - expected.score) <= SCORE_LIMIT
    assert entity["text"] == " ".join(words[expected.first : expected.last + 1])
    answer = ask(server, WORDS_ONLY, [image], **asked, options={"overflow_policy": "error"})
    tokens = sights.tokens_of(place / "layoutlm", question, words)
    assert_refused(answer, 400, "INPUT_TOO_LONG", f"items[0]: {tokens} tokens with the question", "is 64")


def test_normalized_boxes_mean_the_same_as_pixels(server: Server) -> None:
    image = PICTURES[3]
    image = image.resize((100, 100))
    asked = pages("What is the total?")
    same = pages("What is the total?", "normalized")
    same["metadata"]["boxes"] = corners_of(image)
    assert items_of(server, PAGES, [image], **asked) == items_of(server, PAGES, [image], **same)


def test_more_answers_are_different_words_with_falling_scores(server: Server) -> None:
    [item] = items_of(server, PAGES, PICTURES[:1], **pages("What?"), options={"top_k": 5})
    scores = [one["score"] for one in item["entities"]]
    assert len(scores) == 5 and scores == sorted(scores, reverse=True)
    assert len({(one["text"], tuple(one["bbox"])) for one in item["entities"]}) == 5
    [fewer] = items_of(
        server, PAGES, PICTURES[:1], **pages("What?"), options={"top_k": 5, "threshold": scores[1]}
    )
    assert fewer["entities"] == item["entities"][:2]


def test_requests_of_every_kind_at_once_get_their_own_answers(server: Server, place: Path) -> None:
    def one(at: int) -> None:
        image, form = PICTURES[at % len(PICTURES)], FORMS[at % 2]
        if at % 3 == 0:
            task = ("<OD>", "<OCR>", "<CAPTION>")[at // 3 % 3]
            [item] = items_of(server, FLORENCE, [image], form, options={"task": task, "max_new_tokens": 16})
            expected = sights.florence2(place / "florence2", image, task, task, 16)
            assert_florence(item, expected, task, image)
        elif at % 3 == 1:
            question = ("Who?", "What is the capital of it?")[at % 2]
            [item] = items_of(server, DONUT, [image], form, instruction=question)
            assert item["data"] == sights.donut(place / "donut", image, ASKED.format(question), 20)
        else:
            question = ("Who?", "What is the total of it?")[at % 2]
            [item] = items_of(server, PAGES, [image], form, **pages(question))
            expected = sights.layoutlmv3(place / "layoutlmv3", image, question, WORDS, corners_of(image))
            assert_answer(item, expected, WORDS, image)

    with ThreadPoolExecutor(8) as pool:
        for waiting in [pool.submit(one, at) for at in range(36)]:
            waiting.result()


QUESTION = {"instruction": "What?"}
REFUSED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    (FLORENCE, {"options": {"task": "<DANCE>"}}, ("params.options.task", "<DANCE>", "<OCR>")),
    (FLORENCE, {"options": {"task": 5}}, ("params.options.task", "int")),
    (FLORENCE, {"options": {"task": "<CAPTION_TO_PHRASE_GROUNDING>"}}, ("params.instruction",)),
    (FLORENCE, {"labels": ["cat"]}, ("params.labels", "<OCR_WITH_REGION>")),
    (FLORENCE, {"instruction": "What is <image>?"}, ("params.instruction", "'<image>'")),
    (FLORENCE, {"instruction": "<OCR> it"}, ("params.instruction", "'<OCR>'")),
    (
        FLORENCE,
        {"labels": ["cat", "<image>"], "options": {"task": "<OPEN_VOCABULARY_DETECTION>"}},
        ("params.labels", "'<image>'"),
    ),
    (FLORENCE, {"options": {"max_new_tokens": 0}}, ("max_new_tokens", "0", "below 1")),
    (FLORENCE, {"options": {"num_beams": 17}}, ("num_beams", "17", "1..16")),
    (DONUT, {}, ("params.instruction", "<s_docvqa>")),
    (DONUT, {"options": {"task": "<s_cord-v2>"}, **QUESTION}, ("params.instruction", "none")),
    (DONUT, {"options": {"task": "<s_unknown>"}}, ("params.options.task", "<s_unknown>", "<s_docvqa>")),
    (PAGES, {"metadata": {"words": ["a"], "boxes": [[0, 0, 1, 1]]}}, ("params.instruction",)),
    (PAGES, QUESTION, ("items[0].metadata", "words")),
    (PAGES, {"metadata": {"words": ["a"], "boxes": []}, **QUESTION}, ("items[0].metadata.boxes", "0", "1")),
    (PAGES, {"metadata": {"words": [5], "boxes": [[0, 0, 1, 1]]}, **QUESTION}, ("metadata.words[0]",)),
    (PAGES, {"metadata": {"words": ["a"], "boxes": [[0, 0, 1]]}, **QUESTION}, ("metadata.boxes[0]",)),
    (
        PAGES,
        {"metadata": {"words": ["a"], "boxes": [[0, -1, 1, 1]]}, **QUESTION},
        ("metadata.boxes[0]", "-1"),
    ),
    (
        PAGES,
        {"metadata": {"words": ["a"], "boxes": [[9, 0, 1, 1]], "box_format": "normalized"}, **QUESTION},
        ("metadata.boxes[0]", "1000"),
    ),
    (
        PAGES,
        {"metadata": {"words": ["a"], "boxes": [[0, 0, 1, 1]], "box_format": "inches"}, **QUESTION},
        ("box_format", "inches", "pixels"),
    ),
    (PAGES, {**pages("What?"), "options": {"top_k": 51}}, ("top_k", "51", "1..50")),
)


@pytest.mark.parametrize(("model", "asked", "mentions"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_a_reader_cannot_use_is_refused_by_name(
    server: Server, model: str, asked: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    assert_refused(ask(server, model, PICTURES[:1], **asked), 400, "INVALID_INPUT", *mentions)


@pytest.mark.parametrize("model", [FLORENCE, DONUT, PAGES])
def test_a_question_that_leaves_no_room_is_refused(server: Server, model: str) -> None:
    asked = pages("What is the river? " * 100)
    assert_refused(ask(server, model, PICTURES[:1], **asked), 400, "INPUT_TOO_LONG", "params.instruction")


def test_a_text_as_long_as_the_model_can_write_ends_there(server: Server, place: Path) -> None:
    [item] = items_of(
        server, DONUT, PICTURES[:1], instruction="What?", options={"max_new_tokens": 4096, "num_beams": 1}
    )
    tokenizer = sights.parts(place / "donut", "VisionEncoderDecoderModel")[1].tokenizer
    prompt = len(tokenizer(ASKED.format("What?"), add_special_tokens=False)["input_ids"])
    assert item["data"] == sights.donut(place / "donut", PICTURES[0], ASKED.format("What?"), 129 - prompt)
