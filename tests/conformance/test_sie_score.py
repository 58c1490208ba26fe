"""POST /v1/score against the contract: ranks, ties, names, encodings, all or nothing, headers, metrics."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest

from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.cluster import ways_to
from tests.harness.server import Server, wait_until

MODEL = "fake/score"
PATH = f"/v1/score/{MODEL}"


server = ways_to("fakes")


def body_of(*texts: Any, query: Any = "q", **fields: Any) -> dict[str, Any]:
    """A request; items and query are texts or whole items."""
    items = [text if isinstance(text, dict) else {"text": text} for text in texts]
    return {"query": query if isinstance(query, dict) else {"text": query}, "items": items, **fields}


def score(server: Server, form: Form, *texts: Any, **fields: Any) -> dict[str, Any]:
    """Body of a successful answer."""
    answer = form.post(server, PATH, body_of(*texts, **fields))
    assert answer.status == 200, answer.body
    found: dict[str, Any] = form.load(answer.body)
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_items_come_best_first_with_ranks_from_zero(server: Server, form: Form) -> None:
    found = score(server, form, "0.25", {"id": "best", "text": "7.5"}, "-3", "1e-3")
    assert list(found) == ["model", "query_id", "scores", "usage"]
    assert found["model"] == MODEL
    assert [(entry["item_id"], entry["rank"]) for entry in found["scores"]] == [
        ("best", 0),
        ("item-0", 1),
        ("item-3", 2),
        ("item-2", 3),
    ]
    assert [entry["score"] for entry in found["scores"]] == pytest.approx([7.5, 0.25, 1e-3, -3])
    assert all(list(entry) == ["item_id", "score", "rank"] for entry in found["scores"])


def test_ties_keep_the_order_of_the_request(server: Server) -> None:
    values = ["1", "2", "1", "2", "0", "-0", "1"] * 50
    found = score(server, JSON, *values)["scores"]
    expected = sorted(range(len(values)), key=lambda index: -float(values[index]))
    assert [entry["item_id"] for entry in found] == [f"item-{index}" for index in expected]
    assert [entry["rank"] for entry in found] == list(range(len(values)))


def test_ids_may_repeat_and_query_id_is_always_there(server: Server) -> None:
    found = score(
        server, JSON, {"id": "same", "text": "1"}, {"id": "same", "text": "2"}, {"id": "", "text": "3"}
    )
    assert [entry["item_id"] for entry in found["scores"]] == ["", "same", "same"]
    assert found["query_id"] is None
    assert score(server, MSGPACK, "1", query={"id": "q-7", "text": "x"})["query_id"] == "q-7"


def test_plain_numbers_are_msgpack_floats_and_names_are_str(server: Server) -> None:
    raw = msgpack.unpackb(MSGPACK.post(server, PATH, body_of("1", "2")).body, strict_map_key=False)
    for entry in raw["scores"]:
        assert all(isinstance(key, str) for key in entry)
        assert isinstance(entry["score"], float) and isinstance(entry["rank"], int)


@pytest.mark.parametrize("asked", FORMS, ids=lambda form: f"answer {form.name}")
@pytest.mark.parametrize("sent", FORMS, ids=lambda form: f"request {form.name}")
def test_request_and_answer_encodings_are_independent(server: Server, sent: Form, asked: Form) -> None:
    headers = {"Content-Type": sent.media_type, "Accept": asked.media_type}
    answer = server.request("POST", PATH, sent.dump(body_of("3", query={"id": "é", "text": "é"})), headers)
    assert answer.status == 200
    assert answer.headers["content-type"] == asked.media_type
    assert asked.load(answer.body)["query_id"] == "é"


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/html", "application/json, application/x-msgpack"])
def test_msgpack_is_the_default_answer(server: Server, accept: str | None) -> None:
    headers = {} if accept is None else {"Accept": accept}
    answer = server.request("POST", PATH, JSON.dump(body_of("1")), headers)
    assert answer.headers["content-type"] == "application/msgpack"
    assert MSGPACK.load(answer.body)["scores"][0]["score"] == 1.0


def test_a_large_answer_is_whole_and_sorted(server: Server) -> None:
    values = [(index * 7919) % 5000 for index in range(5000)]
    found = score(server, MSGPACK, *map(str, values))["scores"]
    assert [entry["score"] for entry in found] == sorted(map(float, values), reverse=True)
    assert {entry["item_id"] for entry in found} == {f"item-{index}" for index in range(5000)}


def test_usage_counts_tokens_of_pairs_and_names_what_was_cut(server: Server) -> None:
    usage = score(server, JSON, "1", "x" * 4000 + " 2", "3")["usage"]
    assert usage == {"tokens": [1, 512, 1], "truncated": [1]}


def test_one_failing_item_fails_the_request_and_is_named(server: Server) -> None:
    for text in ("#raise 1", "#nan 1", "#lost 1"):
        for form in FORMS:
            answer = form.post(server, PATH, body_of("1", "2", text, "4"))
            status, code = (400, "INVALID_INPUT") if "lost" in text else (500, "INFERENCE_ERROR")
            assert "2" in assert_refused(answer, status, code)
    assert score(server, JSON, "5")["scores"][0]["score"] == 5.0


def test_an_item_that_may_not_be_cut_fails_the_request(server: Server) -> None:
    answer = JSON.post(server, PATH, body_of("1", "x" * 4000, options={"overflow_policy": "error"}))
    assert_refused(answer, 400, "INPUT_TOO_LONG", "items[1]", "512")


def test_memory_that_is_too_small_for_one_pair_says_so(server: Server) -> None:
    answer = server.post("/v1/score/fake/small-score", body_of("1", "x" * 400))
    assert_refused(answer, 503, "RESOURCE_EXHAUSTED", "1")
    assert answer.headers["retry-after"] == "5"


def test_a_model_without_scores_is_refused_before_anything_else_is_asked_of_it(server: Server) -> None:
    answer = server.post("/v1/score/fake/echo", body_of("1"))
    assert_refused(answer, 400, "INVALID_INPUT", "fake/echo", "score")
    assert_refused(server.post("/v1/score/fake/none", body_of("1")), 404, "MODEL_NOT_FOUND", "fake/none")
    assert_refused(server.post("/v1/score/fake/broken", body_of("1")), 400, "INVALID_INPUT", "score")
    answer = server.post("/v1/encode/fake/score", {"items": [{"text": "a"}]})
    assert_refused(answer, 400, "INVALID_INPUT", "encode")


def test_a_success_has_all_timing_headers(server: Server) -> None:
    answer = JSON.post(server, PATH, body_of("1", "2"))
    for name in ("x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time"):
        assert re.fullmatch(r"\d+\.\d\d", answer.headers[name]), name
    assert float(answer.headers["x-postprocessing-time"]) > 0
    assert float(answer.headers["x-total-time"]) >= float(answer.headers["x-inference-time"])
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-trace-id"])


def test_requests_are_counted_under_their_endpoint(server: Server) -> None:
    def counted(status: str) -> float:
        return server.metric("sie_requests_total", model=MODEL, endpoint="score", status=status)

    before = counted("success"), counted("error")
    assert JSON.post(server, PATH, body_of("1")).status == 200
    assert JSON.post(server, PATH, body_of("#raise")).status == 500
    wait_until(
        lambda: (counted("success"), counted("error")) == (before[0] + 1, before[1] + 1), what="counts"
    )
    assert server.metric("sie_request_duration_seconds_count", endpoint="score", phase="inference") > 0
    assert server.metric("penstock_requests_total", operation="score", model=MODEL, code="200") > 0


def test_the_model_is_listed_with_its_capability(server: Server) -> None:
    info = server.get(f"/v1/models/{MODEL}").json()
    assert info["outputs"] == ["score"] and info["dims"] == {} and info["loaded"] is True


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_changes_nothing_is_taken_and_named_on_demand(server: Server, form: Form) -> None:
    body = body_of("1", "2", options={"score_mode": "hybrid", "task": None}, top_n=1, warnings=True)
    body["query"]["audio"] = {"format": "wav"}
    found = form.load(form.post(server, PATH, body).body)
    assert found["warnings"] == [
        "top_n: unknown, not read",
        "options.score_mode: not read by this model",
        "query.audio: left out, this model takes text",
    ]
    plain = form.load(form.post(server, PATH, body_of("1", "2")).body)
    assert found["scores"] == plain["scores"] and "warnings" not in plain
