"""The encode families over HTTP with tiny models, against sentence-transformers and formulas written here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance import encoders
from tests.conformance.conftest import Families
from tests.conformance.encoders import (
    BGE,
    INSTRUCTED,
    MEAN,
    PYLATE,
    SPLADE,
    SPLADE_LOOKUP,
    SPLADE_PLAIN,
    STANFORD,
)
from tests.conformance.wire import JSON, MSGPACK, Form, assert_refused
from tests.harness.later import sentence_transformers
from tests.harness.server import Server
from tests.tiny.texts import mixed_lengths, sentences

TEXTS = [*mixed_lengths(), "the river, (in Paris)! built a bridge? " * 5]
SHORT = sentences()[3]
LONG = " ".join(sentences()[4:10])
DENSE_LIMIT, WEIGHT_LIMIT = 1e-5, 1e-4
BGE_OUTPUTS = ("dense", "sparse", "multivector")


@pytest.fixture
def place(families: Families) -> Path:
    """Where the models lie."""
    return families.place / "encoders"


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, and a gateway whose only box is the server."""
    return either_families.server


def items_of(
    server: Server, model: str, texts: Sequence[str], form: Form = MSGPACK, **params: Any
) -> list[Any]:
    """Items of a successful answer."""
    body = {"items": [{"text": text} for text in texts], "params": params}
    answer = form.post(server, f"/v1/encode/{model}", body)
    assert answer.status == 200, answer.body
    found: list[Any] = form.load(answer.body)["items"]
    return found


def assert_terms(item: Any, expected: dict[int, float]) -> None:
    """The sparse output of an item, within the limit of weights."""
    found = dict(zip(map(int, item["sparse"]["indices"]), map(float, item["sparse"]["values"]), strict=True))
    assert list(found) == sorted(found), "indices ascend"
    for term in found.keys() | expected.keys():
        assert abs(found.get(term, 0.0) - expected.get(term, 0.0)) <= WEIGHT_LIMIT, term


def assert_rows(found: Any, expected: np.ndarray) -> None:
    """Vectors, within the limit of normalised ones."""
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0, atol=DENSE_LIMIT)


def assert_bge(item: Any, directory: Path, text: str, wanted: Sequence[str]) -> None:
    """The wanted outputs of BGE-M3 for one text."""
    ids = encoders.parts_of(directory)[0](text)["input_ids"]
    expected = encoders.bge_m3(directory, ids)
    assert set(item) == set(wanted)
    if "dense" in wanted:
        assert expected.dense is not None
        assert_rows(item["dense"]["values"], expected.dense / np.linalg.norm(expected.dense))
    if "sparse" in wanted:
        assert expected.sparse is not None
        assert_terms(item, expected.sparse)
    if "multivector" in wanted:
        assert expected.multivector is not None
        assert item["multivector"]["num_tokens"] == len(ids) - 1
        assert_rows(item["multivector"]["values"], expected.multivector)


def test_a_model_that_is_served_by_its_path_gives_the_vectors_of_the_reference(families: Families) -> None:
    model = sentence_transformers.SentenceTransformer(str(families.place / "blobs"), device="cpu")
    reference = model.encode(TEXTS)
    found = items_of(families.server, encoders.LONE, TEXTS)
    for item, expected in zip(found, reference, strict=True):
        assert_rows(item["dense"]["values"], expected)
    assert f"is served as {encoders.LONE}, from {families.place}" in families.server.log


@pytest.mark.parametrize("wanted", [("dense",), ("sparse",), ("multivector",), BGE_OUTPUTS], ids="-".join)
def test_bge_m3_equals_the_formulas_alone_and_in_a_batch(
    server: Server, place: Path, wanted: tuple[str, ...]
) -> None:
    together = items_of(server, BGE, TEXTS, output_types=wanted)
    alone = [items_of(server, BGE, [text], JSON, output_types=wanted)[0] for text in TEXTS[:4]]
    for text, item in zip([*TEXTS, *TEXTS[:4]], [*together, *alone], strict=True):
        assert_bge(item, place / "bge_m3", text, wanted)


