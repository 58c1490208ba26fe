"""Broken and hostile requests: each gets the contract's error in time, and the next client is served as before."""

from __future__ import annotations

import gzip
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.conformance.hostile import PATH, exchange, send, with_field
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused, assert_refused_openai
from tests.fakes.adapter import vector_of
from tests.harness.server import Server

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
    "NaN in an unknown field": (JSON, with_field(b"NaN")[0]),
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
def test_a_body_that_cannot_be_read_is_invalid_input(unharmed: Server, name: str) -> None:
    form, body = MALFORMED[name]
    assert_refused(send(unharmed, form, body), 400, "INVALID_INPUT", "body")


@pytest.mark.parametrize("name", [name for name, (form, _) in MALFORMED.items() if form is JSON])
def test_embeddings_refuse_a_body_that_cannot_be_read_in_their_own_form(unharmed: Server, name: str) -> None:
    body = MALFORMED[name][1].replace(b'"items":[{"text":', b'"model":"fake/echo","input":[{"text":')
    answer = send(unharmed, JSON, body, "/v1/embeddings")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "body")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("value", "kind"), [([], "array"), (None, "null"), ("x", "str"), (5, "int"), (True, "bool")]
)
def test_a_body_that_is_no_object_is_refused(unharmed: Server, form: Form, value: Any, kind: str) -> None:
    kind = "None" if form is MSGPACK and value is None else kind
    assert_refused(send(unharmed, form, form.dump(value)), 400, "INVALID_INPUT", "object", kind)
    kind = "null" if value is None else kind
    answer = send(unharmed, JSON, JSON.dump(value), "/v1/embeddings")
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "object", kind)


@pytest.mark.parametrize("digits", ["9" * 10_000, "-" + "9" * 10_000, str(2**70), "1e400", str(2**63)])
def test_numbers_beyond_all_bounds_are_refused_where_they_are_read(unharmed: Server, digits: str) -> None:
    for field in ('"text":{0}', '"id":{0}', '"images":[{{"format":{0}}}]'):
        body = ('{"items":[{' + field.format(digits) + "}]}").encode()
        assert_refused(send(unharmed, JSON, body), 400, "INVALID_INPUT")
    body = ('{"items":[{"text":"a"}],"params":{"options":{"dimensions":' + digits + "}}}").encode()
    assert_refused(send(unharmed, JSON, body), 400, "INVALID_INPUT")
    for request in ('"input":[{0}]', '"input":[[{0}]]', '"input":"a","dimensions":{0}'):
        body = ('{"model":"fake/echo",' + request.format(digits) + "}").encode()
        answer = send(unharmed, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input")


def test_unknown_fields_may_hold_anything_that_can_be_skipped(unharmed: Server) -> None:
    array = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [1], b"data": b"\0\0\0\0"}
    for body in (with_field(b"9" * 10_000)[0], with_field(b"[" * 100 + b"]" * 100)[0]):
        assert send(unharmed, JSON, body).status == 200
    item = {"text": "a", "multivector": array, "time": msgpack.Timestamp(1), "code": msgpack.ExtType(7, b"x")}
    assert send(unharmed, MSGPACK, MSGPACK.dump({"items": [item], "more": array})).status == 200


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
def test_a_wrong_type_or_value_at_any_field_is_refused_by_name(unharmed: Server, form: Form) -> None:
    wrong = []
    for place, body, name, value in FIELDS:
        answer = send(unharmed, form, form.dump(body))
        message = answer.json()["detail"]["message"] if answer.status == 400 else ""
        if place.format(name) not in message:
            wrong.append((place.format(name), value, answer.status, message))
        else:
            assert_refused(answer, 400, "INVALID_INPUT", name)
    assert not wrong


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_missing_or_null_field_that_is_required_is_refused_by_name(unharmed: Server, form: Form) -> None:
    for body in ({}, {"item": []}, {"items": None}, {"params": {}}):
        assert_refused(send(unharmed, form, form.dump(body)), 400, "INVALID_INPUT", "items")
    for item in ({}, {"id": "a"}, {"text": None}):
        answer = send(unharmed, form, form.dump({"items": [{"text": "a"}, item]}))
        assert_refused(answer, 400, "INVALID_INPUT", "items[1].text")
    media = {"data": "" if form is JSON else b"", "format": "png"}
    for item in ({"images": [media]}, {"audio": media}, {"video": media}, {"document": media}):
        answer = send(unharmed, form, form.dump({"items": [item]}))
        assert_refused(answer, 400, "INVALID_INPUT", f"items[0].{next(iter(item))}", "text")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_null_is_the_same_as_absent_at_every_optional_field(unharmed: Server, form: Form) -> None:
    item = dict.fromkeys(WRONG_ITEM) | {"text": "a"}
    options = dict.fromkeys(WRONG_OPTIONS)
    for params in (None, dict.fromkeys(WRONG_PARAMS), dict.fromkeys(WRONG_PARAMS) | {"options": options}):
        assert send(unharmed, form, form.dump({"items": [item], "params": params})).status == 200


