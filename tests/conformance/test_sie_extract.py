"""POST /v1/extract against the contract: examples, keys, encodings, labels, options, item errors, headers, metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import msgpack
import pytest

from tests.conformance.extractors import GLICLASS, GLINER, body_of, extract, required_library
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Server, wait_until

KEYS = ["id", "entities", "relations", "classifications", "objects", "data"]
FINDER = "/v1/extract/finder"


def test_the_ner_example_of_the_contract_runs_as_written(extracting: Server) -> None:
    required_library("gliner")
    body = b"""{
    "items": [{"text": "Tim Cook is the CEO of Apple Inc."}],
    "params": {
    "labels": ["person", "organization", "role"]
    }
    }"""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    answer = extracting.request("POST", f"/v1/extract/{GLINER}", body, headers)
    assert answer.status == 200, answer.body
    found = answer.json()
    assert found["model"] == GLINER
    [item] = found["items"]
    assert list(item) == KEYS and item["id"] == "item-0"
    assert item["entities"]
    for entity in item["entities"]:
        assert list(entity) == ["text", "label", "score", "start", "end", "bbox"]
        assert entity["label"] in ("person", "organization", "role") and 0 <= entity["score"] <= 1
        text = "Tim Cook is the CEO of Apple Inc."
        assert text[entity["start"] : entity["end"]] == entity["text"] and entity["bbox"] is None


def test_the_overflow_example_of_the_contract_runs_as_written(extracting: Server) -> None:
    required_library("gliclass")
    path, labels = f"/v1/extract/{GLICLASS}", ["positive", "negative", "neutral"]
    body = body_of(["river bridge " * 400], labels=labels, options={"overflow_policy": "truncate_text"})
    answer = JSON.post(extracting, path, body)
    assert answer.status == 200, answer.body
    assert {one["label"] for one in answer.json()["items"][0]["classifications"]} == set(labels)
    assert answer.json()["usage"] == {"tokens": [512], "truncated": [0]}
    for policy in ("error", "default"):
        body["params"]["options"] = {"overflow_policy": policy}
        body["items"] = [{"text": "short"}, {"text": "river bridge " * 400}]
        answer = JSON.post(extracting, path, body)
        message = assert_refused(answer, 400, "INPUT_TOO_LONG")
        form = r"Item 1: observed (\d+) tokens \(text=(\d+), label_prompt=(\d+)\) exceeds context cap 512 for (.+)"
        parts = re.fullmatch(form, message)
        assert parts is not None, message
        assert int(parts[1]) == int(parts[2]) + int(parts[3]) > 512 and parts[4] == GLICLASS
        assert answer.json()["detail"]["model"] == GLICLASS


@pytest.mark.parametrize("policy", ["default", "truncate_text", "error"])
def test_labels_that_leave_no_room_for_the_text_are_too_long(extracting: Server, policy: str) -> None:
    required_library("gliclass")
    labels = [f"label number {number}" for number in range(200)]
    body = body_of(["a"], labels=labels, options={"overflow_policy": policy})
    answer = JSON.post(extracting, f"/v1/extract/{GLICLASS}", body)
    assert_refused(answer, 400, "INPUT_TOO_LONG", "Item 0", "label_prompt=")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_all_six_keys_are_always_there_and_ids_have_a_default(extracting: Server, form: Form) -> None:
    body = {"items": [{"text": "a b"}, {"id": "mine", "text": ""}, {"text": "é", "id": None}]}
    answer = form.post(extracting, FINDER, body)
    assert answer.status == 200, answer.body
    found = form.load(answer.body)
    assert list(found) == ["model", "items", "usage"] and found["model"] == "finder"
    assert [item["id"] for item in found["items"]] == ["item-0", "mine", "item-2"]
    for item in found["items"]:
        assert set(item) == set(KEYS)
        assert item["relations"] == item["classifications"] == item["objects"] == [] and item["data"] == {}
    entity = {"text": "b", "label": "word", "score": 0.5, "start": 2, "end": 3, "bbox": None}
    assert found["items"][0]["entities"][1] == entity
    assert found["items"][1]["entities"] == []
    assert found["usage"] == {"tokens": [1, 1, 1], "truncated": []}


def test_names_and_scores_are_plain_msgpack_values(extracting: Server) -> None:
    raw = msgpack.unpackb(MSGPACK.post(extracting, FINDER, body_of(["a b", "c"])).body, strict_map_key=False)
    for item in raw["items"]:
        assert all(isinstance(key, str) for key in item)
        assert all(isinstance(one["score"], float) and type(one["start"]) is int for one in item["entities"])


@pytest.mark.parametrize("asked", FORMS, ids=lambda form: f"answer {form.name}")
@pytest.mark.parametrize("sent", FORMS, ids=lambda form: f"request {form.name}")
def test_request_and_answer_encodings_are_independent(extracting: Server, sent: Form, asked: Form) -> None:
    headers = {"Content-Type": sent.media_type, "Accept": asked.media_type}
    answer = extracting.request("POST", FINDER, sent.dump(body_of(["é 東京"])), headers)
    assert answer.status == 200 and answer.headers["content-type"] == asked.media_type
    [item] = asked.load(answer.body)["items"]
    assert [one["text"] for one in item["entities"]] == ["é", "東京"]


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/html", "application/json, application/x-msgpack"])
def test_msgpack_is_the_default_answer(extracting: Server, accept: str | None) -> None:
    headers = {"Content-Type": "application/json"} | ({} if accept is None else {"Accept": accept})
    answer = extracting.request("POST", FINDER, JSON.dump(body_of(["a"])), headers)
    assert answer.headers["content-type"] == MSGPACK.media_type
    assert MSGPACK.load(answer.body)["items"][0]["entities"][0]["text"] == "a"


def test_labels_reach_the_model_in_the_order_of_the_request(extracting: Server) -> None:
    labels = ["zebra", "apple", "Mango", "apple "]
    [item] = extract(extracting, JSON, "finder", ["a b c d e"], labels=labels)
    assert [one["label"] for one in item["entities"]] == [*labels, labels[0]]


def test_large_answers_are_the_same_in_both_encodings(extracting: Server) -> None:
    texts = [f"word{number} " * 60 for number in range(120)]
    found = [extract(extracting, form, "finder", texts, labels=["a", "b"]) for form in FORMS]
    assert found[0] == found[1]
    assert [item["entities"][-1]["text"] for item in found[0]] == [f"word{n}" for n in range(120)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_item_that_fails_does_not_fail_its_neighbours_on_demand(extracting: Server, form: Form) -> None:
    items = extract(extracting, form, "finder", ["a", "#raise", "b"], item_errors=True)
    assert [item["id"] for item in items] == ["item-0", "item-1", "item-2"]
    assert [[one["text"] for one in item["entities"]] for item in items] == [["a"], [], ["b"]]
    assert set(items[1]) == {*KEYS, "error"}
    assert items[1]["error"]["code"] == "INFERENCE_ERROR" and items[1]["error"]["message"]
    assert "error" not in items[0] and "error" not in items[2]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_item_that_fails_fails_its_request_unless_it_asks_for_errors_of_items(
    extracting: Server, form: Form
) -> None:
    answer = form.post(extracting, FINDER, body_of(["a", "#raise", "b"]))
    assert_refused(answer, 500, "INFERENCE_ERROR", "item 1")
    headers = {**form.headers, "X-Penstock-Item-Errors": "1"}
    answer = extracting.request("POST", FINDER, form.dump(body_of(["a", "#raise", "b"])), headers)
    assert answer.status == 200 and form.load(answer.body)["items"][1]["error"]


def test_a_request_whose_items_all_fail_fails_with_the_first_code(extracting: Server) -> None:
    answer = JSON.post(extracting, FINDER, body_of(["#raise", "#raise"]))
    assert_refused(answer, 500, "INFERENCE_ERROR")


def test_a_text_that_is_too_long_fails_the_whole_request_where_the_caller_says_so(extracting: Server) -> None:
    long = "river " * 600
    body = body_of(["a", long], options={"overflow_policy": "error"})
    assert_refused(
        JSON.post(extracting, "/v1/extract/tiny/ner", body),
        400,
        "INPUT_TOO_LONG",
        "items[1].text: 602 tokens",
        "is 512",
    )
    assert extract(extracting, JSON, "tiny/ner", ["a", long])[0]["id"] == "item-0"


def test_what_a_model_does_not_offer_is_refused_before_it_is_loaded(extracting: Server) -> None:
    body = body_of(["a"])
    assert_refused(JSON.post(extracting, "/v1/extract/dense", body), 400, "INVALID_INPUT", "dense", "extract")
    assert_refused(JSON.post(extracting, "/v1/extract/unknown", body), 404, "MODEL_NOT_FOUND")
    answer = JSON.post(extracting, "/v1/encode/finder", body)
    assert_refused(answer, 400, "INVALID_INPUT", "encode")


def _labels(*labels: Any) -> dict[str, Any]:
    return {"labels": list(labels)}


def _options(**options: Any) -> dict[str, Any]:
    return {"labels": ["a"], "options": options}


def _own(**options: Any) -> dict[str, Any]:
    return {"options": options}


MOODS, NER, NLI = "tiny/moods", "tiny/ner", "tiny/nli"
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "labels as text": (NLI, {"labels": "a"}, ("$.params.labels", "array")),
    "labels as map": (NLI, {"labels": {"a": 1}}, ("$.params.labels",)),
    "a number as label": (NLI, _labels("a", 5), ("$.params.labels[1]", "int")),
    "null as label": (NLI, _labels(None), ("$.params.labels[0]",)),
    "no labels": (NLI, {}, ("params.labels", "at least one")),
    "an empty list of labels": (NLI, _labels(), ("params.labels", "at least one")),
    "an empty label": (NLI, _labels("a", ""), ("params.labels[1]", "empty")),
    "a blank label": (NLI, _labels("a", " \u00a0"), ("params.labels[1]", "empty")),
    "a label that is too long": (NLI, _labels("x" * 501), ("params.labels[0]", "501", "500")),
    "labels by the thousand": (
        NLI,
        _labels(*map(str, range(1001))),
        ("params.labels", "1001", "1000", "limits.max_labels"),
    ),
    "a label the model does not have": (NER, _labels("PER", "nobody"), ("params.labels", "nobody", "PER")),
    "a class the model does not have": (MOODS, _labels("hate"), ("params.labels", "hate", "anger")),
    "schema as list": (NER, {"output_schema": []}, ("$.params.output_schema", "object")),
    "a schema that is too large": (
        NER,
        {"output_schema": {"x": "y" * 70_000}},
        ("params.output_schema", "65536"),
    ),
    "threshold as text": (NER, _own(threshold="0.5"), ("params.options.threshold", "number", "str")),
    "threshold as bool": (NER, _own(threshold=True), ("params.options.threshold", "number", "bool")),
    "threshold as list": (NER, _own(threshold=[0.5]), ("params.options.threshold", "list")),
    "an unknown strategy": (
        NER,
        _own(aggregation_strategy="best"),
        ("params.options.aggregation_strategy", "best", "simple"),
    ),
    "a strategy as number": (NER, _own(aggregation_strategy=1), ("aggregation_strategy", "str", "int")),
    "windows without grouping": (
        NER,
        _own(aggregation_strategy="none", overflow_policy="chunk"),
        ("params.options.overflow_policy", "aggregation_strategy"),
    ),
    "windows where there are none": (MOODS, _own(overflow_policy="chunk"), ("overflow_policy", "chunk")),
    "an unknown policy": (
        NER,
        _own(overflow_policy="explode"),
        ("params.options.overflow_policy", "explode"),
    ),
    "a template without a place": (
        NLI,
        _options(hypothesis_template="This is it."),
        ("params.options.hypothesis_template", "{}"),
    ),
    "a template with two places": (NLI, _options(hypothesis_template="{} {}"), ("hypothesis_template",)),
    "a template with a format": (
        NLI,
        _options(hypothesis_template="{0.__class__}"),
        ("hypothesis_template",),
    ),
    "a template that is too long": (NLI, _options(hypothesis_template="{}" + "x" * 600), ("602", "500")),
    "multi_label as text": (NLI, _options(multi_label="yes"), ("params.options.multi_label", "bool", "str")),
    "top_k of zero": (MOODS, _own(top_k=0), ("params.options.top_k", "0", "below 1")),
    "top_k as fraction": (MOODS, _own(top_k=1.5), ("params.options.top_k", "int", "float")),
    "an unknown function": (MOODS, _own(function_to_apply="relu"), ("function_to_apply", "relu", "softmax")),
    "an adapter nobody loaded": (NER, _own(lora="../../etc"), ("lora",)),
    "an unknown profile": (NER, _own(profile="fast"), ("params.options.profile", "fast")),
    "options as list": (NER, {"options": []}, ("$.params.options", "object")),
    "an instruction as number": (NER, {"instruction": 5}, ("$.params.instruction", "str")),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(extracting: Server, form: Form, name: str) -> None:
    model, params, mentions = REFUSED[name]
    answer = form.post(extracting, f"/v1/extract/{model}", {"items": [{"text": "a"}], "params": params})
    assert_refused(answer, 400, "INVALID_INPUT", *mentions)


IGNORED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "a schema and a label twice": (
        NLI,
        {**_labels("a", "b", "a"), "output_schema": {"a": 1}},
        _labels("a", "b"),
        [
            "params.output_schema: not read by this model",
            "params.labels[2]: the same label as params.labels[0], counted once",
        ],
    ),
    "options of other families": (
        NER,
        _own(score_threshold=0.5, task="<s>", threshold=0.1),
        _own(threshold=0.1),
        [
            "params.options.score_threshold: not read by this model",
            "params.options.task: not read by this model",
        ],
    ),
    "an instruction and a large top_k": (
        MOODS,
        {"instruction": "Be kind", "threshold": 0.5, **_own(top_k=10**12)},
        {},
        ["params.threshold: unknown, not read", "params.instruction: not read by this model"],
    ),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("name", IGNORED)
def test_what_changes_nothing_is_taken_and_named_on_demand(extracting: Server, form: Form, name: str) -> None:
    model, params, plain, warnings = IGNORED[name]
    path, items = f"/v1/extract/{model}", [{"text": "a river in Rome"}]
    answer = form.post(extracting, path, {"items": items, "params": {**params, "warnings": True}})
    assert answer.status == 200, answer.body
    found = form.load(answer.body)
    assert found["warnings"] == warnings
    expected = form.load(form.post(extracting, path, {"items": items, "params": plain}).body)
    assert found["items"] == expected["items"] and "warnings" not in expected


def test_a_threshold_may_let_everything_pass_or_nothing(extracting: Server) -> None:
    def classes(threshold: float) -> int:
        [item] = extract(extracting, JSON, NLI, ["a"], **_options(threshold=threshold))
        return len(item["classifications"])

    assert [classes(threshold) for threshold in (-1, 0, 1.01, 2, 1e308)] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("label", ["a\nb", "\x1b[31m", "ab\x85", "\u2028", "nul\0"])
def test_a_label_may_hold_any_character(extracting: Server, label: str) -> None:
    [item] = extract(extracting, JSON, NLI, ["a"], labels=[f"x{label}"])
    assert [one["label"] for one in item["classifications"]] == [f"x{label}"]


GLINER_REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no labels": ({}, ("params.labels",)),
    "a marker in a label": (_labels("a <<ENT>> b"), ("params.labels", "<<ENT>>")),
    "relations where there are none": (_options(relations=["a"]), ("params.options.relations",)),
    "relations as text": (_options(relations="a"), ("params.options.relations", "array")),
    "an empty relation": (_options(relations=[""]), ("params.options.relations[0]",)),
    "a schema without fields": ({"output_schema": {"type": "object"}}, ("params.output_schema.properties",)),
    "a schema with a list of fields": (
        {"output_schema": {"properties": ["a"]}},
        ("output_schema.properties",),
    ),
    "a field that is a number": (
        {"output_schema": {"properties": {"age": {"type": "integer"}}}},
        ("params.output_schema.properties.age",),
    ),
    "a field without a name": ({"output_schema": {"properties": {" ": {}}}}, ("output_schema.properties",)),
    "flat_ner as number": (_options(flat_ner=1), ("params.options.flat_ner", "bool")),
    "windows": (_options(overflow_policy="chunk"), ("overflow_policy",)),
}


@pytest.mark.parametrize("name", GLINER_REFUSED)
def test_gliner_refuses_by_name_what_it_cannot_use(extracting: Server, name: str) -> None:
    required_library("gliner")
    params, mentions = GLINER_REFUSED[name]
    body = {"items": [{"text": "a"}], "params": params}
    assert_refused(JSON.post(extracting, f"/v1/extract/{GLINER}", body), 400, "INVALID_INPUT", *mentions)


def test_gliner_labels_without_room_for_a_text_are_too_long(extracting: Server) -> None:
    required_library("gliner")
    labels = [f"label number {number}" for number in range(200)]
    answer = JSON.post(extracting, f"/v1/extract/{GLINER}", body_of(["a"], labels=labels))
    assert_refused(answer, 400, "INPUT_TOO_LONG", "params.labels", "512")


def test_gliner_with_many_labels_and_no_threshold_answers_soon(extracting: Server) -> None:
    required_library("gliner")
    text, labels = "river bridge camera " * 40, list("abcdefghijklmnopqrst")
    options = {"threshold": 0, "multi_label": True, "flat_ner": False}
    [item] = extract(extracting, JSON, GLINER, [text], labels=labels, options=options)
    assert 0 < len(item["entities"]) <= 1000


BODIES = {
    "no items": b"{}",
    "items empty": b'{"items":[]}',
    "item as text": b'{"items":["x"]}',
    "params as list": b'{"items":[{"text":"a"}],"params":[]}',
    "text missing": b'{"items":[{}]}',
    "text null": b'{"items":[{"text":null}]}',
    "text as number": b'{"items":[{"text":5}]}',
    "images": b'{"items":[{"images":[{"data":"aGk="}]}]}',
    "labels twice": b'{"items":[{"text":"a"}],"params":{"labels":["a"],"labels":["b"]}}',
    "schema twice": b'{"items":[{"text":"a"}],"params":{"output_schema":{},"output_schema":{}}}',
    "NaN threshold": b'{"items":[{"text":"a"}],"params":{"options":{"threshold":NaN}}}',
    "surrogate in a label": b'{"items":[{"text":"a"}],"params":{"labels":["\\ud800"]}}',
    "deep schema": b'{"items":[{"text":"a"}],"params":{"output_schema":'
    + b'{"a":' * 3000
    + b"1"
    + b"}" * 3000,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_breaks_the_contract_is_invalid_input(extracting: Server, name: str) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    answer = extracting.request("POST", "/v1/extract/tiny/ner", BODIES[name], headers)
    assert_refused(answer, 400, "INVALID_INPUT")


def test_unknown_fields_and_options_are_ignored(extracting: Server) -> None:
    body = {
        "items": [{"text": "a b", "unknown": 1, "metadata": {"x": [1]}}],
        "params": {"unknown": {}, "options": {"nobody_knows": 1}},
        "other": None,
    }
    assert JSON.post(extracting, "/v1/extract/tiny/ner", body).status == 200


def test_a_schema_may_hold_names_that_the_request_has_too(extracting: Server) -> None:
    required_library("gliner")
    schema = {"properties": {"items": {"type": "array", "items": {"type": "string"}}, "labels": {}}}
    body = {"items": [{"text": "a river"}], "params": {"output_schema": schema}}
    answer = JSON.post(extracting, f"/v1/extract/{GLINER}", body)
    assert answer.status == 200, answer.body
    assert set(answer.json()["items"][0]["data"]) == {"items", "labels"}


def test_success_has_the_timing_headers_and_is_counted(extracting: Server) -> None:
    answer = JSON.post(extracting, FINDER, body_of(["a"]))
    for name in ("x-total-time", "x-queue-time", "x-tokenization-time", "x-inference-time"):
        assert re.fullmatch(r"\d+\.\d\d", answer.headers[name]), name
    assert len(answer.headers["x-trace-id"]) == 32
    assert "timing" not in answer.json()

    def counted() -> bool:
        text = extracting.get("/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.startswith("sie_requests_total")]
        return any('endpoint="extract"' in line and 'model="finder"' in line for line in lines)

    wait_until(counted, what="the extract request in the metrics")


def test_models_that_extract_say_so(extracting: Server) -> None:
    models = {one["name"]: one for one in json.loads(extracting.get("/v1/models").body)["models"]}
    assert models["tiny/ner"]["outputs"] == ["json"] and models["tiny/ner"]["inputs"] == ["text"]