def sparse_reference(directory: Path, texts: Sequence[str]) -> np.ndarray:
    """float32 [n, vocabulary] from sentence-transformers."""
    model = sentence_transformers.SparseEncoder(str(directory), device="cpu")
    found = model.encode(list(texts), convert_to_tensor=True, convert_to_sparse_tensor=False)
    return np.asarray(found.cpu())


@pytest.mark.parametrize(
    ("model", "tiny"),
    [(SPLADE, "splade"), (SPLADE_PLAIN, "plain_splade"), (SPLADE_LOOKUP, "splade_distilbert")],
)
def test_splade_equals_sentence_transformers_alone_and_in_a_batch(
    server: Server, place: Path, model: str, tiny: str
) -> None:
    together = items_of(server, model, TEXTS)
    alone = [items_of(server, model, [text])[0] for text in TEXTS[:4]]
    for row, item in zip(
        sparse_reference(place / tiny, [*TEXTS, *TEXTS[:4]]), [*together, *alone], strict=True
    ):
        assert item["sparse"]["dims"] == row.shape[0]
        assert_terms(item, {int(term): float(row[term]) for term in np.flatnonzero(row)})


def test_queries_of_a_lookup_model_have_the_stored_weights_of_their_tokens(
    server: Server, place: Path
) -> None:
    import json

    tokenizer = encoders.parts_of(place / "splade_distilbert", True)[0]
    stored = json.loads((place / "splade_distilbert" / "idf.json").read_text())
    items = items_of(server, SPLADE_LOOKUP, TEXTS, options={"is_query": True})
    for text, item in zip(TEXTS, items, strict=True):
        tokens = {token: tokenizer.convert_ids_to_tokens(token) for token in tokenizer(text)["input_ids"]}
        assert_terms(item, {token: stored[name] for token, name in tokens.items() if name in stored})


def test_max_terms_keeps_the_strongest_terms_of_each_item(server: Server) -> None:
    whole = items_of(server, SPLADE, TEXTS[:3])
    for full, cut in zip(whole, items_of(server, SPLADE, TEXTS[:3], options={"max_terms": 5}), strict=True):
        values = np.asarray(full["sparse"]["values"])
        kept = np.sort(np.argsort(-values)[:5])
        np.testing.assert_array_equal(cut["sparse"]["indices"], np.asarray(full["sparse"]["indices"])[kept])
    body = {"items": [{"text": "a"}], "params": {"options": {"max_terms": 0}}}
    assert_refused(JSON.post(server, f"/v1/encode/{SPLADE}", body), 400, "INVALID_INPUT", "max_terms")


@pytest.mark.parametrize(("model", "tiny"), [(PYLATE, "colbert_pylate"), (STANFORD, "colbert_stanford")])
@pytest.mark.parametrize("is_query", [True, False])
def test_colbert_equals_sentence_transformers_alone_and_in_a_batch(
    server: Server, place: Path, model: str, tiny: str, is_query: bool
) -> None:
    texts = [text for text in TEXTS if text]
    reference = sentence_transformers.MultiVectorEncoder(str(place / tiny), device="cpu")
    expected = (reference.encode_query if is_query else reference.encode_document)(texts)
    options = {"is_query": is_query}
    together = items_of(server, model, texts, options=options)
    params = {"is_query": is_query, "options": {"is_query": not is_query}}
    alone = [items_of(server, model, [text], JSON, **params)[0] for text in texts[:4]]
    for rows, item in zip([*expected, *expected[:4]], [*together, *alone], strict=True):
        assert item["multivector"]["num_tokens"] == len(rows)
        assert item["multivector"]["token_dims"] == 128
        assert_rows(item["multivector"]["values"], np.asarray(rows))


