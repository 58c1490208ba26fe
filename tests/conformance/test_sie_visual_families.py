"""The visual encode families over HTTP with tiny models, against transformers and sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import towers
from tests.conformance.conftest import Families
from tests.conformance.towers import (
    CLIP,
    PALI,
    QWEN,
    RAW,
    SIGLIP,
    SMALL_PAGES,
    Input,
    Pages,
    ask,
    item_of,
    items_of,
)
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Server
from tests.tiny.pictures import picture
from tests.tiny.texts import sentences
from tests.tiny.towers import QUERY_TOKENS, TEXT_TOKENS

DENSE_LIMIT, SCORE_LIMIT = 1e-5, 1e-3
LONG = " ".join(sentences()[4:12])
MIXED: list[Any] = [
    picture(1),
    "river",
    picture(2, 40, 200),
    "",
    "Where is the bridge?",
    picture(3, 300, 60),
    picture(4, 33, 33),
    sentences()[3],
]


@pytest.fixture
def place(families: Families) -> Path:
    """Where the models lie."""
    return families.place / "towers"


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


@pytest.fixture(scope="module")
def pages(families: Families) -> dict[str, Pages]:
    """The references of the page retrievers."""
    place = families.place / "towers"
    return {PALI: Pages(place / "colpali"), QWEN: Pages(place / "colqwen2")}


def assert_rows(found: Any, expected: np.ndarray) -> None:
    """Equal within the limit of normalised vectors."""
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0, atol=DENSE_LIMIT)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(("model", "tiny"), [(CLIP, "clip"), (SIGLIP, "siglip")])
def test_texts_and_images_have_the_vectors_of_transformers_in_any_mix(
    server: Server, place: Path, model: str, tiny: str, form: Form
) -> None:
    expected = [towers.dense(place / tiny, one) for one in MIXED]
    together = items_of(server, model, MIXED, form)
    alone = [items_of(server, model, [one], form)[0] for one in MIXED[:3]]
    for item, row in zip([*together, *alone], [*expected, *expected[:3]], strict=True):
        assert set(item) == {"dense"} and item["dense"]["dims"] == len(row)
        assert_rows(item["dense"]["values"], row)
    distances = np.linalg.norm(np.stack(expected)[:, None] - np.stack(expected)[None], axis=-1)
    assert distances[~np.eye(len(MIXED), dtype=bool)].min() > 0.01, (
        "inputs must differ for this to mean anything"
    )


def test_vectors_keep_their_length_where_the_catalog_says_so(server: Server, place: Path) -> None:
    for item, one in zip(items_of(server, RAW, MIXED[:2]), MIXED, strict=False):
        expected = towers.dense(place / "clip", one, normalize=False)
        assert abs(np.linalg.norm(expected) - 1) > 0.1
        np.testing.assert_allclose(item["dense"]["values"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model", "tiny"), [(CLIP, "clip"), (SIGLIP, "siglip")])
def test_long_texts_are_cut_as_transformers_cuts_them(
    server: Server, place: Path, model: str, tiny: str
) -> None:
    answer = MSGPACK.load(ask(server, model, ["river", LONG, picture(1)]).body)
    assert answer["usage"]["truncated"] == [1]
    assert answer["usage"]["tokens"][1:] == [TEXT_TOKENS, 16]
    assert_rows(answer["items"][1]["dense"]["values"], towers.dense(place / tiny, LONG))
    refused = ask(server, model, ["river", LONG], options={"overflow_policy": "error"})
    assert_refused(refused, 400, "INPUT_TOO_LONG", "items[1].text", " tokens, ", f"is {TEXT_TOKENS}")


@pytest.mark.parametrize(("model", "tiny"), [(CLIP, "clip"), (SIGLIP, "siglip")])
def test_long_texts_lose_their_beginnings_on_demand(
    server: Server, place: Path, model: str, tiny: str
) -> None:
    options = {"overflow_policy": "truncate_left"}
    answer = MSGPACK.load(ask(server, model, ["river", LONG], options=options).body)
    assert answer["usage"] == {"tokens": answer["usage"]["tokens"], "truncated": [1]}
    expected = towers.dense(place / tiny, LONG, side="left")
    assert np.abs(expected - towers.dense(place / tiny, LONG)).max() > 1e-3
    assert_rows(answer["items"][1]["dense"]["values"], expected)


@pytest.mark.parametrize(("model", "policy"), [(CLIP, "chunk"), (PALI, "chunk"), (PALI, "truncate_left")])
def test_queries_are_not_split_nor_those_for_pages_cut_on_the_left(
    server: Server, model: str, policy: str
) -> None:
    answer = ask(server, model, ["river"], options={"overflow_policy": policy})
    assert_refused(answer, 400, "INVALID_INPUT", "params.options.overflow_policy")


def test_texts_go_through_the_template(server: Server, place: Path) -> None:
    options = {"text_template": "a {text}!"}
    found = items_of(server, CLIP, ["river", picture(1)], options=options)
    assert_rows(found[0]["dense"]["values"], towers.dense(place / "clip", "a river!"))
    assert_rows(found[1]["dense"]["values"], towers.dense(place / "clip", picture(1)))
    for wrong in ("a river", "{text} {text}", 5, ["{text}"], "a" * 195 + "{text}"):
        answer = ask(server, CLIP, ["river"], options={"text_template": wrong})
        assert_refused(answer, 400, "INVALID_INPUT", "params.options.text_template")


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("model", [PALI, QWEN])
def test_pages_and_queries_have_the_vectors_of_sentence_transformers_in_any_mix(
    server: Server, pages: dict[str, Pages], model: str, form: Form
) -> None:
    inputs = [one for one in MIXED if one]
    expected = [pages[model].vectors(one) for one in inputs]
    together = items_of(server, model, inputs, form)
    alone = [items_of(server, model, [one], form)[0] for one in inputs[:3]]
    for item, rows in zip([*together, *alone], [*expected, *expected[:3]], strict=True):
        assert set(item) == {"multivector"}
        assert (item["multivector"]["num_tokens"], item["multivector"]["token_dims"]) == rows.shape
        assert_rows(item["multivector"]["values"], rows)
    assert len({len(rows) for rows in expected}) > 3


@pytest.mark.parametrize("model", [PALI, QWEN])
def test_queries_are_cut_before_their_augmentation(
    server: Server, pages: dict[str, Pages], model: str
) -> None:
    text = LONG + LONG
    answer = MSGPACK.load(ask(server, model, ["river", text]).body)
    assert answer["usage"]["truncated"] == [1]
    found = np.asarray(answer["items"][1]["multivector"]["values"])
    assert (
        QUERY_TOKENS - 4
        <= len(found)
        <= QUERY_TOKENS
        == answer["usage"]["tokens"][1] + QUERY_TOKENS - len(found)
    )
    nearest = [np.abs(found - rows).max() for rows in pages[model].cut(text) if len(rows) == len(found)]
    assert nearest and min(nearest) <= DENSE_LIMIT
    refused = ask(server, model, [text], options={"overflow_policy": "error"})
    assert_refused(refused, 400, "INPUT_TOO_LONG", "items[0].text", " tokens, ", f"is {QUERY_TOKENS}")


MARKS = ("<image>", "<|image_pad|>", "<|video_pad|>", "<pad> <bos>", "<|vision_start|><|im_end|>", "\u2581")


@pytest.mark.parametrize("text", MARKS)
@pytest.mark.parametrize(("model", "mark"), [(PALI, "<image>"), (QWEN, "<|image_pad|>")])
def test_marks_of_the_model_in_a_query_are_tokens_unless_they_stand_for_an_image(
    server: Server, pages: dict[str, Pages], model: str, mark: str, text: str
) -> None:
    found = items_of(server, model, [f"a {text} b", picture(1)], item_errors=True)
    assert_rows(found[1]["multivector"]["values"], pages[model].vectors(picture(1)))
    if text == mark:
        assert found[0]["error"]["code"] == "INVALID_INPUT" and mark in found[0]["error"]["message"]
    else:
        assert_rows(found[0]["multivector"]["values"], pages[model].vectors(f"a {text} b"))


def test_the_catalog_may_make_pages_smaller(server: Server, pages: dict[str, Pages]) -> None:
    wide = [picture(1, 300, 200), picture(2, 40, 200)]
    usual = [item["multivector"]["num_tokens"] for item in items_of(server, QWEN, wide)]
    small = [item["multivector"]["num_tokens"] for item in items_of(server, SMALL_PAGES, wide)]
    assert all(less < more for less, more in zip(small, usual, strict=True))
    whole = pages[QWEN].processor.image_processor
    before = whole.size
    try:
        whole.size = {"shortest_edge": 28 * 28, "longest_edge": towers.SMALL_PIXELS}
        expected = [len(pages[QWEN].processor.process_images(images=[one])["input_ids"][0]) for one in wide]
    finally:
        whole.size = before
    assert small == expected


def score(
    server: Server, model: str, query: Input, items: Sequence[Input], form: Form = MSGPACK
) -> np.ndarray:
    """Scores in the order of the items."""
    body = {"query": item_of(query, form), "items": [item_of(one, form) for one in items]}
    answer = form.post(server, f"/v1/score/{model}", body)
    assert answer.status == 200, answer.body
    found = {entry["item_id"]: entry["score"] for entry in form.load(answer.body)["scores"]}
    return np.array([found[f"item-{index}"] for index in range(len(items))])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "query", ["river", sentences()[3], picture(5, 80, 60)], ids=["short", "long", "picture"]
)
@pytest.mark.parametrize("model", [PALI, QWEN])
def test_scores_are_those_of_the_processor_for_pages_and_texts(
    server: Server, pages: dict[str, Pages], model: str, query: Any
) -> None:
    items = [one for one in MIXED if one]
    expected = pages[model].scores(query, items)
    assert np.abs(score(server, model, query, items) - expected).max() <= SCORE_LIMIT
    assert np.abs(score(server, model, query, items[:1], JSON) - expected[:1]).max() <= SCORE_LIMIT
    assert np.ptp(expected) > 100 * SCORE_LIMIT


def test_a_broken_page_fails_the_score_and_a_broken_query_is_named(server: Server) -> None:
    broken = towers.encoded(picture(1))[:150]
    for body, named in (
        ({"query": {"text": "a"}, "items": [item_of(picture(1), JSON), item_of(broken, JSON)]}, "items[1]"),
        ({"query": item_of(broken, JSON), "items": [item_of(picture(1), JSON)]}, "query"),
    ):
        answer = JSON.post(server, f"/v1/score/{PALI}", body)
        assert_refused(answer, 400, "INVALID_INPUT", f"{named}: images[0]: cannot be decoded")


def test_requests_of_every_kind_at_once_get_their_own_answers(
    server: Server, place: Path, pages: dict[str, Pages]
) -> None:
    inputs = [one for one in MIXED if one]
    dense = {
        model: [towers.dense(place / tiny, one) for one in inputs]
        for model, tiny in ((CLIP, "clip"), (SIGLIP, "siglip"))
    }
    late = {model: [pages[model].vectors(one) for one in inputs] for model in (PALI, QWEN)}

    def encode(at: int) -> None:
        chosen = [at % len(inputs), (at * 3 + 1) % len(inputs)]
        given = [inputs[index] for index in chosen]
        for model, rows in dense.items():
            for index, item in zip(chosen, items_of(server, model, given), strict=True):
                assert_rows(item["dense"]["values"], rows[index])
        for model, rows in late.items():
            for index, item in zip(chosen, items_of(server, model, given), strict=True):
                assert_rows(item["multivector"]["values"], rows[index])

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(encode, at) for at in range(16)]:
            job.result()


def test_what_an_image_costs_is_told_with_the_tokens(server: Server) -> None:
    answer = JSON.load(ask(server, PALI, [picture(1), picture(2, 300, 40)], JSON).body)
    assert answer["usage"] == {
        "tokens": [len(row["multivector"]["values"]) for row in answer["items"]],
        "truncated": [],
    }
