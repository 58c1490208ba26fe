"""POST /v1/rerank in the form of Cohere and Jina: the same scores, other names, errors with both keys."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conformance.wire import JSON, MSGPACK, assert_refused_openai
from tests.harness.cluster import ways_to
from tests.harness.server import Answer, Server, wait_until

MODEL = "fake/score"
PATH = "/v1/rerank"
DOCUMENTS = ["0.25", "7.5", "-3", "7.5"]


server = ways_to("fakes")


def post(server: Server, **fields: Any) -> Answer:
    """A rerank request with defaults for what is required."""
    return server.post(PATH, {"model": MODEL, "query": "q", "documents": DOCUMENTS, **fields})


def results(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Results of a successful answer."""
    answer = post(server, **fields)
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json()["results"]
    return found


def test_the_answer_has_the_fields_of_cohere_and_jina(server: Server) -> None:
    body = post(server).json()
    assert list(body) == ["id", "object", "model", "results", "usage", "meta"]
    assert re.fullmatch("rerank-[0-9a-f]{32}", body["id"])
    assert body["object"] == "list" and body["model"] == MODEL
    assert body["results"] == [
        {"index": 1, "relevance_score": 7.5},
        {"index": 3, "relevance_score": 7.5},
        {"index": 0, "relevance_score": 0.25},
        {"index": 2, "relevance_score": -3.0},
    ]


def test_token_counts_are_those_of_all_pairs(server: Server) -> None:
    body = post(server, query="a" * 40, documents=["1", "x" * 200 + " 2"]).json()
    used = (40 + 2) // 4 + 1 + (40 + 203) // 4 + 1
    assert body["usage"] == {"prompt_tokens": used, "total_tokens": used}
    assert body["meta"] == {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": used}}


@pytest.mark.parametrize(
    "document",
    ['{"text":"1","n":18446744073709551616}', '{"text":"1","n":{"a":[-9223372036854775809]}}'],
)
def test_a_document_that_json_cannot_carry_back_is_refused_by_its_place(
    server: Server, document: str
) -> None:
    def ask(echo: str) -> Answer:
        body = f'{{"model":"{MODEL}","query":"q","documents":["2",{document}],"return_documents":{echo}}}'
        return server.request("POST", PATH, body.encode(), {"Content-Type": "application/json"})

    assert_refused_openai(ask("true"), 400, "INVALID_INPUT", "invalid_input", "documents[1]")
    assert ask("false").status == 200


def test_a_document_that_was_cut_is_reported_and_the_policy_may_refuse_it(server: Server) -> None:
    documents = ["1", "x" * 4000]
    assert post(server, documents=documents).json()["usage"]["truncated"] == [1]
    answer = post(server, documents=documents, overflow_policy="error")
    assert_refused_openai(answer, 400, "INPUT_TOO_LONG", "invalid_input")
    answer = post(server, documents=documents, overflow_policy="sideways")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "overflow_policy", "sideways")


@pytest.mark.parametrize(("top_n", "expected"), [(None, 4), (1, 1), (3, 3), (4, 4), (5, 4), (2**62, 4)])
def test_top_n_limits_the_results_and_keeps_the_best(
    server: Server, top_n: int | None, expected: int
) -> None:
    found = results(server, top_n=top_n)
    assert [entry["index"] for entry in found] == [1, 3, 0, 2][:expected]


def test_documents_are_returned_on_request_as_they_were_sent(server: Server) -> None:
    documents = ["1", {"text": "2", "title": "T", "tags": ["a", {"b": None}]}, {"text": "3"}]
    found = results(server, documents=documents, return_documents=True)
    assert [entry["document"] for entry in found] == [documents[2], documents[1], {"text": "1"}]
    assert all(
        "document" not in entry for entry in results(server, documents=documents, return_documents=False)
    )


def test_long_documents_are_returned_whole(server: Server) -> None:
    documents = [{"text": f"{at} " + "é" * 400_000, "n": at} for at in range(4)]
    found = results(server, documents=documents, return_documents=True, overflow_policy="truncate_text")
    assert sorted((entry["document"] for entry in found), key=lambda document: document["n"]) == documents