def test_a_last_token_model_takes_its_instruction_through_the_template(server: Server, place: Path) -> None:
    reference = sentence_transformers.SentenceTransformer(str(place / "dense_last"), device="cpu")
    prompt = "Instruct: find a river\nQuery:"
    queries = items_of(server, INSTRUCTED, TEXTS, instruction="find a river", options={"is_query": True})
    documents = items_of(server, INSTRUCTED, TEXTS)
    for items, text_prompt in ((queries, prompt), (documents, "")):
        expected = np.asarray(reference.encode(TEXTS, prompt=text_prompt))
        assert_rows([item["dense"]["values"] for item in items], expected)


def test_requests_of_every_kind_at_once_get_their_own_answers(server: Server, place: Path) -> None:
    """Queries and documents, all outputs, all lengths, over several models: the batches are mixed as they come."""
    late = sentence_transformers.MultiVectorEncoder(str(place / "colbert_stanford"), device="cpu")
    texts = [text for text in TEXTS if text]
    expected = {True: late.encode_query(texts), False: late.encode_document(texts)}

    def colbert(at: int) -> None:
        chosen, is_query = at % len(texts), bool(at % 2)
        [item] = items_of(server, STANFORD, [texts[chosen]], options={"is_query": is_query})
        assert_rows(item["multivector"]["values"], np.asarray(expected[is_query][chosen]))

    def bge(at: int) -> None:
        wanted = (BGE_OUTPUTS[at % 3],) if at % 4 else BGE_OUTPUTS
        text = TEXTS[at % len(TEXTS)]
        [item] = items_of(server, BGE, [text], output_types=wanted, options={"is_query": bool(at % 2)})
        assert_bge(item, place / "bge_m3", text, wanted)

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(run, at) for at in range(24) for run in (colbert, bge)]
        for one in waiting:
            one.result()


CHUNK = {"overflow_policy": "chunk"}


@pytest.mark.parametrize("texts", [[LONG], [SHORT, LONG, "river", LONG + SHORT]], ids=["alone", "mixed"])
def test_a_split_text_has_the_pooled_outputs_of_its_windows(
    server: Server, place: Path, texts: list[str]
) -> None:
    directory = place / "bge_m3"
    items = items_of(server, f"{BGE}-short", texts, output_types=BGE_OUTPUTS, options=CHUNK)
    for text, item in zip(texts, items, strict=True):
        parts = encoders.windows(directory, text)
        found = [encoders.bge_m3(directory, part) for part in parts]
        assert_rows(item["dense"]["values"], encoders.weighted_mean([v.dense for v in found], parts))  # type: ignore[misc]
        assert_terms(item, encoders.strongest([v.sparse for v in found]))  # type: ignore[misc]
        assert_rows(item["multivector"]["values"], np.concatenate([v.multivector for v in found]))  # type: ignore[misc]


def test_a_split_text_of_splade_has_the_largest_weight_over_its_windows(server: Server, place: Path) -> None:
    for text, item in zip(
        [SHORT, LONG], items_of(server, f"{SPLADE}-short", [SHORT, LONG], options=CHUNK), strict=True
    ):
        parts = encoders.windows(place / "splade", text)
        assert_terms(item, encoders.strongest([encoders.splade(place / "splade", part) for part in parts]))


@torch.inference_mode()
def test_a_split_text_of_a_mean_pooled_model_is_the_mean_of_all_its_tokens(
    server: Server, place: Path
) -> None:
    model = encoders.parts_of(place / "dense_mean")[1]
    parts = encoders.windows(place / "dense_mean", LONG)
    rows = [model(input_ids=torch.tensor([part])).last_hidden_state[0].mean(0).numpy() for part in parts]
    [item] = items_of(server, f"{MEAN}-short", [LONG], options=CHUNK)
    assert_rows(item["dense"]["values"], encoders.weighted_mean(rows, parts))


