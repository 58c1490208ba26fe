"""Hostile and broken requests: each gets the contract's error in time, costs no memory, and the next client is served.

The bodies go through the socket of a real server. After every test a good request must be answered, and the
frontend's private memory must be near what it was at the start.
"""

from __future__ import annotations

import gzip
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused, assert_refused_openai
from tests.harness.server import Answer, Server, serving

PATH = "/v1/encode/fake/echo"
MAX_BODY_BYTES = 110_000_000
MAX_GROWTH_BYTES = 64 << 20
QUICK_S = 2.0
LARGE_S = 10.0
DEEP = 100_000


def private_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; the arena, which is shared, does not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, int, int]]:
    """A warm server, its frontend's pid, and that frontend's memory before the first bad request."""
    settings = {"limits.max_body_bytes": MAX_BODY_BYTES, "server.body_floor_after_s": 1.0}
    with serving(tmp_path_factory.mktemp("bad_input"), settings=settings) as server:
        for form in FORMS:
            for _ in range(20):
                assert form.post(server, PATH, {"items": [{"text": "warm"}]}).status == 200
        pid = server.frontend_pids()[0]
        yield server, pid, private_bytes(pid)


@pytest.fixture
def server(started: tuple[Server, int, int]) -> Iterator[Server]:
    """The server; afterwards the same frontend answers a good request, and holds no memory of the bad one."""
    running, pid, before = started
    yield running
    assert running.encode("fake/echo", ["still here"]).status == 200
    assert running.frontend_pids() == [pid], "the frontend was replaced"
    assert private_bytes(pid) - before <= MAX_GROWTH_BYTES


def send(server: Server, form: Form, body: bytes, path: str = PATH, within_s: float = QUICK_S) -> Answer:
    """POST raw bytes as `form`; the answer must come in time."""
    began = time.monotonic()
    answer = server.request("POST", path, body, form.headers, timeout_s=within_s + 20)
    assert time.monotonic() - began < within_s
    return answer


def nested_value(value: bytes, field: bytes = b"unknown") -> tuple[bytes, bytes]:
    """A good request with one more top-level field, whose JSON or msgpack value is `value`: (JSON, msgpack)."""
    return (
        b'{"items":[{"text":"a"}],"' + field + b'":' + value + b"}",
        b"\x82\xa5items\x91\x81\xa4text\xa1a" + msgpack.packb(field.decode()) + value,
    )


