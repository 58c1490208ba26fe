"""The OCR language models over HTTP with tiny models, against transformers run on one page alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from tests.conformance.conftest import Families
from tests.conformance.conversations import PICTURE, token_ids
from tests.conformance.sights import GLM, LIGHTON, PADDLE, parts
from tests.conformance.towers import item_of
from tests.conformance.wire import JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Answer, Server
from tests.tiny.ocr import POSITIONS
from tests.tiny.pictures import picture

MODELS: dict[str, tuple[str, str, dict[str, str]]] = {
    LIGHTON: ("lighton_ocr", "LightOnOcrForConditionalGeneration", {"ocr": ""}),
    GLM: (
        "glm_ocr",
        "GlmOcrForConditionalGeneration",
        {"ocr": "Text Recognition:", "table": "Table Recognition:"},
    ),
    PADDLE: (
        "paddleocr_vl",
        "PaddleOCRVLForConditionalGeneration",
        {"ocr": "OCR:", "chart": "Chart Recognition:"},
    ),
}
PICTURES = [picture(1), picture(2, 200, 40), picture(3), picture(4, 60, 120)]


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


@pytest.fixture
def place(families: Families) -> Path:
    """Where the models lie."""
    return families.place / "sights"


@torch.inference_mode()
def reference(
    directory: Path, model: str, image: Image.Image, words: str, tokens: int = 12, beams: int = 1
) -> str:
    """What transformers writes about a page, greedily or by beam search."""
    loaded, tokenizer = parts(directory, MODELS[model][1], "AutoTokenizer")
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    ids, seen = token_ids(tokenizer, images, [("user", PICTURE + words)], [image])
    if model != LIGHTON:
        seen["mm_token_type_ids"] = (ids == loaded.config.image_token_id).int()
    rows = loaded.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, num_beams=beams, do_sample=False,
        **seen,
    )  # fmt: skip
    text: str = tokenizer.decode(rows[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def ask(
    server: Server, model: str, images: Sequence[Image.Image], form: Form = MSGPACK, **params: Any
) -> Answer:
    """POST pictures to extract."""
    body = {"items": [item_of(image, form) for image in images], "params": params}
    return form.post(server, f"/v1/extract/{model}", body)


def texts(
    server: Server, model: str, images: Sequence[Image.Image], form: Form = MSGPACK, **params: Any
) -> list[str]:
    """The one text of each item of a successful answer."""
    answer = ask(server, model, images, form, **params)
    assert answer.status == 200, answer.body
    items = form.load(answer.body)["items"]
    assert all([entity["label"] for entity in item["entities"]] == ["text"] for item in items)
    return [item["entities"][0]["text"] for item in items]


@pytest.mark.parametrize("model", MODELS)
def test_pages_have_the_texts_of_transformers_alone_and_in_a_batch(
    server: Server, place: Path, model: str
) -> None:
    tiny, _, tasks = MODELS[model]
    for task, words in tasks.items():
        expected = [reference(place / tiny, model, image, words) for image in PICTURES]
        assert texts(server, model, PICTURES, options={"task": task}) == expected
        assert texts(server, model, PICTURES[:1], JSON, options={"task": task}) == expected[:1]
        assert len(set(expected)) > 2


@pytest.mark.parametrize("model", MODELS)
def test_an_instruction_takes_the_place_of_the_words_and_beams_are_searched(
    server: Server, place: Path, model: str
) -> None:
    tiny = MODELS[model][0]
    asked = {"instruction": "Where is the bridge?", "options": {"num_beams": 2, "max_new_tokens": 6}}
    expected = reference(place / tiny, model, PICTURES[0], "Where is the bridge?", 6, 2)
    assert texts(server, model, PICTURES[:1], **asked) == [expected]


@pytest.mark.parametrize("model", MODELS)
def test_a_page_and_its_text_stay_within_the_positions_of_the_model(server: Server, model: str) -> None:
    answer = ask(server, model, PICTURES[:1], JSON, options={"max_new_tokens": 4096})
    assert answer.status == 200, answer.body
    [used] = JSON.load(answer.body)["usage"]["tokens"]
    assert used < POSITIONS


REFUSED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"options": {"task": "poem"}}, "INVALID_INPUT", ("params.options.task", "'poem'", "ocr")),
    ({"instruction": "read <|image_pad|>"}, "INVALID_INPUT", ("params.instruction", "<|image_pad|>")),
    ({"instruction": "read it " * 200}, "INPUT_TOO_LONG", ("params.instruction", "tokens")),
    ({"instruction": "x" * 20_000}, "INPUT_TOO_LONG", ("params.instruction", "characters")),
    ({"options": {"num_beams": 99}}, "INVALID_INPUT", ("params.options.num_beams", "16")),
]


@pytest.mark.parametrize(("params", "code", "mentions"), REFUSED)
def test_what_no_page_can_be_asked_is_refused(
    server: Server, params: dict[str, Any], code: str, mentions: tuple[str, ...]
) -> None:
    assert_refused(ask(server, GLM, PICTURES[:1], JSON, **params), 400, code, *mentions)


def test_a_page_that_leaves_no_room_for_a_text_is_refused(server: Server) -> None:
    answer = ask(server, GLM, [picture(1, 112, 112)], JSON, instruction="bridge " * 94)
    assert_refused(
        answer, 400, "INPUT_TOO_LONG", "items[0]: images[0]", "tokens with the task", str(POSITIONS)
    )