@pytest.mark.parametrize("policy", ["default", "truncate_text", "truncate_left", "chunk", "error"])
def test_the_answer_says_what_was_cut_and_how_much_was_used(server: Server, place: Path, policy: str) -> None:
    body = {
        "items": [{"text": "river"}, {"text": LONG}],
        "params": {"output_types": ["dense"], "options": {"overflow_policy": policy}},
    }
    answer = MSGPACK.post(server, f"/v1/encode/{BGE}-short", body)
    if policy == "error":
        assert_refused(answer, 400, "INPUT_TOO_LONG", "items[1]", str(encoders.WINDOW))
        return
    found = MSGPACK.load(answer.body)
    parts = encoders.windows(place / "bge_m3", LONG)
    assert found["usage"]["truncated"] == ([] if policy == "chunk" else [1])
    assert found["usage"]["tokens"][1] == (sum(map(len, parts)) if policy == "chunk" else encoders.WINDOW)
    if policy == "chunk":
        return
    tokenizer = encoders.parts_of(place / "bge_m3")[0]
    ids = tokenizer(LONG, add_special_tokens=False)["input_ids"]
    room = encoders.WINDOW - 2
    kept = ids[-room:] if policy == "truncate_left" else ids[:room]
    expected = encoders.bge_m3(
        place / "bge_m3", [tokenizer.cls_token_id, *kept, tokenizer.eos_token_id]
    ).dense
    assert expected is not None
    assert_rows(found["items"][1]["dense"]["values"], expected / np.linalg.norm(expected))


def test_queries_of_a_fixed_length_cannot_be_split(server: Server) -> None:
    body = {"items": [{"text": LONG}], "params": {"options": {"is_query": True, **CHUNK}}}
    answer = JSON.post(server, f"/v1/encode/{PYLATE}-short", body)
    assert_refused(answer, 400, "INVALID_INPUT", "overflow_policy", "queries")
    documents = items_of(server, f"{PYLATE}-short", [LONG], options=CHUNK)
    assert documents[0]["multivector"]["num_tokens"] > encoders.WINDOW


HELLO = b'{"items": [{"text": "Hello, world!"}]}'
SEARCH = (
    b'{"items": [{"text": "Search query"}], "params": {"output_types": ["dense", "sparse"], '
    b'"instruction": "Represent this query for retrieval:"}}'
)


def test_the_examples_of_the_contract_run_as_written(server: Server) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    hello = server.request("POST", "/v1/encode/BAAI/bge-m3", HELLO, headers)
    assert hello.status == 200
    [item] = hello.json()["items"]
    assert set(item) == {"dense"} and hello.json()["model"] == BGE
    search = server.request("POST", "/v1/encode/BAAI/bge-m3", SEARCH, headers)
    [item] = search.json()["items"]
    assert list(item) == ["dense", "sparse"]
    dense, sparse = item["dense"], item["sparse"]
    assert list(dense) == ["dims", "dtype", "values"] and len(dense["values"]) == dense["dims"]
    assert list(sparse) == ["dims", "dtype", "indices", "values"]
    assert len(sparse["indices"]) == len(sparse["values"]) and max(sparse["indices"]) < sparse["dims"]
    body = b'{"model": "BAAI/bge-m3", "input": ["Hello, world!"]}'
    embeddings = server.request("POST", "/v1/embeddings", body, headers).json()
    assert embeddings["data"][0]["embedding"] == hello.json()["items"][0]["dense"]["values"]
    assert embeddings["usage"]["prompt_tokens"] == hello.json()["usage"]["tokens"][0]
    models = {model["name"]: model for model in server.get("/v1/models").json()["models"]}
    assert models[BGE]["outputs"] == ["dense", "sparse", "multivector"]
    assert models[BGE]["dims"] == {"dense": 64, "sparse": sparse["dims"], "multivector": 64}