MALFORMED = {
    "empty": (JSON, b""),
    "blank": (JSON, b"   "),
    "truncated": (JSON, b'{"items":[{"text":"a"}'),
    "truncated string": (JSON, b'{"items":[{"text":"a'),
    "truncated escape": (JSON, b'{"items":[{"text":"\\u00'),
    "no value": (JSON, b'{"items":}'),
    "single quotes": (JSON, b"{'items':[{'text':'a'}]}"),
    "trailing comma": (JSON, b'{"items":[{"text":"a"},]}'),
    "trailing bytes": (JSON, b'{"items":[{"text":"a"}]} x'),
    "two documents": (JSON, b'{"items":[{"text":"a"}]}{}'),
    "comment": (JSON, b'{"items":[{"text":"a"}]/**/}'),
    "control character": (JSON, b'{"items":[{"text":"a\nb"}]}'),
    "byte order mark": (JSON, b'\xef\xbb\xbf{"items":[{"text":"a"}]}'),
    "utf-16": (JSON, '{"items":[{"text":"a"}]}'.encode("utf-16")),
    "not utf-8": (JSON, b'{"items":[{"text":"\xff\xfe"}]}'),
    "overlong utf-8": (JSON, b'{"items":[{"text":"\xc0\xaf"}]}'),
    "gzip": (JSON, gzip.compress(b'{"items":[{"text":"a"}]}')),
    "msgpack as JSON": (JSON, msgpack.packb({"items": [{"text": "a"}]})),
    "NaN": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{"dimensions":NaN}}}'),
    "NaN in an unknown field": (JSON, nested_value(b"NaN")[0]),
    "Infinity": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{"dimensions":Infinity}}}'),
    "-Infinity": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{"dimensions":-Infinity}}}'),
    "high surrogate": (JSON, b'{"items":[{"text":"a\\ud800"}]}'),
    "low surrogate": (JSON, b'{"items":[{"text":"\\udc00 a"}]}'),
    "surrogates in wrong order": (JSON, b'{"items":[{"text":"\\udc00\\ud800"}]}'),
    "surrogate as utf-8": (JSON, b'{"items":[{"text":"\xed\xa0\x80"}]}'),
    "empty msgpack": (MSGPACK, b""),
    "truncated map": (MSGPACK, b"\x81\xa5items"),
    "truncated str": (MSGPACK, b"\x81\xa5items\x91\x81\xa4text\xa9a"),
    "truncated header": (MSGPACK, b"\x81\xa5items\xdd\x00"),
    "reserved byte": (MSGPACK, b"\x81\xa5items\xc1"),
    "trailing msgpack": (MSGPACK, b"\x81\xa5items\x91\x81\xa4text\xa1a\x01"),
    "str that is not utf-8": (MSGPACK, b"\x81\xa5items\x91\x81\xa4text\xa2\xff\xfe"),
    "surrogate in msgpack": (MSGPACK, b"\x81\xa5items\x91\x81\xa4text\xa3\xed\xa0\x80"),
    "bin for text": (MSGPACK, msgpack.packb({"items": [{"text": b"a"}]})),
    "bin keys": (MSGPACK, msgpack.packb({b"items": [{"text": "a"}]})),
    "map as key": (MSGPACK, b"\x82\x81\x01\x02\x01\xa5items\x91\x81\xa4text\xa1a"),
    "extension for text": (MSGPACK, b"\x81\xa5items\x91\x81\xa4text\xd4\x01\x00"),
    "extension as body": (MSGPACK, b"\xd4\x01\x00"),
    "impossible timestamp": (
        MSGPACK,
        b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xa7options\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,
    ),
    "JSON as msgpack": (MSGPACK, b'{"items":[{"text":"a"}]}'),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_body_that_cannot_be_read_is_invalid_input(server: Server, name: str) -> None:
    form, body = MALFORMED[name]
    assert_refused(send(server, form, body), 400, "INVALID_INPUT", "body")


@pytest.mark.parametrize("name", [name for name, (form, _) in MALFORMED.items() if form is JSON])
def test_embeddings_refuse_a_body_that_cannot_be_read_in_their_own_form(server: Server, name: str) -> None:
    body = MALFORMED[name][1].replace(b'"items":[{"text":', b'"model":"fake/echo","input":[{"x":')
    answer = send(server, JSON, body, "/v1/embeddings")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "body")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("value", "kind"), [([], "array"), (None, "null"), ("x", "str"), (5, "int"), (True, "bool")]
)
def test_a_body_that_is_no_object_is_refused(server: Server, form: Form, value: Any, kind: str) -> None:
    kind = "None" if form is MSGPACK and value is None else kind
    assert_refused(send(server, form, form.dump(value)), 400, "INVALID_INPUT", "object", kind)
    kind = "null" if value is None else kind
    answer = send(server, JSON, JSON.dump(value), "/v1/embeddings")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "object", kind)