def test_an_empty_document_and_an_empty_query_are_scored(server: Server) -> None:
    found = results(server, query="", documents=["", {"text": ""}, "1"])
    assert [entry["index"] for entry in found] == [2, 0, 1]


def test_fields_of_other_servers_are_ignored(server: Server) -> None:
    extra = {"max_chunks_per_doc": 10, "relevant_spans": {"mode": "enabled"}, "user": 5}
    assert len(results(server, **extra)) == 4


def test_the_answer_is_json_whatever_is_asked_for(server: Server) -> None:
    headers = {**MSGPACK.headers, "Content-Type": "application/json"}
    body = JSON.dump({"model": MODEL, "query": "q", "documents": ["1"]})
    answer = server.request("POST", PATH, body, headers)
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    answer = server.request("POST", PATH, MSGPACK.dump({"model": MODEL}), MSGPACK.headers)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "JSON")


def test_a_success_has_all_timing_headers_and_is_counted(server: Server) -> None:
    def counted() -> float:
        return server.metric("sie_requests_total", model=MODEL, endpoint="rerank", status="success")

    before, answer = counted(), post(server)
    for name in ("x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time"):
        assert re.fullmatch(r"\d+\.\d\d", answer.headers[name]), name
    wait_until(lambda: counted() == before + 1, what="the count")


def test_errors_have_both_forms(server: Server) -> None:
    assert_refused_openai(
        post(server, model="fake/none"), 404, "MODEL_NOT_FOUND", "model_not_found", "fake/none"
    )
    assert_refused_openai(
        post(server, model="fake/echo"), 400, "INVALID_INPUT", "invalid_input", "fake/echo", "rerank"
    )
    answer = post(server, documents=["1", "#raise", "2"])
    assert_refused_openai(answer, 500, "INFERENCE_ERROR", "inference_error", "1")


WRONG: dict[str, tuple[Any, ...]] = {
    "model": (None, 5, [], {}, True),
    "query": (None, 5, [], {}, {"text": 5}, True),
    "documents": (None, 5, "x", {}, [], [5], [None], [["a"]], [True], [{}], [{"text": None}], [{"text": 5}],
                  [{"text": ["a"]}], [{"title": "a"}]),
    "top_n": ("1", 0, -1, 1.5, True, [], {}),
    "return_documents": ("yes", 1, 0, [], {}),
    "max_tokens_per_doc": ("many", 0, -1, 1.5, 8),
    "rank_fields": ("title", [5], {}),
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_type_or_value_is_refused_by_name(server: Server, field: str) -> None:
    for value in WRONG[field]:
        answer = post(server, **{field: value})
        if value is None and field in ("top_n", "return_documents"):
            assert answer.status == 200
            continue
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", field)
    if field in ("model", "query", "documents"):
        body = {"model": MODEL, "query": "q", "documents": ["1"]}
        del body[field]
        answer = server.post(PATH, body)
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", field)


def test_a_document_without_text_is_named_by_its_place(server: Server) -> None:
    answer = post(server, documents=["a", {"text": "b"}, {"title": "c"}])
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "documents[2].text", "missing")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"fake/score","query":"q","documents":["1"],"documents":["2"]}',
        b'{"model":"fake/score","query":"q","qu\\u0065ry":"p","documents":["1"]}',
        b'{"model":"fake/score","query":"q","documents":[{"text":"1","text":"2"}]}',
        b'{"model":"fake/score","query":"q","documents":["1"],"top_n":1,"top_n":2}',
    ],
)
def test_a_key_given_twice_is_refused(server: Server, body: bytes) -> None:
    answer = server.request("POST", PATH, body, JSON.headers)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "twice")


def test_too_many_documents_are_refused_with_the_limit(server: Server) -> None:
    answer = post(server, documents=["1"] * 10001)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "documents", "10001", "10000")
