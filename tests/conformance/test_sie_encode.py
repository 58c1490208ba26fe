"""POST /v1/encode against the contract: encodings, arrays, output types, options, per-item errors, timing."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.conformance.models import BROAD, DIMS
from tests.conformance.rounding import ARRAY_TYPES, reference
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused, unpack
from tests.fakes.adapter import vector_of
from tests.fakes.gateway import gateway
from tests.harness.cluster import ways_to
from tests.harness.server import Server

PATH = "/v1/encode/org/odd"
TEXTS = [f"text number {n}" for n in range(40)]


server = ways_to("sie", {"another engine": gateway})


def encode(server: Server, form: Form, texts: list[str], model: str = "org/odd", **params: Any) -> list[Any]:
    """Items of a successful answer."""
    body = {"items": [{"text": text} for text in texts], "params": params}
    answer = form.post(server, f"/v1/encode/{model}", body)
    assert answer.status == 200, answer.body
    items: list[Any] = form.load(answer.body)["items"]
    return items


def dense_of(item: Any) -> np.ndarray:
    """float32 values of an item of either encoding."""
    return np.asarray(item["dense"]["values"], np.float32)


ACCEPTS = {
    None: MSGPACK,
    "": MSGPACK,
    "*/*": MSGPACK,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "APPLICATION/MSGPACK": MSGPACK,
    "application/json, application/msgpack": MSGPACK,
    "application/json;q=1.0, application/x-msgpack;q=0.1": MSGPACK,
    "application/json": JSON,
    "Application/JSON": JSON,
    "application/json; charset=utf-8": JSON,
    "text/html, application/json;q=0.1": JSON,
    "application/json, */*": JSON,
    "application/json, application/vnd.msgpack": JSON,
    "application/vnd.msgpack": MSGPACK,
    "application/problem+json": MSGPACK,
    "text/html": MSGPACK,
    "image/png": MSGPACK,
    "text/html;q=": MSGPACK,
    "nonsense": MSGPACK,
}


@pytest.mark.parametrize("accept", ACCEPTS)
def test_accept_decides_the_encoding_of_the_answer_and_msgpack_is_the_default(
    server: Server, accept: str | None
) -> None:
    headers = {"Content-Type": "application/json"} | ({} if accept is None else {"Accept": accept})
    answer = server.request("POST", PATH, b'{"items":[{"text":"a"}]}', headers)
    form = ACCEPTS[accept]
    assert answer.status == 200
    assert answer.headers["content-type"].partition(";")[0] == form.media_type
    item = form.load(answer.body)["items"][0]
    assert np.array_equal(dense_of(item), vector_of("a", DIMS))


CONTENT_TYPES = {
    None: JSON,
    "": JSON,
    "application/json": JSON,
    "application/json; charset=utf-8": JSON,
    "text/plain": JSON,
    "application/octet-stream": JSON,
    "application/vnd.msgpack": JSON,
    "application/msgpack": MSGPACK,
    "Application/X-MsgPack": MSGPACK,
    "application/msgpack; version=5": MSGPACK,
    "application/json, application/msgpack": MSGPACK,
}


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_content_type_decides_how_the_body_is_read_and_json_is_the_default(
    server: Server, content_type: str | None
) -> None:
    form = CONTENT_TYPES[content_type]
    headers = {"Accept": "application/json"} | (
        {} if content_type is None else {"Content-Type": content_type}
    )
    assert server.request("POST", PATH, form.dump({"items": [{"text": "a"}]}), headers).status == 200


@pytest.mark.parametrize("asked", FORMS, ids=lambda form: f"answer {form.name}")
@pytest.mark.parametrize("sent", FORMS, ids=lambda form: f"request {form.name}")
def test_request_and_answer_encodings_are_independent(server: Server, sent: Form, asked: Form) -> None:
    headers = {"Content-Type": sent.media_type, "Accept": asked.media_type}
    answer = server.request("POST", PATH, sent.dump({"items": [{"id": "é", "text": "a"}]}), headers)
    found = asked.load(answer.body)
    assert list(found) == ["model", "items", "timing", "usage"]
    assert found["model"] == "org/odd"
    assert found["items"][0]["id"] == "é"
    assert list(found["items"][0]) == ["id", "dense"]
    assert found["items"][0]["dense"]["dims"] == DIMS
    assert found["items"][0]["dense"]["dtype"] == "float32"
    assert dense_of(found["items"][0]).tobytes() == vector_of("a", DIMS).tobytes()


@pytest.mark.parametrize("accept", ["application/msgpack", "*/*", "application/json"])
def test_errors_are_json_whatever_was_asked_for(server: Server, accept: str) -> None:
    answer = server.request("POST", PATH, b"{}", {"Accept": accept, "Content-Type": "application/json"})
    assert_refused(answer, 400, "INVALID_INPUT", "items")


def test_an_array_is_a_msgpack_numpy_map_byte_for_byte(server: Server) -> None:
    answer = MSGPACK.post(server, PATH, {"items": [{"text": "a"}]})
    expected = bytes.fromhex(
        "84 a56d6f64656c a76f72672f6f6464"  # model: org/odd
        "a56974656d73 91 81 a564656e7365 83"  # items: one item with one output of three fields
        "a464696d73 0d a56474797065 a7666c6f61743332"  # dims: 13, dtype: float32
        "a676616c756573 85 c4026e64 c3 c40474797065 a33c6634 c4046b696e64 c400 c4057368617065 91 0d"
        "c40464617461 c434"  # data: 52 bytes
    )
    assert answer.body.startswith(expected + vector_of("a", DIMS).tobytes() + b"\xa6timing\x85")


def test_the_contracts_example_of_an_array_is_written_byte_for_byte() -> None:
    from frontend.protocols.sie.outputs import array_prefix

    example = (
        "85 c4026e64 c3 c40474797065 a33c6634 c4046b696e64 c400 c4057368617065 91 02"
        " c40464617461 c408 0000803f00000040"
    )
    assert array_prefix("<f4", (2,)) + np.array([1, 2], "<f4").tobytes() == bytes.fromhex(example)
    assert array_prefix("<f4", (0, 4)).endswith(bytes.fromhex("92 00 04 c40464617461 c400"))


@pytest.mark.parametrize(
    ("dims", "header"), [(63, "c4fc"), (64, "c50100"), (16383, "c5fffc"), (16384, "c600010000")]
)
def test_the_length_of_an_array_takes_the_shortest_header(dims: int, header: str) -> None:
    from frontend.protocols.sie.outputs import array_prefix

    assert array_prefix("<f4", (dims,)).endswith(bytes.fromhex("c40464617461" + header))


def test_names_are_str_and_plain_numbers_are_msgpack_floats(server: Server) -> None:
    answer = MSGPACK.post(server, PATH, {"items": [{"text": "a"}], "params": {"output_dtype": "uint8"}})
    raw = msgpack.unpackb(answer.body, strict_map_key=False)
    assert all(isinstance(key, str) for part in (raw, raw["items"][0], raw["timing"]) for key in part)
    dense = raw["items"][0]["dense"]
    assert isinstance(dense["scale"], float) and isinstance(dense["offset"], float)
    assert all(isinstance(value, float) for value in raw["timing"].values() if value is not None)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", ARRAY_TYPES)
def test_every_output_dtype_is_exact_to_the_bit(server: Server, dtype: str, form: Form) -> None:
    for text, item in zip(TEXTS, encode(server, form, TEXTS, output_dtype=dtype), strict=True):
        values, reported, extras = reference(vector_of(text, DIMS), dtype)
        dense = item["dense"]
        assert dense["dtype"] == reported
        assert dense["dims"] == DIMS
        assert {key: np.float32(dense[key]) for key in dense if key in ("scale", "offset")} == extras
        if form is MSGPACK:
            assert dense["values"].dtype.str == ARRAY_TYPES[dtype]
            assert dense["values"].tolist() == [
                value.item() if dtype.startswith("f") else value for value in values
            ]
        elif dtype == "float16":
            assert dense["values"] == [float(value) for value in values], (
                "halves are printed as widened doubles"
            )
        else:
            assert dense["values"] == values or dtype == "float32"
            assert np.array_equal(np.asarray(dense["values"], np.float32), np.asarray(values, np.float32))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_items_keep_order_ids_and_count(server: Server, form: Form) -> None:
    shuffled = [f"shuffled {n}" for n in range(300)]
    random.Random(7).shuffle(shuffled)
    ids = ["", "same", "same", "snow ☃", "a/b", "0", None, "\u202e", "x" * 1000, *([None] * 291)]
    items = [
        {"text": text} | ({} if name is None else {"id": name})
        for text, name in zip(shuffled, ids, strict=True)
    ]
    found = form.load(form.post(server, PATH, {"items": items}).body)["items"]
    assert len(found) == 300
    assert [item.get("id") for item in found] == ids
    assert all(("id" in item) == (name is not None) for item, name in zip(found, ids, strict=True))
    for item, text in zip(found, shuffled, strict=True):
        assert np.array_equal(dense_of(item), vector_of(text, DIMS))


def test_a_large_answer_arrives_whole(server: Server) -> None:
    texts = [f"broad {n}" for n in range(24)]
    items = encode(server, MSGPACK, texts, "org/broad")
    for text, item in zip(texts, items, strict=True):
        assert np.array_equal(item["dense"]["values"], vector_of(text, BROAD))


def test_an_empty_text_and_a_text_of_spaces_have_vectors(server: Server) -> None:
    for text, item in zip(["", " "], encode(server, JSON, ["", " "]), strict=True):
        assert np.array_equal(dense_of(item), vector_of(text, DIMS))


INSTRUCTED: list[tuple[dict[str, Any], str]] = [
    ({"instruction": "field"}, "field"),
    ({"options": {"instruction": "option"}}, "option"),
    ({"instruction": "field", "options": {"instruction": "option"}}, "field"),
    ({"instruction": None, "options": {"instruction": "option"}}, "option"),
    ({}, "from the model"),
    ({"options": {"profile": "default"}}, "from the model"),
    ({"options": {"profile": "byte"}}, "from the profile"),
    ({"options": {"profile": "heir"}}, "from the profile"),
    ({"options": {"profile": "wide"}}, "from the model"),
    ({"options": {"profile": "byte", "instruction": "option"}}, "option"),
    ({"options": {"profile": "byte"}, "instruction": "field"}, "field"),
]


@pytest.mark.parametrize(("params", "expected"), INSTRUCTED)
def test_the_instruction_comes_from_the_request_then_the_profile(
    server: Server, params: dict[str, Any], expected: str
) -> None:
    options = {"output_dtype": "float32", **params}
    item = encode(server, JSON, ["a"], "org/profiled", **options)[0]
    assert np.array_equal(dense_of(item), vector_of(f"{expected} a", item["dense"]["dims"]))


@pytest.mark.parametrize("is_query", [True, False, None, 0, 1])
def test_is_query_is_an_option(server: Server, is_query: Any) -> None:
    assert encode(server, JSON, ["a"], options={"is_query": is_query})


def test_a_profile_can_be_chosen_by_option_or_by_name(server: Server) -> None:
    by_option = encode(server, MSGPACK, ["a"], "org/profiled", options={"profile": "byte"})[0]
    answer = MSGPACK.post(server, "/v1/encode/org/profiled:byte", {"items": [{"text": "a"}]})
    by_name = MSGPACK.load(answer.body)
    assert by_name["model"] == "org/profiled:byte", "the name is echoed as sent"
    for item in (by_option, by_name["items"][0]):
        assert item["dense"]["dtype"] == "int8"
        expected, _, _ = reference(vector_of("from the profile a", 16), "int8")
        assert item["dense"]["values"].tolist() == expected
    assert encode(server, JSON, ["a"], "org/profiled:wide")[0]["dense"]["dims"] == 24
    assert encode(server, JSON, ["a"], "org/profiled", options={"profile": "wide"})[0]["dense"]["dims"] == 24


def test_the_requests_dtype_wins_over_the_profiles(server: Server) -> None:
    for params in ({"output_dtype": "float16"}, {"options": {"output_dtype": "float16"}}):
        assert encode(server, JSON, ["a"], "org/profiled:byte", **params)[0]["dense"]["dtype"] == "float16"
    both = {"output_dtype": "binary", "options": {"output_dtype": "int8"}}
    assert encode(server, JSON, ["a"], **both)[0]["dense"]["dtype"] == "binary"


def test_an_unknown_profile_is_refused_with_the_available_ones(server: Server) -> None:
    answer = server.encode("org/profiled", ["a"], options={"profile": "nope"})
    assert_refused(answer, 400, "INVALID_INPUT", "nope", "byte", "default", "heir", "wide")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("k", [1, 5, DIMS])
def test_dimensions_keep_the_first_values_and_unit_length(server: Server, k: int, form: Form) -> None:
    for text, item in zip(TEXTS, encode(server, form, TEXTS, options={"dimensions": k}), strict=True):
        cut = vector_of(text, DIMS)[:k].astype(np.float64)
        values = dense_of(item)
        assert item["dense"]["dims"] == k == len(values)
        assert np.allclose(values, cut / np.linalg.norm(cut), atol=1e-6)


def test_dimensions_come_before_the_output_dtype(server: Server) -> None:
    for text, item in zip(
        TEXTS, encode(server, JSON, TEXTS, output_dtype="binary", options={"dimensions": 9}), strict=True
    ):
        expected, _, _ = reference(vector_of(text, DIMS)[:9], "binary")
        assert item["dense"] == {"dims": 9, "dtype": "binary", "values": expected}


def test_dimensions_that_the_model_does_not_list_are_refused(server: Server) -> None:
    assert encode(server, JSON, ["a"], "plain", options={"dimensions": 8})[0]["dense"]["dims"] == 8
    answer = server.encode("plain", ["a"], options={"dimensions": 5})
    assert_refused(answer, 400, "INVALID_INPUT", "dimensions", "5", "4, 8, 16")
    answer = server.encode("org/odd", ["a"], options={"dimensions": DIMS + 1})
    assert_refused(answer, 400, "INVALID_INPUT", "dimensions", "1..13")


def test_output_types_may_repeat_and_an_empty_list_counts_as_absent(server: Server) -> None:
    for params in (
        {"output_types": ["dense", "dense"]},
        {"output_types": []},
        {"options": {"output_types": []}},
        {"output_types": ["sparse"], "options": {"output_types": ["dense"]}},
    ):
        assert list(encode(server, JSON, ["a"], **params)[0]) == ["dense"]
    for output in ("sparse", "multivector"):
        answer = server.encode("org/odd", ["a"], output_types=["dense", output])
        assert_refused(answer, 400, "INVALID_INPUT", output, "org/odd", "dense")


@pytest.mark.parametrize("policy", ["default", "truncate_text", None])
def test_a_text_beyond_the_models_length_is_cut(server: Server, policy: str | None) -> None:
    assert encode(server, JSON, ["short", "long " * 1000], options={"overflow_policy": policy})


def test_a_text_beyond_the_models_length_is_refused_on_demand(server: Server) -> None:
    answer = server.encode("org/odd", ["short", "long " * 1000], options={"overflow_policy": "error"})
    assert_refused(answer, 400, "INPUT_TOO_LONG", "items[1].text", "512", "org/odd")
    assert answer.json()["detail"]["model"] == "org/odd"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("model", "bad", "code"),
    [
        ("org/odd", "#raise", "INFERENCE_ERROR"),
        ("org/odd", "#nan", "INFERENCE_ERROR"),
        ("org/small", "too large for the device " * 20, "RESOURCE_EXHAUSTED"),
    ],
)
def test_an_item_that_fails_alone_leaves_the_others_whole(
    server: Server, model: str, bad: str, code: str, form: Form
) -> None:
    items = [{"text": "first"}, {"id": "bad", "text": bad}, {"text": "last"}, {"text": bad}]
    body = {"items": items, "params": {"item_errors": True}}
    answer = form.post(server, f"/v1/encode/{model}", body)
    assert answer.status == 200
    found = form.load(answer.body)["items"]
    dims = found[0]["dense"]["dims"]
    assert np.array_equal(dense_of(found[0]), vector_of("first", dims))
    assert np.array_equal(dense_of(found[2]), vector_of("last", dims))
    assert list(found[1]) == ["id", "error"] and found[1]["id"] == "bad"
    assert list(found[3]) == ["error"]
    for failed in (found[1], found[3]):
        assert failed["error"]["code"] == code
        assert failed["error"]["message"] and "fake model failure" not in failed["error"]["message"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_item_that_fails_alone_fails_its_request_unless_it_asks_for_errors_of_items(
    server: Server, form: Form
) -> None:
    items = [{"text": "first"}, {"text": "#raise"}, {"text": "last"}, {"text": "#nan"}]
    refused = {"items": items, "params": {"item_errors": False}}
    for body in ({"items": items}, refused):
        assert_refused(form.post(server, PATH, body), 500, "INFERENCE_ERROR", "item 1", "item 3 failed too")
    for value, status in (("1", 200), ("true", 200), ("0", 500)):
        headers = {**form.headers, "X-Penstock-Item-Errors": value}
        answer = server.request("POST", PATH, form.dump({"items": items}), headers)
        assert answer.status == status
        assert server.request("POST", PATH, form.dump(refused), headers).status == 500
    at_fault = form.post(server, PATH, {"items": [{"text": "first"}, {"text": "#lost"}]})
    assert_refused(at_fault, 400, "INVALID_INPUT", "items[1]")
    neighbours = [form.post(server, PATH, {"items": [{"text": f"fine {n}"}]}) for n in range(3)]
    assert [answer.status for answer in neighbours] == [200] * 3


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_changes_nothing_is_taken_and_named_on_demand(server: Server, form: Form) -> None:
    media = {"data": "AAAA" if form is JSON else b"\0\0\0"}
    items = [{"text": "first"}, {"text": "second", "images": [media]}, {"text": "third", "images": [media]}]
    options = {"threshold": 0.5, "dimensions": None, "output_dtype": "float32"}
    params = {"options": options, "is_query": False, "dimension": 8, "nothing": None}
    plain = form.load(form.post(server, PATH, {"items": [{"text": item["text"]} for item in items]}).body)
    for asked, headers in ((True, {}), (None, {"X-Penstock-Warnings": "1"}), (None, {})):
        body = form.dump({"items": items, "params": {**params, "warnings": asked}})
        answer = server.request("POST", PATH, body, {**form.headers, **headers})
        assert answer.status == 200, answer.body
        found = form.load(answer.body)
        for mine, other in zip(found["items"], plain["items"], strict=True):
            assert np.array_equal(dense_of(mine), dense_of(other))
        if not (asked or headers):
            assert "warnings" not in found
            continue
        assert found["warnings"] == [
            "params.dimension: unknown, not read",
            "params.options.threshold: not read by this model",
            "items[1].images and 1 other items: left out, this model takes text",
        ]
    assert (
        form.load(form.post(server, PATH, {"items": items[:1], "params": {"warnings": True}}).body)[
            "warnings"
        ]
        == []
    )


def test_the_timing_block_has_all_phases_as_numbers(server: Server) -> None:
    for form in FORMS:
        body = {"items": [{"text": f"timed as {form.name}"}]}
        timing = form.load(form.post(server, PATH, body).body)["timing"]
        assert list(timing) == [
            "total_ms",
            "queue_ms",
            "tokenization_ms",
            "inference_ms",
            "postprocessing_ms",
        ]
        assert all(isinstance(timing[phase], float) and timing[phase] >= 0 for phase in list(timing)[:4])
        assert timing["postprocessing_ms"] is None or timing["postprocessing_ms"] > 0
        assert timing["total_ms"] >= timing["inference_ms"] > 0


def test_the_json_form_has_no_numbers_that_json_lacks(server: Server) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    body = {"items": [{"text": "fine"}, {"text": "#nan"}], "params": {"item_errors": True}}
    answer = JSON.post(server, PATH, body)
    assert json.loads(answer.body, parse_constant=refuse)["items"][1]["error"]["code"] == "INFERENCE_ERROR"
    assert unpack(MSGPACK.post(server, PATH, body).body)["items"][1]["error"]
