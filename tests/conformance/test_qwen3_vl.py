"""Qwen3-VL embedding and reranking over HTTP with a tiny model, against transformers run on one conversation alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.conformance.conftest import Families
from tests.conformance.conversations import PICTURE, token_ids
from tests.conformance.towers import EMBEDDING, RERANKER, ask, item_of, items_of
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Server
from tests.tiny.pictures import picture
from tests.tiny.texts import sentences
from tests.tiny.towers import CHAT_TOKENS

LIMIT = 1e-5
LONG = " ".join(sentences()[4:40])
REPRESENT = "Represent the user's input."
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
RETRIEVE = "Given a search query, retrieve relevant candidates that answer the query."

Content = str | Image.Image | tuple[Image.Image, str]
"""A text, a picture, or a picture with a text."""

MIXED: list[Content] = [
    "river",
    picture(1),
    (picture(2, 200, 40), "Where is the bridge?"),
    sentences()[3],
    picture(3, 64, 130),
    (picture(1), "river"),
]


class Reference:
    """The model opened by transformers alone, which reads one conversation at a time, without padding."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(directory).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.images = transformers.AutoImageProcessor.from_pretrained(
            directory, backend="pil", min_pixels=4 * 32 * 32, max_pixels=1800 * 32 * 32
        )

    def ids(self, system: str, user: str, pictures: Sequence[Image.Image]) -> tuple[Any, dict[str, Any]]:
        """Token ids [1, t] of a conversation, and the model's arguments for its pictures."""
        return token_ids(self.tokenizer, self.images, [("system", system), ("user", user)], pictures)

    @torch.inference_mode()
    def last(self, system: str, user: str, pictures: Sequence[Image.Image]) -> torch.Tensor:
        """The vector [width] of the last token."""
        ids, seen = self.ids(system, user, pictures)
        marks = (ids == self.model.config.image_token_id).int()
        return self.model.model(input_ids=ids, mm_token_type_ids=marks, **seen).last_hidden_state[0, -1]

    def vector(self, content: Content, instruction: str = REPRESENT) -> np.ndarray:
        """The normalised vector of an item."""
        text, pictures = written(content)
        return np.asarray(torch.nn.functional.normalize(self.last(instruction, text, pictures), dim=0))

    @torch.inference_mode()
    def score(self, query: Content, document: Content, instruction: str = RETRIEVE) -> float:
        """The probability of "yes" against "no"."""
        (asked, first), (answer, second) = written(query), written(document)
        user = f"<Instruct>: {instruction}<Query>:{asked}\n<Document>:{answer}"
        yes, no = self.tokenizer.convert_tokens_to_ids(["yes", "no"])
        logits = self.model.lm_head(self.last(JUDGE, user, [*first, *second]))[[yes, no]]
        return float(torch.softmax(logits, 0)[0])


def written(content: Content) -> tuple[str, list[Image.Image]]:
    """The content as the template writes it, and its pictures."""
    if isinstance(content, str):
        return content, []
    image, text = content if isinstance(content, tuple) else (content, "")
    return PICTURE + text, [image]


def item(content: Content, form: Form) -> dict[str, Any]:
    """The content as an item of a request."""
    if isinstance(content, tuple):
        return {**item_of(content[0], form), "text": content[1]}
    return item_of(content, form)


@functools.cache
def opened(directory: Path) -> Reference:
    """The reference of a directory."""
    return Reference(directory)


@pytest.fixture
def reference(families: Families) -> Reference:
    """The reference of the tiny model."""
    return opened(families.place / "towers" / "qwen3_vl")


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


def encode(server: Server, contents: Sequence[Content], form: Form = MSGPACK, **params: Any) -> Any:
    """A successful answer."""
    body = {"items": [item(content, form) for content in contents], "params": params}
    answer = form.post(server, f"/v1/encode/{EMBEDDING}", body)
    assert answer.status == 200, answer.body
    return form.load(answer.body)


def scores(
    server: Server, query: Content, contents: Sequence[Content], form: Form = MSGPACK, **more: Any
) -> Any:
    """Scores in the order of the items."""
    body = {"query": item(query, form), "items": [item(content, form) for content in contents], **more}
    answer = form.post(server, f"/v1/score/{RERANKER}", body)
    assert answer.status == 200, answer.body
    found = {entry["item_id"]: entry["score"] for entry in form.load(answer.body)["scores"]}
    return np.array([found[f"item-{index}"] for index in range(len(contents))])


def assert_row(found: Any, expected: np.ndarray) -> None:
    """Equal within the tolerance of dense vectors."""
    assert np.abs(np.asarray(found["dense"]["values"]) - expected).max() <= LIMIT


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_vectors_are_those_of_the_conversation_alone_in_any_mix(
    server: Server, reference: Reference, form: Form
) -> None:
    expected = [reference.vector(content) for content in MIXED]
    answer = encode(server, MIXED, form)
    for found, row in zip(answer["items"], expected, strict=True):
        assert set(found) == {"dense"}
        assert_row(found, row)
    assert answer["usage"]["tokens"][1] - encode(server, [""], form)["usage"]["tokens"][0] == 2 + 6
    distances = np.linalg.norm(np.stack(expected)[:, None] - np.stack(expected)[None], axis=-1)
    assert distances[~np.eye(len(MIXED), dtype=bool)].min() > 0.01