DEPTHS = {
    "array in an unknown field": (JSON, nested_value(b"[" * DEEP + b"]" * DEEP)[0]),
    "unclosed arrays": (JSON, b"[" * DEEP),
    "object in an unknown field": (JSON, nested_value(b'{"a":' * DEEP + b"1" + b"}" * DEEP)[0]),
    "items": (JSON, b'{"items":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "options": (
        JSON,
        b'{"items":[{"text":"a"}],"params":{"options":{"a":' + b"[" * DEEP + b"]" * DEEP + b"}}}",
    ),
    "metadata": (JSON, b'{"items":[{"text":"a","metadata":{"a":' + b"[" * DEEP + b"]" * DEEP + b"}}]}"),
    "msgpack arrays": (MSGPACK, b"\x91" * DEEP + b"\x01"),
    "msgpack array in an unknown field": (MSGPACK, nested_value(b"\x91" * DEEP + b"\x01")[1]),
    "msgpack map in an unknown field": (MSGPACK, nested_value(b"\x81\xa1a" * DEEP + b"\x01")[1]),
    "msgpack options": (
        MSGPACK,
        b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xa7options\x81\xa1a" + b"\x91" * DEEP + b"\x01",
    ),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_nesting_of_100000_levels_is_refused_everywhere(server: Server, name: str) -> None:
    form, body = DEPTHS[name]
    assert_refused(send(server, form, body), 400, "INVALID_INPUT", "body")
    if form is JSON:
        body = body.replace(b'"items":[{"text":"a"}]', b'"model":"fake/echo","input":"a"')
        answer = send(server, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "body")


@pytest.mark.parametrize("digits", ["9" * 10_000, "-" + "9" * 10_000, str(2**70), "1e400", str(2**63)])
def test_numbers_beyond_all_bounds_are_refused_where_they_are_read(server: Server, digits: str) -> None:
    for field in ('"text":{0}', '"id":{0}', '"images":[{{"format":{0}}}]'):
        body = ('{"items":[{' + field.format(digits) + "}]}").encode()
        assert_refused(send(server, JSON, body), 400, "INVALID_INPUT")
    body = ('{"items":[{"text":"a"}],"params":{"options":{"dimensions":' + digits + "}}}").encode()
    assert_refused(send(server, JSON, body), 400, "INVALID_INPUT")
    for request in ('"input":[{0}]', '"input":[[{0}]]', '"input":"a","dimensions":{0}'):
        body = ('{"model":"fake/echo",' + request.format(digits) + "}").encode()
        answer = send(server, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input")


def test_unknown_fields_may_hold_anything_that_can_be_skipped(server: Server) -> None:
    array = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": b"\0\0\0\0"}
    for body in (nested_value(b"9" * 10_000)[0], nested_value(b"[" * 100 + b"]" * 100)[0]):
        assert send(server, JSON, body).status == 200
    item = {"text": "a", "multivector": array, "time": msgpack.Timestamp(1), "code": msgpack.ExtType(7, b"x")}
    assert send(server, MSGPACK, MSGPACK.dump({"items": [item], "more": array})).status == 200


CLAIMS = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "bin": b"\xc6\xff\xff\xff\xff",
    "str": b"\xdb\xff\xff\xff\xff",
    "ext": b"\xc9\xff\xff\xff\xff\x01",
}
PLACES = {
    "body": b"",
    "items": b"\x81\xa5items",
    "an item": b"\x81\xa5items\x91",
    "text": b"\x81\xa5items\x91\x81\xa4text",
    "an unknown field": b"\x82\xa5items\x91\x81\xa4text\xa1a\xa1x",
    "output_types": b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xacoutput_types",
    "options": b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xa7options",
    "an option": b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xa7options\x81\xa1a",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_msgpack_headers_that_claim_four_billion_elements_are_refused(
    server: Server, claim: str, place: str
) -> None:
    for rest in (b"", b"\x80" * 64):
        body = PLACES[place] + CLAIMS[claim] + rest
        assert_refused(send(server, MSGPACK, body), 400, "INVALID_INPUT", "body")


MANY = 8_000_000
BOMBS = {
    "items": (JSON, b'{"items":[' + b"{}," * MANY + b"{}]}"),
    "images": (JSON, b'{"items":[{"text":"a","images":[' + b"{}," * MANY + b"{}]}]}"),
    "options": (JSON, nested_value(b'{"options":{"a":[' + b"[]," * MANY + b"[]]}}", b"params")[0]),
    "metadata": (JSON, b'{"items":[{"text":"a","metadata":{"a":[' + b"[]," * MANY + b"[]]}}]}"),
    "output types": (JSON, nested_value(b'{"output_types":[' + b'"a",' * MANY + b'"a"]}', b"params")[0]),
    "keys": (JSON, nested_value(b'{"options":{' + b'"abc":0,' * MANY + b'"a":0}}', b"params")[0]),
    "texts behind escapes": (JSON, b'{"items":[' + rb'"\\\"","\"\\",' * MANY + b"{}]}"),
    "an unknown field": (JSON, b'{"items":[],"items":[],"x":[' + b"[]," * MANY + b"[]]}"),
    "msgpack items": (MSGPACK, b"\x81\xa5items\xdd" + (4 * MANY).to_bytes(4, "big") + b"\x80" * 4 * MANY),
    "msgpack images": (
        MSGPACK,
        b"\x81\xa5items\x91\x81\xa6images\xdd" + (4 * MANY).to_bytes(4, "big") + b"\x80" * 4 * MANY,
    ),
    "msgpack options": (
        MSGPACK,
        nested_value(b"\x81\xa7options\x81\xa1a" + b"\x9f" * 4 * MANY, b"params")[1],
    ),
}


WRONG_TEXT: tuple[Any, ...] = (5, 1.5, True, [], {}, ["a"])
WRONG_MAP: tuple[Any, ...] = (5, True, "x", [], [{}])
WRONG_MEDIA: tuple[Any, ...] = (*WRONG_MAP, {"data": 5}, {"data": []}, {"format": 5}, {"format": []})
WRONG_ITEM = {
    "id": WRONG_TEXT,
    "text": WRONG_TEXT,
    "images": (5, "x", {}, [5], ["x"], [[]], [{"data": 5}], [{"format": 5}]),
    "audio": WRONG_MEDIA,
    "video": WRONG_MEDIA,
    "document": WRONG_MEDIA,
    "metadata": WRONG_MAP,
}
WRONG_PARAMS = {
    "output_types": ("dense", 5, {}, [5], [None], [["dense"]], ["nope"], ["dense", "nope"]),
    "output_dtype": (5, [], {}, True, "float31", ""),
    "instruction": (5, [], {}, True),
    "options": WRONG_MAP,
}
WRONG_OPTIONS = {
    "profile": (5, [], {}, True, "nope", ""),
    "output_types": ("dense", 5, {}, [5], [None], [["dense"]], ["nope"]),
    "output_dtype": (5, [], {}, True, "float31"),
    "instruction": (5, [], {}, True),
    "dimensions": ("8", 8.0, True, [], {}, 0, -1, 17, 2**40),
    "overflow_policy": (5, [], {}, True, "nope", ""),
    "lora_id": ("some", 5),
    "lora": ("some", 5),
}
FIELDS = [
    *(("items[0].{}", {"items": [{"text": "a", name: value}]}, name, value)
      for name, values in WRONG_ITEM.items() for value in values),
    *(("params.{}", {"items": [{"text": "a"}], "params": {name: value}}, name, value)
      for name, values in WRONG_PARAMS.items() for value in values),
    *(("params.options.{}", {"items": [{"text": "a"}], "params": {"options": {name: value}}}, name, value)
      for name, values in WRONG_OPTIONS.items() for value in values),
    *(("{}", {"items": [{"text": "a"}], "params": value}, "params", value) for value in WRONG_MAP),
    *(("{}", {"items": value}, "items", value) for value in (5, True, "x", {}, [5], ["x"], [[]], [None])),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_wrong_type_or_value_at_any_field_is_refused_by_name(server: Server, form: Form) -> None:
    wrong = []
    for place, body, name, value in FIELDS:
        answer = send(server, form, form.dump(body))
        message = answer.json()["detail"]["message"] if answer.status == 400 else ""
        if place.format(name) not in message:
            wrong.append((place.format(name), value, answer.status, message))
        else:
            assert_refused(answer, 400, "INVALID_INPUT", name)
    assert not wrong


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_missing_or_null_field_that_is_required_is_refused_by_name(server: Server, form: Form) -> None:
    for body in ({}, {"item": []}, {"items": None}, {"params": {}}):
        assert_refused(send(server, form, form.dump(body)), 400, "INVALID_INPUT", "items")
    for item in ({}, {"id": "a"}, {"text": None}):
        answer = send(server, form, form.dump({"items": [{"text": "a"}, item]}))
        assert_refused(answer, 400, "INVALID_INPUT", "items[1].text")
    media = {"data": "" if form is JSON else b"", "format": "png"}
    for item in ({"images": [media]}, {"audio": media}, {"video": media}, {"document": media}):
        answer = send(server, form, form.dump({"items": [item]}))
        assert_refused(answer, 400, "INVALID_INPUT", f"items[0].{next(iter(item))}", "text")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_null_is_the_same_as_absent_at_every_optional_field(server: Server, form: Form) -> None:
    item = dict.fromkeys(WRONG_ITEM) | {"text": "a"}
    options = dict.fromkeys(WRONG_OPTIONS)
    for params in (None, dict.fromkeys(WRONG_PARAMS), dict.fromkeys(WRONG_PARAMS) | {"options": options}):
        assert send(server, form, form.dump({"items": [item], "params": params})).status == 200


def test_bad_base64_in_a_media_field_is_refused_by_name(server: Server) -> None:
    for data in ("a", "ab=c", "####", "YQ"):
        answer = send(server, JSON, JSON.dump({"items": [{"text": "a", "images": [{"data": data}]}]}))
        assert_refused(answer, 400, "INVALID_INPUT", "$.items[0].images[0].data")


WRONG_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "model": (5, None, [], {}, True),
    "input": (5, None, {}, True, 1.5, [1.5], [True], [None], [{}], [["a"]], [[1.5]], [[[1]]], [-1], [2**31]),
    "encoding_format": (5, [], "hex", ""),
    "dimensions": ("8", 8.5, True, [], 0, -1, 17, 2**40),
}


@pytest.mark.parametrize("field", WRONG_EMBEDDINGS)
def test_embeddings_refuse_a_wrong_type_or_value_by_name(server: Server, field: str) -> None:
    for value in WRONG_EMBEDDINGS[field]:
        body = {"model": "fake/echo", "input": "a", field: value}
        answer = send(server, JSON, JSON.dump(body), "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", field)


@pytest.mark.parametrize(
    "given", [[], [[]], [[1], []], ["a", 1], ["a", [1]], [1, [1]], "\0", ["a\0b"]], ids=str
)
def test_embeddings_refuse_empty_mixed_and_nul_input(server: Server, given: Any) -> None:
    answer = send(server, JSON, JSON.dump({"model": "fake/echo", "input": given}), "/v1/embeddings")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "input")


