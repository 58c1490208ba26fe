"""Embed and rerank in the forms of Cohere over plain HTTP: the numbers of encode and score, and errors of its own."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from frontend.engine.answer import quantize
from tests.conformance.conftest import Families
from tests.conformance.encoders import INSTRUCTED, MEAN
from tests.conformance.score_references import BY_TINY
from tests.conformance.towers import CLIP, PALI
from tests.fakes.adapter import vector_of
from tests.harness.cluster import ways_to
from tests.harness.server import Answer, Server
from tests.tiny.pictures import encoded, picture

ECHO, SCORE = "fake/echo", "fake/score"
TEXTS = ["water", "wheel", "stone"]
ROWS = np.stack([vector_of(text, 16) for text in TEXTS])


server = ways_to("fakes")


def embed(server: Server, path: str = "/v2/embed", **fields: Any) -> Answer:
    """A request with defaults for what is required; a field of None is left out."""
    body = {"model": ECHO, "input_type": "search_document", "texts": TEXTS, **fields}
    return server.post(path, {name: value for name, value in body.items() if value is not None})


def embedded(server: Server, path: str = "/v2/embed", **fields: Any) -> dict[str, Any]:
    """The body of a successful answer."""
    answer = embed(server, path, **fields)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def rows_of(server: Server, **fields: Any) -> np.ndarray:
    """The float vectors of a successful answer."""
    return np.array(embedded(server, **fields)["embeddings"]["float"])


def encoded_rows(server: Server, model: str, texts: list[str], **params: Any) -> np.ndarray:
    """The same by the route of SIE."""
    body = {"items": [{"text": text} for text in texts], "params": params}
    answer = server.post(f"/v1/encode/{model}", body)
    assert answer.status == 200, answer.body
    return np.array([item["dense"]["values"] for item in answer.json()["items"]])


def tokens_of(directory: Path, text: str) -> int:
    """Tokens of a text, without special tokens."""
    return len(AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"])


def refused(answer: Answer, status: int, *words: str) -> None:
    """The error is that of Cohere and says `words`."""
    assert answer.status == status, answer.body
    body = answer.json()
    assert list(body) == ["message"]
    for word in words:
        assert word in body["message"]


def test_version_2_answers_by_type_and_version_1_without_types_with_a_list(server: Server) -> None:
    body = embedded(server)
    assert body["response_type"] == "embeddings_by_type" and body["texts"] == TEXTS
    assert list(body["embeddings"]) == ["float"]
    np.testing.assert_allclose(body["embeddings"]["float"], ROWS, rtol=1e-6)
    used = body["meta"]["billed_units"]["input_tokens"]
    assert (
        body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": used}} and used > 0
    )
    first = embedded(server, "/v1/embed", input_type=None)
    assert first["response_type"] == "embeddings_floats" and first["texts"] == TEXTS
    assert first["embeddings"] == body["embeddings"]["float"]
    assert first["meta"]["api_version"] == {"version": "1"}
    typed = embedded(server, "/v1/embed", embedding_types=["float"])
    assert typed["response_type"] == "embeddings_by_type" and typed["embeddings"] == body["embeddings"]


def test_each_type_holds_the_same_vectors_as_encode(server: Server) -> None:
    kinds = ["base64", "binary", "float", "int8", "ubinary", "uint8"]
    found = embedded(server, embedding_types=[*kinds, "int8"])["embeddings"]
    assert sorted(found) == kinds
    rows = np.stack([np.frombuffer(base64.b64decode(row), "<f4") for row in found["base64"]])
    np.testing.assert_array_equal(rows, ROWS)
    bits = np.packbits(ROWS > 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()
    for kind in ("int8", "uint8"):
        assert found[kind] == quantize(ROWS, kind).values.tolist()


def test_vectors_are_cut_before_they_change_their_type(server: Server) -> None:
    found = embedded(server, embedding_types=["float", "ubinary"], output_dimension=8)["embeddings"]
    cut = ROWS[:, :8]
    np.testing.assert_allclose(found["float"], cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5)
    assert found["ubinary"] == np.packbits(cut > 0, axis=1).tolist()


def test_a_large_answer_is_whole(server: Server) -> None:
    texts = [f"text {number}" for number in range(6000)]
    found = embedded(server, texts=texts, embedding_types=["int8", "float"])
    rows = np.stack([vector_of(text, 16) for text in texts])
    assert found["texts"] == texts
    np.testing.assert_allclose(found["embeddings"]["float"], rows, rtol=1e-6)
    assert found["embeddings"]["int8"] == quantize(rows, "int8").values.tolist()


def test_inputs_may_be_content_parts(server: Server) -> None:
    inputs = [
        {"content": [{"type": "text", "text": "water"}]},
        {"content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]},
    ]
    rows = rows_of(server, texts=None, inputs=inputs)
    np.testing.assert_allclose(rows, [vector_of(one, 16) for one in ("water", "two\nparts")], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"texts": None}, ("texts, images, inputs", "got none")),
        ({"texts": []}, ("texts", "empty")),
        ({"images": ["AAAA"]}, ("expected one of them", "texts, images")),
        ({"texts": None, "images": ["AAAA"]}, ("images[0]", ECHO, "takes no image")),
        ({"texts": None, "inputs": [{"content": []}]}, ("inputs[0]", "expected a text or an image")),
        ({"texts": None, "inputs": [{"content": [{"type": "audio"}]}]}, ("inputs[0].content[0]", "audio")),
        ({"texts": ["a", "x" * (1 << 20) + "y"]}, ("texts[1]", "1048577", "1048576")),
        ({"input_type": None}, ("input_type",)),
        ({"input_type": "question"}, ("input_type", "question")),
        ({"embedding_types": ["float", "int4"]}, ("embedding_types[1]", "int4")),
        ({"embedding_types": []}, ("embedding_types", "empty")),
        ({"output_dimension": 17}, ("output_dimension", "17", "1..16")),
        ({"truncate": "MIDDLE"}, ("truncate", "MIDDLE")),
        ({"max_tokens": 0}, ("max_tokens",)),
        ({"max_tokens": 4}, ("max_tokens", ECHO, "cannot cut")),
        ({"model": "fake/score"}, ("fake/score", "dense")),
    ],
)
def test_a_bad_request_names_field_and_value(server: Server, fields: dict[str, Any], words: Any) -> None:
    refused(embed(server, **fields), 400, *words)


def test_errors_have_the_form_of_cohere(server: Server) -> None:
    refused(embed(server, model="none"), 404, "none")
    refused(server.post("/v2/rerank", {"model": SCORE, "query": "q"}), 400, "documents")
    refused(server.get("/v2/embed"), 405)
    for path in ("/v2/chat", "/v1/chat", "/v1/tokenize", "/v1/classify"):
        assert server.post(path, {"model": ECHO}).status == 404, path
    body = b'{"model":"fake/echo","input_type":"search_query","texts":["a"],"texts":["b"]}'
    headers = {"Content-Type": "application/json"}
    refused(server.request("POST", "/v2/embed", body, headers), 400, "twice")
    parts = b'{"type":"text","text":"a","text":"b"}'
    body = b'{"model":"fake/echo","input_type":"search_query","inputs":[{"content":[%s]}]}' % parts
    refused(server.request("POST", "/v2/embed", body, headers), 400, "twice")


def test_rerank_of_version_2_has_the_scores_of_version_1(server: Server) -> None:
    body = {"model": SCORE, "query": "q", "documents": ["0.25", "7.5", "-3"], "top_n": 2}
    answer = server.post("/v2/rerank", body)
    assert answer.status == 200, answer.body
    found, first = answer.json(), server.post("/v1/rerank", body).json()
    assert list(found) == ["id", "results", "meta"]
    assert found["results"] == first["results"] and len(found["results"]) == 2
    assert found["meta"] == {"api_version": {"version": "2"}, **first["meta"]}


def test_rank_fields_are_the_text_of_a_document(server: Server) -> None:
    documents = [{"text": "9", "score": "1"}, {"score": "5", "title": "2"}]
    body = {"model": SCORE, "query": "q", "documents": documents, "return_documents": True}
    answer = server.post("/v1/rerank", {**body, "rank_fields": ["score"]})
    assert [(one["index"], one["relevance_score"]) for one in answer.json()["results"]] == [
        (1, 5.0),
        (0, 1.0),
    ]
    assert [one["document"] for one in answer.json()["results"]] == documents[::-1]
    for field, words in (
        ("none", "documents[0]: has none of the rank_fields none"),
        ("title", "documents[0]"),
    ):
        answer = server.post("/v1/rerank", {**body, "rank_fields": [field]})
        assert answer.status == 400 and words in answer.json()["message"]


def test_the_kserve_routes_beside_them_answer_as_before(server: Server) -> None:
    assert server.get("/v2").json()["name"]
    missing = server.post("/v2/models/embed/infer", {"inputs": []})
    assert missing.status == 404 and "'embed' is not found" in missing.json()["error"]


def test_an_image_has_the_vector_that_encode_gives(families: Families) -> None:
    server, data = families.server, base64.b64encode(encoded(picture(1))).decode()
    body = {"items": [{"images": [{"data": data}]}]}
    answer = server.post(f"/v1/encode/{CLIP}", body)
    expected = answer.json()["items"][0]["dense"]["values"]
    uri = f"data:image/png;base64,{data}"
    part = {"type": "image_url", "image_url": {"url": uri}}
    for fields in (
        {"images": [uri]},
        {"inputs": [{"content": [part]}]},
    ):
        found = embedded(server, model=CLIP, texts=None, input_type="image", **fields)
        np.testing.assert_allclose(found["embeddings"]["float"][0], expected, atol=1e-6)
        assert found["meta"]["billed_units"]["images"] == 1 and found["texts"] == []
    forms: list[Any] = [
        {"image": uri},
        {"image": data},
        part,
        {"content": [part]},
        {"image_url": uri},
        "a",
    ]
    answer = server.post("/v1/embeddings", {"model": CLIP, "input": forms})
    assert answer.status == 200, answer.body
    for entry in answer.json()["data"][:-1]:
        np.testing.assert_allclose(entry["embedding"], expected, atol=1e-6)
    text = server.post("/v1/embeddings", {"model": CLIP, "input": "a"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(answer.json()["data"][-1]["embedding"], text, atol=1e-6)


def test_a_bad_image_is_refused_by_its_place(families: Families) -> None:
    server, data = families.server, base64.b64encode(b"no image at all").decode()
    both = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": data}}]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"images": ["data:image/png;base64,%%"]}, "images[0]: no base64"),
        ({"images": ["data:image/png,plain"]}, "images[0]: 'data:image/png' is no data URI in base64"),
        ({"images": ["https://example.org/a.png"]}, "images[0]: 'https://example.org/a.png' is not fetched"),
        ({"images": [data]}, "images[0]: not an image in one of"),
        ({"inputs": [{"content": both}]}, "inputs[0]: has a text and an image"),
        ({"inputs": [{"content": [both[1]] * 2}]}, "inputs[0]: 2 images, the limit is 1"),
    )
    for fields, said in cases:
        refused(embed(server, model=CLIP, texts=None, **fields), 400, said)
    for one, said in (
        ({"image": "%%"}, "input[1].image: no base64"),
        ({"content": [both[1]]}, "input[1]: not an image"),
        ({}, "input[1]: expected a text or an image"),
    ):
        answer = server.post("/v1/embeddings", {"model": CLIP, "input": ["a", one]})
        assert answer.status == 400 and said in answer.json()["message"], answer.body


def test_pages_are_ranked_for_a_query(families: Families) -> None:
    server = families.server
    pages = [base64.b64encode(encoded(picture(seed))).decode() for seed in (1, 2)]
    body = {"query": {"text": "a"}, "items": [{"images": [{"data": page}]} for page in pages]}
    answer = server.post(f"/v1/score/{PALI}", body)
    expected = {one["item_id"]: one["score"] for one in answer.json()["scores"]}
    documents = [{"image": pages[0]}, {"image_url": {"url": f"data:image/png;base64,{pages[1]}"}}]
    for path in ("/v1/rerank", "/v2/rerank"):
        answer = server.post(path, {"model": PALI, "query": {"text": "a"}, "documents": documents})
        assert answer.status == 200, answer.body
        for one in answer.json()["results"]:
            assert one["relevance_score"] == pytest.approx(expected[f"item-{one['index']}"], rel=1e-4)


def test_the_query_side_has_the_models_template_and_documents_are_the_default(families: Families) -> None:
    server = families.server

    def ask(**fields: Any) -> np.ndarray:
        answer = server.post("/v1/embeddings", {"model": INSTRUCTED, "input": TEXTS, **fields})
        assert answer.status == 200, answer.body
        return np.array([one["embedding"] for one in answer.json()["data"]])

    documents = encoded_rows(server, INSTRUCTED, TEXTS)
    queries = encoded_rows(server, INSTRUCTED, TEXTS, is_query=True)
    told = encoded_rows(server, INSTRUCTED, TEXTS, is_query=True, instruction="Find it")
    for name, rows in (("query", queries), ("document", documents)):
        by_name = encoded_rows(server, INSTRUCTED, TEXTS, options={"prompt_name": name})
        np.testing.assert_array_equal(by_name, rows)
    assert not np.allclose(documents, queries, atol=1e-3) and not np.allclose(queries, told, atol=1e-3)
    for fields in ({}, {"input_type": "document"}, {"input_type": "passage"}, {"prompt_name": "document"}):
        np.testing.assert_allclose(ask(**fields), documents, atol=1e-5)
    for fields in ({"input_type": "query"}, {"input_type": "search_query"}, {"prompt_name": "query"}):
        np.testing.assert_allclose(ask(**fields), queries, atol=1e-5)
    np.testing.assert_allclose(ask(input_type="query", instruction="Find it"), told, atol=1e-5)
    np.testing.assert_allclose(
        rows_of(server, model=INSTRUCTED, input_type="search_query"), queries, atol=1e-5
    )
    np.testing.assert_allclose(
        rows_of(server, model=INSTRUCTED, input_type="clustering"), documents, atol=1e-5
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": MEAN, "prompt_name": "poem"}, "prompt_name: 'poem' is not one of query, document"),
        ({"model": CLIP, "prompt_name": "query"}, f"prompt_name: model '{CLIP}' has no prompts"),
        (
            {"model": MEAN, "prompt_name": "query", "instruction": "a"},
            "prompt_name: cannot be given with instruction",
        ),
        (
            {"model": MEAN, "prompt_name": "query", "input_type": "query"},
            "prompt_name: cannot be given with input_type",
        ),
        ({"model": MEAN, "input_type": "question"}, "question"),
        ({"model": MEAN, "instruction": 5}, "instruction"),
    ],
)
def test_a_side_that_a_model_lacks_is_refused(families: Families, fields: dict[str, Any], said: str) -> None:
    answer = families.server.post("/v1/embeddings", {"input": "a", **fields})
    assert answer.status == 400 and said in answer.json()["message"], answer.body


def test_max_tokens_cuts_where_truncate_says(families: Families) -> None:
    server, words = families.server, "one two three four five six"
    most = tokens_of(families.place / "encoders" / "dense_mean", "one two three") + 2
    assert most == tokens_of(families.place / "encoders" / "dense_mean", "four five six") + 2
    whole = embedded(server, model=MEAN, texts=[words])
    cuts = {"END": "one two three", None: "one two three", "START": "four five six"}
    for truncate, kept in cuts.items():
        found = embedded(server, model=MEAN, texts=[words], max_tokens=most, truncate=truncate)
        np.testing.assert_allclose(
            found["embeddings"]["float"], encoded_rows(server, MEAN, [kept]), atol=1e-5
        )
        assert found["meta"]["billed_units"]["input_tokens"] == most
        assert found["meta"]["warnings"] == ["these inputs were cut: 0"]
    assert "warnings" not in whole["meta"]
    tokens = whole["meta"]["billed_units"]["input_tokens"]
    refused(
        embed(server, model=MEAN, texts=[words], max_tokens=most, truncate="NONE"),
        400,
        f"{tokens} tokens",
        f"is {most}",
    )
    assert (
        rows_of(server, model=MEAN, texts=[words], max_tokens=10**6).tolist() == whole["embeddings"]["float"]
    )


@pytest.mark.parametrize("tiny", ["rr_bert", "rr_qwen3", "colbert_pylate"])
def test_max_tokens_per_doc_cuts_documents_and_not_the_query(families: Families, tiny: str) -> None:
    server, query = families.server, "one two three four five"
    long, short = "six seven eight nine ten", "six seven"
    most = tokens_of(families.place / "rerankers" / tiny, short)
    if tiny == "colbert_pylate":
        most += 3  # Late interaction counts the marker and the special tokens of a document.

    def ask(documents: list[str], **fields: Any) -> dict[str, Any]:
        body = {"model": BY_TINY[tiny].model, "query": query, "documents": documents, **fields}
        answer = server.post("/v1/rerank", body)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json()
        return found

    def score(found: dict[str, Any]) -> float:
        return float(found["results"][0]["relevance_score"])

    cut, kept = ask([long], max_tokens_per_doc=most), ask([short])
    assert score(cut) == pytest.approx(score(kept), rel=1e-4)
    assert cut["usage"]["truncated"] == [0] and "truncated" not in kept["usage"]
    assert score(ask([long])) != pytest.approx(score(cut), rel=1e-4)
    assert score(ask([long], max_tokens_per_doc=1000)) == pytest.approx(score(ask([long])), rel=1e-4)