def test_an_instruction_takes_the_place_of_the_default_and_ends_with_a_mark(
    server: Server, reference: Reference
) -> None:
    for given, read in (("find images", "find images."), (" find it! ", "find it!")):
        answer = encode(server, MIXED[:2], instruction=given)
        for found, content in zip(answer["items"], MIXED, strict=False):
            assert_row(found, reference.vector(content, read))


def test_a_long_text_loses_its_end_and_keeps_its_picture(server: Server, reference: Reference) -> None:
    answer = encode(server, ["river", (picture(1), LONG)])
    assert answer["usage"]["truncated"] == [1]
    assert CHAT_TOKENS - 3 <= answer["usage"]["tokens"][1] <= CHAT_TOKENS
    found = np.asarray(answer["items"][1]["dense"]["values"])
    spans = reference.tokenizer(LONG, return_offsets_mapping=True)["offset_mapping"]
    kept = [(picture(1), LONG[:start]) for start, _ in spans[80:CHAT_TOKENS]]
    assert min(np.abs(found - reference.vector(content)).max() for content in kept) <= LIMIT
    refused = ask(server, EMBEDDING, [LONG], options={"overflow_policy": "error"})
    assert_refused(refused, 400, "INPUT_TOO_LONG", "items[0].text", " tokens, ", f"is {CHAT_TOKENS}")


def test_a_picture_larger_than_the_model_s_room_is_refused(server: Server) -> None:
    refused = ask(server, EMBEDDING, [picture(1, 480, 480)])
    assert_refused(refused, 400, "INPUT_TOO_LONG", "items[0]: 2", "tokens without the text", str(CHAT_TOKENS))


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>"])
def test_marks_of_pictures_are_refused_in_texts_and_instructions(server: Server, mark: str) -> None:
    found = items_of(server, EMBEDDING, [f"a {mark}", "river"], item_errors=True)
    assert found[0]["error"]["code"] == "INVALID_INPUT" and mark in found[0]["error"]["message"]
    assert "dense" in found[1]
    assert_refused(
        ask(server, EMBEDDING, ["a"], instruction=mark), 400, "INVALID_INPUT", "params.instruction: ", mark
    )
    body: dict[str, Any] = {"query": {"text": mark}, "items": [{"text": "a"}]}
    assert_refused(
        JSON.post(server, f"/v1/score/{RERANKER}", body), 400, "INVALID_INPUT", "query: text: ", mark
    )
    body = {"query": {"text": "a"}, "items": [{"text": "a"}], "instruction": mark}
    refused = JSON.post(server, f"/v1/score/{RERANKER}", body)
    assert_refused(refused, 400, "INVALID_INPUT", "instruction: ", mark)


@pytest.mark.parametrize("query", [MIXED[0], MIXED[1], MIXED[2]], ids=["text", "picture", "both"])
def test_scores_are_the_probability_of_yes_for_texts_and_pictures(
    server: Server, reference: Reference, query: Any
) -> None:
    expected = np.array([reference.score(query, content) for content in MIXED[:4]])
    assert np.abs(scores(server, query, MIXED[:4]) - expected).max() <= LIMIT
    assert np.abs(scores(server, query, MIXED[:1], JSON) - expected[:1]).max() <= LIMIT
    assert np.ptp(expected) > 100 * LIMIT


def test_a_score_reads_the_instruction(server: Server, reference: Reference) -> None:
    expected = reference.score("river", MIXED[1], "find maps")
    assert abs(scores(server, "river", [MIXED[1]], instruction="find maps")[0] - expected) <= LIMIT
    assert abs(expected - reference.score("river", MIXED[1])) > 10 * LIMIT


def test_a_long_pair_keeps_half_of_its_room_for_the_query(server: Server) -> None:
    body = {"query": {"text": LONG}, "items": [{"text": LONG}, {"text": "river"}]}
    answer = JSON.post(server, f"/v1/score/{RERANKER}", body)
    usage = JSON.load(answer.body)["usage"]
    assert usage["truncated"] == [0, 1] and max(usage["tokens"]) <= CHAT_TOKENS
    same = scores(server, LONG, ["river", "river"])
    assert abs(same[0] - same[1]) <= LIMIT
    assert abs(same[0] - scores(server, LONG[:-40], ["river"])[0]) <= LIMIT, "the end of the query is cut"
    body["options"] = {"overflow_policy": "error"}
    refused = JSON.post(server, f"/v1/score/{RERANKER}", body)
    assert_refused(refused, 400, "INPUT_TOO_LONG", "query", " tokens, ", f"is {CHAT_TOKENS}")