DUPLICATES = {
    "items": (JSON, b'{"items":[{"text":"a"}],"items":[{"text":"b"}]}'),
    "params": (JSON, b'{"items":[{"text":"a"}],"params":{},"params":{}}'),
    "text": (JSON, b'{"items":[{"text":"a","text":"b"}]}'),
    "id": (JSON, b'{"items":[{"text":"a"},{"id":"a","id":"b","text":"b"}]}'),
    "output_dtype": (
        JSON,
        b'{"items":[{"text":"a"}],"params":{"output_dtype":"int8","output_dtype":"binary"}}',
    ),
    "dimensions": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{"dimensions":2,"dimensions":3}}}'),
    "items, once escaped": (JSON, b'{"items":[{"text":"a"}],"\\u0069tems":[{"text":"b"}]}'),
    "text, once escaped": (JSON, b'{"items":[{"text":"a","te\\u0078t":"b"}]}'),
    "msgpack items": (MSGPACK, b"\x82\xa5items\x91\x81\xa4text\xa1a\xa5items\x91\x81\xa4text\xa1b"),
    "msgpack items, once long": (
        MSGPACK,
        b"\x82\xa5items\x91\x81\xa4text\xa1a\xd9\x05items\x91\x81\xa4text\xa1b",
    ),
    "msgpack text": (MSGPACK, b"\x81\xa5items\x91\x82\xa4text\xa1a\xa4text\xa1b"),
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_a_key_given_twice_is_refused_by_name(server: Server, name: str) -> None:
    form, body = DUPLICATES[name]
    assert_refused(send(server, form, body), 400, "INVALID_INPUT", name.split(",")[0].split()[-1], "twice")