@pytest.mark.parametrize("number", [2**64, 2**70, -(2**63) - 1])
@pytest.mark.parametrize(
    "place",
    ['"params":{"options":{"x":N}}', '"params":{"options":{"x":[{"y":[N]}]}}', '"x":1,"metadata":{"n":N}'],
)
def test_numbers_beyond_64_bits_are_refused_by_the_fields_that_may_hold_them(
    unharmed: Server, place: str, number: int
) -> None:
    field = place.replace("N", str(number))
    body = (
        f'{{"items":[{{"text":"a",{field}}}]}}'
        if "metadata" in place
        else f'{{"items":[{{"text":"a"}}],{field}}}'
    )
    answer = send(unharmed, JSON, body.encode())
    field = "metadata" if "metadata" in place else "options.x"
    assert_refused(answer, 400, "INVALID_INPUT", f"{field}", f"{number} is beyond 64 bits")


@pytest.mark.parametrize("levels", [30, 500, 940, 960, 980, 990, 1000, 1100])
def test_options_are_carried_or_refused_however_deep_they_are(unharmed: Server, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    answer = send(unharmed, JSON, b'{"items":[{"text":"a"}],"params":{"options":{"x":' + deep + b"}}}")
    if answer.status != 200:
        assert_refused(answer, 400, "INVALID_INPUT", "nested too deep")
    assert answer.status == 200 or levels > 900


def test_bad_base64_in_a_media_field_is_refused_by_name(unharmed: Server) -> None:
    for data in ("a", "ab=c", "####", "YQ"):
        answer = send(unharmed, JSON, JSON.dump({"items": [{"text": "a", "images": [{"data": data}]}]}))
        assert_refused(answer, 400, "INVALID_INPUT", "$.items[0].images[0].data")


WRONG_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "model": (5, None, [], {}, True),
    "input": (5, None, {}, True, 1.5, [1.5], [True], [None], [{}], [["a"]], [[1.5]], [[[1]]], [-1], [2**31]),
    "encoding_format": (5, [], "hex", ""),
    "dimensions": ("8", 8.5, True, [], 0, -1, 17, 2**40),
}


@pytest.mark.parametrize("field", WRONG_EMBEDDINGS)
def test_embeddings_refuse_a_wrong_type_or_value_by_name(unharmed: Server, field: str) -> None:
    for value in WRONG_EMBEDDINGS[field]:
        body = {"model": "fake/echo", "input": "a", field: value}
        answer = send(unharmed, JSON, JSON.dump(body), "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", field)


@pytest.mark.parametrize("given", [[], [[]], [[1], []], ["a", 1], ["a", [1]], [1, [1]]], ids=str)
def test_embeddings_refuse_empty_and_mixed_input(unharmed: Server, given: Any) -> None:
    answer = send(unharmed, JSON, JSON.dump({"model": "fake/echo", "input": given}), "/v1/embeddings")
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
def test_a_key_given_twice_is_refused_by_name(unharmed: Server, name: str) -> None:
    form, body = DUPLICATES[name]
    assert_refused(send(unharmed, form, body), 400, "INVALID_INPUT", name.split(",")[0].split()[-1], "twice")


def test_embeddings_refuse_a_key_given_twice(unharmed: Server) -> None:
    for body in (
        b'{"model":"fake/echo","input":"a","input":"b"}',
        b'{"model":"fake/echo","input":"a","mod\\u0065l":"b"}',
    ):
        answer = send(unharmed, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "twice")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_names_of_fields_inside_texts_and_other_maps_are_no_duplicates(unharmed: Server, form: Form) -> None:
    text = '{"items": 1, "items": 2, "text": 3} \u0069tems \\u0069tems items text'
    item = {"text": text, "id": "items", "metadata": {"text": text, "items": {"items": ["items", "text"]}}}
    body = {"items": [item, item], "params": {"options": {"text": "text"}, "instruction": '"params"'}}
    assert send(unharmed, form, form.dump(body)).status == 200


