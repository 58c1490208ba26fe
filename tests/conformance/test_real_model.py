"""The shipped MiniLM through HTTP against sentence-transformers: numbers, meaning, and no answer for another's text."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.corpus import passages
from tests.conformance.minilm import (
    DIMS,
    HALF,
    LONGEST_TOKENS,
    MODEL,
    PROMPTED,
    reference,
    reference_model,
    token_ids,
)
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form
from tests.harness.cluster import ways_to
from tests.harness.server import ROOT, Server

REQUEST_SIZES = (1, 1, 1, 2, 3, 5, 8, 16, 33, 64)


server = ways_to("minilm_server")


def words_of_the_readme(count: int) -> list[str]:
    """Passages of the same lengths as those of the corpus up to 100 words, which take no time to collect."""
    words = itertools.cycle((ROOT / "README.md").read_text().split())
    chosen = random.Random(7)
    lengths = (int(math.exp(chosen.uniform(math.log(8), math.log(100)))) for _ in range(count))
    return [" ".join(itertools.islice(words, length)) for length in lengths]


def encode(
    server: Server, texts: Sequence[str], form: Form = MSGPACK, model: str = MODEL, **params: object
) -> np.ndarray:
    """float32 [n, 384] vectors by the server."""
    body = {"items": [{"text": text} for text in texts], "params": params}
    answer = form.post(server, f"/v1/encode/{model}", body)
    assert answer.status == 200, answer.body
    return np.array([item["dense"]["values"] for item in form.load(answer.body)["items"]], np.float32)


def cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Cosine of corresponding rows, in double precision."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / norms)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_first_request_of_the_readme_gives_the_models_vector(server: Server, form: Form) -> None:
    row = encode(server, ["Hello, world!"], form)
    assert row.shape == (1, DIMS)
    assert cosine(row, reference(["Hello, world!"]))[0] >= 0.99999
    assert abs(np.linalg.norm(row) - 1) < 1e-5


# query, right answer; every other answer in the list is a distractor
RETRIEVAL = (
    ("Where do penguins live?", "The birds breed on the coasts of Antarctica and southern islands."),
    ("how do I bake bread", "Knead flour, water, salt and yeast, let the dough rise, and put it into a hot oven."),
    ("What causes ocean tides?", "The pull of the Moon makes the sea rise and fall twice a day."),
    ("fix a flat bicycle tyre", "Take the wheel off, find the hole in the tube and glue a patch over it."),
    ("Who painted the Mona Lisa?", "The portrait is a work of Leonardo da Vinci."),
    ("how to merge two branches in git", "Check out the target, run a merge, then resolve the conflicts."),
    ("treatment for high blood pressure", "Doctors advise less salt, more exercise and drugs that relax the vessels."),
    ("largest planet of the solar system", "Jupiter is more massive than all of its sisters together."),
    ("cancel my subscription", "Open your account page and choose 'end membership' to stop the monthly payments."),
    ("why do leaves turn red in autumn", "As chlorophyll breaks down, other pigments of the foliage become visible."),
)  # fmt: skip
# sentence, paraphrase, unrelated sentence
TRIPLETS = (
    ("A child is feeding ducks at the pond.", "A kid throws bread to birds in the water.", "Banks raised rates."),
    ("The plane was delayed by fog.", "Because of mist the flight left late.", "He plays the violin in an orchestra."),
    ("She sold her car last week.", "Some days ago she found a buyer for her vehicle.", "Mushrooms like damp."),
    ("The bridge is closed for repairs.", "You cannot cross the river there while it is being fixed.", "I like tea."),
)  # fmt: skip


def test_every_query_finds_its_answer(server: Server) -> None:
    queries, answers = zip(*RETRIEVAL, strict=True)
    similarity = encode(server, queries) @ encode(server, answers, JSON).T
    assert similarity.argmax(axis=1).tolist() == list(range(len(RETRIEVAL)))


def test_a_paraphrase_is_nearer_than_an_unrelated_sentence(server: Server) -> None:
    sentences, paraphrases, others = (encode(server, texts) for texts in zip(*TRIPLETS, strict=True))
    assert cosine(sentences, paraphrases).min() > cosine(sentences, others).max() + 0.15


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\t", "a", "UPPER", "🙂🙃", "東京都", "e\u0301 é", "\u202eabc", "[CLS] [SEP] [MASK]", "word " * 1000],
    ids=lambda text: ascii(text)[:20],
)  # fmt: skip
def test_odd_texts_get_the_vector_that_the_model_gives_them(server: Server, text: str) -> None:
    assert np.abs(encode(server, [text]) - reference([text])).max() <= 1e-5


def test_a_vector_does_not_depend_on_its_neighbours(server: Server) -> None:
    alone = encode(server, ["The plane was delayed by fog."])
    neighbours = [text * (1 + turn % 5) for turn, (_, text) in enumerate(RETRIEVAL)]
    among = encode(server, [*neighbours, "The plane was delayed by fog.", *reversed(neighbours)])
    assert np.abs(among[len(neighbours)] - alone[0]).max() <= 1e-6


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "texts_of"), [(30, words_of_the_readme), pytest.param(2000, passages, marks=pytest.mark.long)]
)
def test_passages_in_mixed_concurrent_requests_get_the_models_vectors(
    server: Server, count: int, texts_of: Callable[[int], Sequence[str]]
) -> None:
    texts = list(texts_of(count))
    chosen = random.Random(11)
    order = chosen.sample(range(count), count)
    requests: list[list[int]] = []
    while order:
        size = chosen.choice(REQUEST_SIZES)
        requests.append(order[:size])
        order = order[size:]
    rows = np.full((count, DIMS), np.nan, np.float32)

    def send(number: int) -> None:
        places = requests[number]
        rows[places] = encode(server, [texts[place] for place in places], FORMS[number % 2])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(len(requests))))
    assert np.abs(rows - reference(texts)).max(axis=1).max() <= 1e-5


def test_bfloat16_loses_at_most_a_thousandth_of_the_cosine(server: Server) -> None:
    texts = [text for group in (*RETRIEVAL, *TRIPLETS) for text in group]
    assert cosine(encode(server, texts, model=HALF), reference(texts)).min() >= 0.999


def test_an_instruction_is_put_before_the_text(server: Server) -> None:
    row = encode(server, ["penguins"], instruction="Represent the animal:")
    assert np.abs(row - reference(["Represent the animal: penguins"])).max() <= 1e-5


def test_a_query_gets_the_models_template_and_a_document_does_not(server: Server) -> None:
    for params, text in (
        ({}, "penguins"),
        ({"options": {"is_query": True}}, "Instruct: find it\nQuery: penguins"),
        ({"options": {"is_query": True}, "instruction": "sort"}, "Instruct: sort\nQuery: penguins"),
    ):
        row = encode(server, ["penguins"], model=PROMPTED, **params)
        assert np.abs(row - reference([text])).max() <= 1e-5


def test_a_text_of_just_the_models_length_is_accepted_and_one_token_more_refused(server: Server) -> None:
    fits = "word " * (LONGEST_TOKENS - 2)
    assert len(token_ids(fits)) == LONGEST_TOKENS
    assert encode(server, [fits], options={"overflow_policy": "error"}).shape == (1, DIMS)
    answer = server.encode(MODEL, [fits, fits + "word"], options={"overflow_policy": "error"})
    assert answer.status == 400
    detail = answer.json()["detail"]
    assert detail["code"] == "INPUT_TOO_LONG"
    assert "items[1].text" in detail["message"] and str(LONGEST_TOKENS) in detail["message"]


def test_models_says_what_the_shipped_model_is(server: Server) -> None:
    info = server.get(f"/v1/models/{MODEL}").json()
    assert info["dims"] == {"dense": DIMS} and info["max_sequence_length"] == LONGEST_TOKENS
    assert info["loaded"] is True and info["profiles"]["default"]["output_similarity"] == {"dense": "cosine"}


SENTENCES = ["Berlin is the capital of Germany.", "It has 3.85 million inhabitants.", "The area is 891 km2."]


def chunk_vectors(server: Server, text: str, form: Form = JSON, **option: object) -> dict[str, Any]:
    """The chunks of one document."""
    body = {"items": [{"text": text}], "params": {"options": {"late_chunking": option or True}}}
    answer = form.post(server, f"/v1/encode/{MODEL}", body)
    assert answer.status == 200, answer.body
    [item] = form.load(answer.body)["items"]
    assert list(item) == ["chunks"]
    chunks: dict[str, Any] = item["chunks"]
    return chunks


def test_chunks_of_a_document_equal_the_means_of_its_tokens(server: Server) -> None:
    text = " ".join(SENTENCES)
    model, tokenizer = reference_model()[0].auto_model, reference_model().tokenizer
    given = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    stops = given.pop("offset_mapping")[0, 1:-1, 1].numpy()
    with torch.inference_mode():
        states = model(**given).last_hidden_state[0, 1:-1].double().numpy()
    borders = np.cumsum([len(one) + 1 for one in SENTENCES])
    means = [
        states[(stops > stop - len(one) - 1) & (stops < stop)].mean(0)
        for one, stop in zip(SENTENCES, borders, strict=True)
    ]
    expected = np.array([mean / np.linalg.norm(mean) for mean in means])
    for form in FORMS:
        chunks = chunk_vectors(server, text, form)
        assert list(chunks) == ["dims", "num_chunks", "dtype", "spans", "values"]
        assert (chunks["dims"], chunks["num_chunks"], chunks["dtype"]) == (DIMS, 3, "float32")
        assert np.array(chunks["spans"]).tolist() == [[0, 33], [34, 66], [67, 87]]
        np.testing.assert_allclose(np.array(chunks["values"]), expected, rtol=0, atol=1e-5)
    found = chunk_vectors(server, text, spans=[[[0, 33], [34, 66], [67, 87]]])
    np.testing.assert_allclose(found["values"], expected, rtol=0, atol=1e-5)
    body = {"model": MODEL, "input": SENTENCES, "late_chunking": True, "dimensions": 384}
    answer = server.post("/v1/embeddings", body).json()
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    np.testing.assert_allclose([one["embedding"] for one in answer["data"]], expected, rtol=0, atol=1e-5)
    assert answer["usage"]["total_tokens"] == len(states) + 2
    small = JSON.post(
        server,
        f"/v1/encode/{MODEL}",
        {
            "items": [{"text": text}, {"text": ""}],
            "params": {
                "output_dtype": "binary",
                "options": {"late_chunking": {"by": "sentences", "size": 2}, "dimensions": 64},
            },
        },
    ).json()["items"]
    assert [one["chunks"]["num_chunks"] for one in small] == [2, 0]
    assert np.array(small[0]["chunks"]["values"]).shape == (2, 8) and small[1]["chunks"]["spans"] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"late_chunking": {"spans": []}}, "params.options.late_chunking.spans: 0 lists for 1 items"),
        ({"late_chunking": True, "overflow_policy": "chunk"}, "overflow_policy: 'chunk' does not go with"),
        (
            {"late_chunking": {"spans": [[[0, 5], [5, 6]]]}},
            "items[0]: late_chunking: chunk 1, characters 5 to 6",
        ),
        ({"late_chunking": {"by": "tokens", "size": 3}}, "late_chunking.size: 3 is outside 16..1048576"),
    ],
)
def test_chunks_that_cannot_be_made_are_refused(server: Server, options: object, words: str) -> None:
    body = {"items": [{"text": "water is here"}], "params": {"options": options}}
    answer = server.post(f"/v1/encode/{MODEL}", body)
    assert (answer.status, words in answer.json()["detail"]["message"]) == (400, True), answer.body


def test_a_document_is_taken_whole_or_not_at_all(server: Server) -> None:
    body = {"items": [{"text": "water " * 300}], "params": {"options": {"late_chunking": True}}}
    answer = server.post(f"/v1/encode/{MODEL}", body)
    assert (
        answer.status == 400
        and "items[0].text: 302 tokens, the limit of" in answer.json()["detail"]["message"]
    )
    for given, words in (
        ({"input": ["water " * 200] * 2}, "input: 402 tokens, the limit of"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[5, 6]]}, "input[0] is of token ids"),
        ({"input": ["a"], "overflow_policy": "truncate_left"}, "overflow_policy: 'truncate_left' does not"),
    ):
        answer = server.post("/v1/embeddings", {"model": MODEL, "late_chunking": True, **given})
        assert answer.status == 400 and words in answer.json()["error"]["message"], answer.body