def test_embeddings_refuse_a_key_given_twice(server: Server) -> None:
    for body in (
        b'{"model":"fake/echo","input":"a","input":"b"}',
        b'{"model":"fake/echo","input":"a","mod\\u0065l":"b"}',
    ):
        answer = send(server, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "twice")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_names_of_fields_inside_texts_and_other_maps_are_no_duplicates(server: Server, form: Form) -> None:
    text = '{"items": 1, "items": 2, "text": 3} \u0069tems \\u0069tems items text'
    item = {"text": text, "id": "items", "metadata": {"text": text, "items": {"items": ["items", "text"]}}}
    body = {"items": [item, item], "params": {"options": {"text": "text"}, "instruction": '"params"'}}
    assert send(server, form, form.dump(body)).status == 200


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_no_items_and_too_many_items_are_refused_with_the_limit(server: Server, form: Form) -> None:
    assert_refused(send(server, form, form.dump({"items": []})), 400, "INVALID_INPUT", "items", "empty")
    body = form.dump({"items": [{"text": "a"}] * 10_001})
    assert_refused(
        send(server, form, body, within_s=LARGE_S), 400, "INVALID_INPUT", "items", "10001", "10000"
    )


def test_embeddings_refuse_too_many_inputs_with_the_limit(server: Server) -> None:
    body = JSON.dump({"model": "fake/echo", "input": ["a"] * 10_001})
    answer = send(server, JSON, body, "/v1/embeddings", LARGE_S)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "input", "10001", "10000")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_text_of_100_mb_is_refused_with_its_place_size_and_limit(server: Server, form: Form) -> None:
    body = form.dump({"items": [{"text": "short"}, {"text": "é " * 33_000_000}]})
    answer = send(
        server, form, body if form is MSGPACK else body.replace(b"\\u00e9", "é".encode()), within_s=LARGE_S
    )
    assert_refused(answer, 400, "INVALID_INPUT", "items[1].text", "99000000", str(1 << 20))