@pytest.mark.parametrize("text", ["a\0b", "\0", "text\0"])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_nul_characters_are_characters(unharmed: Server, form: Form, text: str) -> None:
    body = {"items": [{"text": "a"}, {"text": text}], "params": {"instruction": text}}
    answer = send(unharmed, form, form.dump(body))
    found = form.load(answer.body)["items"][1]["dense"]["values"]
    assert np.array_equal(np.asarray(found, np.float32), vector_of(f"{text} {text}", len(found)))


TRICKS = (
    "unknown", "fake", "fake/", "fake/echo/", "/fake/echo", "fake//echo", "Fake/Echo", "fake/echo ", "fake/echo%20",
    "%252e%252e/etc/passwd", "....//....//etc/passwd", "fake/echo:", "fake/echo:nope", "fake/echo:default",
    "fake/echo%3f", "~root", "$HOME", "file:///etc/passwd", "https://127.0.0.1/", "fake/echo;x=1", "'%20or%201=1",
    "%3Cscript%3E", "a" * 8000, "a/" * 4000, "%2e" * 4000,
)  # fmt: skip
TWO_READINGS = (
    "../fake/echo", "..", "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd",
    "fake/echo/../echo", "fake/./echo", "..\\..\\windows", "fake/echo%00", "%00", "fake%00/echo",
    "fake/echo%0d%0aX-Evil:%201", "fake/echo%ff%fe", "%ed%a0%80", "%", "%zz",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [(name, 404, "MODEL_NOT_FOUND") for name in TRICKS]
    + [(name, 400, "INVALID_INPUT") for name in TWO_READINGS],
    ids=lambda value: str(value)[:40],
)
def test_a_model_name_that_is_not_in_the_catalog_is_not_found(
    unharmed: Server, name: str, status: int, code: str
) -> None:
    name = name.replace(" ", "%20")
    for form in FORMS:
        answer = send(unharmed, form, form.dump({"items": [{"text": "a"}]}), f"/v1/encode/{name}")
        assert_refused(answer, status, code)
    answer = unharmed.get(f"/v1/models/{name}")
    if name:
        assert_refused(answer, status, code)


@pytest.mark.parametrize(
    "name", ["unknown", "../fake/echo", "fake/echo\0", "a" * 100_000, "fake/echo\n", "é\u202e"]
)
def test_embeddings_do_not_find_a_model_that_is_not_in_the_catalog(unharmed: Server, name: str) -> None:
    answer = send(unharmed, JSON, JSON.dump({"model": name, "input": "a"}), "/v1/embeddings")
    message = assert_refused_openai(answer, 404, "MODEL_NOT_FOUND", "model_not_found")
    assert message.isascii() and message.isprintable()


@pytest.mark.parametrize(
    "path", ["/v1/encode/fake%2Fecho", "/v1/encode/fake/ech%6f", "/v1/encode/fake/echo?x=1"]
)
def test_an_escaped_name_is_the_same_name(unharmed: Server, path: str) -> None:
    assert send(unharmed, JSON, JSON.dump({"items": [{"text": "a"}]}), path).status == 200


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
def test_any_other_content_type_is_read_as_json(unharmed: Server, content_type: str) -> None:
    headers = {"Content-Type": content_type, "Accept": "application/json"}
    good, bad = JSON.dump({"items": [{"text": "a"}]}), b"<items/>"
    assert unharmed.request("POST", PATH, good, headers).status == 200
    assert_refused(unharmed.request("POST", PATH, bad, headers), 400, "INVALID_INPUT", "body", "JSON")
    body = JSON.dump({"model": "fake/echo", "input": "a"})
    assert unharmed.request("POST", "/v1/embeddings", body, headers).status == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_an_upload_that_outlasts_its_deadline_is_answered(unharmed: Server, framing: bytes) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: test\r\nX-Request-Timeout: 0.2\r\n".encode() + framing
    answer = exchange(unharmed, head + b'\r\n\r\nd\r\n{"items": []}\r\n', timeout_s=10)
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b"connection: close" in answer.lower() and b"DEADLINE_EXCEEDED" in answer