@pytest.mark.parametrize("text", ["a\0b", "\0", "text\0"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_nul_characters_are_refused_with_their_place(server: Server, form: Form, text: str) -> None:
    body = form.dump({"items": [{"text": "a"}, {"text": text}]})
    message = assert_refused(send(server, form, body), 400, "INVALID_INPUT", "items[1].text", "NUL")
    assert str(text.index("\0")) in message
    body = form.dump({"items": [{"text": "a"}], "params": {"instruction": text}})
    assert_refused(send(server, form, body), 400, "INVALID_INPUT", "instruction", "NUL")


@pytest.mark.parametrize("bomb", BOMBS)
def test_millions_of_small_elements_are_refused_without_the_memory_for_them(
    started: tuple[Server, int, int], server: Server, bomb: str
) -> None:
    form, body = BOMBS[bomb]
    status = Path(f"/proc/{started[1]}/status")
    (status.parent / "clear_refs").write_text("5")  # the peak starts again from here, see proc(5)
    before = private_bytes(started[1])
    assert_refused(send(server, form, body, within_s=LARGE_S), 400, "INVALID_INPUT")
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    # The body arrives in pieces, is put together, and is looked at without its strings: three times its size at most.
    assert int(peak.split()[1]) * 1024 - before < 3 * len(body) + 2 * MAX_GROWTH_BYTES


@pytest.mark.parametrize("value", [b"1000", b"[1]", b'"a"'], ids=bytes.decode)
def test_embeddings_refuse_millions_of_inputs_without_the_memory_for_them(
    server: Server, value: bytes
) -> None:
    body = b'{"model":"fake/echo","input":[' + (value + b",") * MANY + value + b"]}"
    answer = send(server, JSON, body, "/v1/embeddings", LARGE_S)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "values", "limits.max_items")


TRICKS = (
    "unknown", "fake", "fake/", "fake/echo/", "/fake/echo", "fake//echo", "Fake/Echo", "fake/echo ", "fake/echo%20",
    "../fake/echo", "..", "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd",
    "%252e%252e/etc/passwd", "fake/echo/../echo", "fake/./echo", "....//....//etc/passwd", "..\\..\\windows",
    "fake/echo%00", "%00", "fake%00/echo", "fake/echo%0d%0aX-Evil:%201", "fake/echo%ff%fe", "%ed%a0%80", "%",
    "%zz", "fake/echo:", "fake/echo:nope", "fake/echo:default", "fake/echo%3f", "~root", "$HOME", "file:///etc/passwd",
    "https://127.0.0.1/", "fake/echo;x=1", "'%20or%201=1", "%3Cscript%3E", "a" * 8000, "a/" * 4000, "%2e" * 4000,
)  # fmt: skip


@pytest.mark.parametrize("name", TRICKS, ids=lambda name: name[:40])
def test_a_model_name_that_is_not_in_the_catalog_is_not_found(server: Server, name: str) -> None:
    name = name.replace(" ", "%20")
    for form in FORMS:
        answer = send(server, form, form.dump({"items": [{"text": "a"}]}), f"/v1/encode/{name}")
        assert_refused(answer, 404, "MODEL_NOT_FOUND")
    answer = server.get(f"/v1/models/{name}")
    if name:
        assert_refused(answer, 404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    "name", ["unknown", "../fake/echo", "fake/echo\0", "a" * 100_000, "fake/echo\n", "é\u202e"]
)
def test_embeddings_do_not_find_a_model_that_is_not_in_the_catalog(server: Server, name: str) -> None:
    answer = send(server, JSON, JSON.dump({"model": name, "input": "a"}), "/v1/embeddings")
    message = assert_refused_openai(answer, 404, "MODEL_NOT_FOUND", "model_not_found")
    assert message.isascii() and message.isprintable()


def test_a_model_name_longer_than_a_request_head_may_be_is_refused(server: Server) -> None:
    answer = send(server, JSON, b'{"items":[]}', "/v1/encode/" + "a" * 100_000)
    assert answer.status == 431
    assert answer.json()["detail"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/encode/fake%2Fecho", "/v1/encode/fake/ech%6f", "/v1/encode/fake/echo?x=1"]
)
def test_an_escaped_name_is_the_same_name(server: Server, path: str) -> None:
    assert send(server, JSON, JSON.dump({"items": [{"text": "a"}]}), path).status == 200


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "",
        "x",
        "\xff",
    ],
)
def test_any_other_content_type_is_read_as_json(server: Server, content_type: str) -> None:
    headers = {"Content-Type": content_type, "Accept": "application/json"}
    good, bad = JSON.dump({"items": [{"text": "a"}]}), b"<items/>"
    assert server.request("POST", PATH, good, headers).status == 200
    assert_refused(server.request("POST", PATH, bad, headers), 400, "INVALID_INPUT", "body", "JSON")
    body = JSON.dump({"model": "fake/echo", "input": "a"})
    assert server.request("POST", "/v1/embeddings", body, headers).status == 200


def test_a_content_length_over_the_limit_is_refused_before_the_body_is_sent(server: Server) -> None:
    for path in (PATH, "/v1/embeddings"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        answer = exchange(server, head.encode(), timeout_s=QUICK_S)
        assert b" 413 " in answer.partition(b"\r\n")[0]
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["detail"]["code"] == "INPUT_TOO_LONG"
        for part in ("body", str(MAX_BODY_BYTES + 1), str(MAX_BODY_BYTES), "limits.max_body_bytes"):
            assert part in body["detail"]["message"]
        assert ("error" in body) == (path == "/v1/embeddings")


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(server: Server, path: str) -> None:
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        while sent < 4 * MAX_BODY_BYTES and not select.select([connection], [], [], 0)[0]:
            connection.sendall(chunk)
            sent += 1 << 20
        answer = receive_all(connection)
    assert sent < 2 * MAX_BODY_BYTES, "the refusal came late"
    assert b" 413 " in answer.partition(b"\r\n")[0]
    detail = json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]
    assert detail["code"] == "INPUT_TOO_LONG" and str(MAX_BODY_BYTES) in detail["message"]


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_half_a_body_and_then_silence_is_ended_with_408(server: Server, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    began = time.monotonic()
    answer = exchange(server, head.encode() + b'{"items":[', timeout_s=10)
    assert time.monotonic() - began < 5
    assert b" 408 " in answer.partition(b"\r\n")[0]
    detail = json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]
    assert set(detail) >= {"code", "message"} and "1024" in detail["message"]


def exchange(server: Server, sent: bytes, timeout_s: float) -> bytes:
    """Send raw bytes and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as connection:
        connection.sendall(sent)
        return receive_all(connection)


def receive_all(connection: socket.socket) -> bytes:
    """Everything until the end of the connection; a reset after the answer ends it too."""
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found
