"""Requests that are too deep, too many, too long or too slow: refused in time, and without the memory they ask for."""

from __future__ import annotations

import json
import select
import socket
import time
from pathlib import Path

import pytest

from tests.conformance.conftest import Warm
from tests.conformance.hostile import (
    LARGE_S,
    MAX_BODY_BYTES,
    MAX_GROWTH_BYTES,
    PATH,
    QUICK_S,
    exchange,
    private_bytes,
    receive_all,
    send,
    with_field,
)
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused, assert_refused_openai
from tests.harness.server import PATIENCE_S, Server

DEEP = 100_000

DEPTHS = {
    "array in an unknown field": (JSON, with_field(b"[" * DEEP + b"]" * DEEP)[0]),
    "unclosed arrays": (JSON, b"[" * DEEP),
    "object in an unknown field": (JSON, with_field(b'{"a":' * DEEP + b"1" + b"}" * DEEP)[0]),
    "items": (JSON, b'{"items":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "options": (
        JSON,
        b'{"items":[{"text":"a"}],"params":{"options":{"a":' + b"[" * DEEP + b"]" * DEEP + b"}}}",
    ),
    "metadata": (JSON, b'{"items":[{"text":"a","metadata":{"a":' + b"[" * DEEP + b"]" * DEEP + b"}}]}"),
    "msgpack arrays": (MSGPACK, b"\x91" * DEEP + b"\x01"),
    "msgpack array in an unknown field": (MSGPACK, with_field(b"\x91" * DEEP + b"\x01")[1]),
    "msgpack map in an unknown field": (MSGPACK, with_field(b"\x81\xa1a" * DEEP + b"\x01")[1]),
    "msgpack options": (
        MSGPACK,
        b"\x82\xa5items\x91\x81\xa4text\xa1a\xa6params\x81\xa7options\x81\xa1a" + b"\x91" * DEEP + b"\x01",
    ),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_nesting_of_100000_levels_is_refused_everywhere(unharmed: Server, name: str) -> None:
    form, body = DEPTHS[name]
    assert_refused(send(unharmed, form, body), 400, "INVALID_INPUT", "body")
    if form is JSON:
        body = body.replace(b'"items":[{"text":"a"}]', b'"model":"fake/echo","input":"a"')
        answer = send(unharmed, JSON, body, "/v1/embeddings")
        assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "body")


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
    unharmed: Server, claim: str, place: str
) -> None:
    for rest in (b"", b"\x80" * 64):
        body = PLACES[place] + CLAIMS[claim] + rest
        assert_refused(send(unharmed, MSGPACK, body), 400, "INVALID_INPUT", "body")


MANY = 8_000_000
CLAIMED = (4 * MANY).to_bytes(4, "big")
BOMBS = {
    "items": (JSON, b'{"items":[', b"{},", b"{}]}"),
    "images": (JSON, b'{"items":[{"text":"a","images":[', b"{},", b"{}]}]}"),
    "options": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{"a":[', b"[],", b"[]]}}}"),
    "metadata": (JSON, b'{"items":[{"text":"a","metadata":{"a":[', b"[],", b"[]]}}]}"),
    "output types": (JSON, b'{"items":[{"text":"a"}],"params":{"output_types":[', b'"a",', b'"a"]}}'),
    "keys": (JSON, b'{"items":[{"text":"a"}],"params":{"options":{', b'"abc":0,', b'"a":0}}}'),
    "texts behind escapes": (JSON, b'{"items":["', rb'\\\"","\\\\","', b'"]}'),
    "an unknown field": (JSON, b'{"items":[],"items":[],"x":[', b"[],", b"[]]}"),
    "msgpack items": (MSGPACK, b"\x81\xa5items\xdd" + CLAIMED, b"\x80" * 4, b""),
    "msgpack images": (MSGPACK, b"\x81\xa5items\x91\x81\xa6images\xdd" + CLAIMED, b"\x80" * 4, b""),
    "msgpack options": (MSGPACK, with_field(b"\x81\xa7options\x81\xa1a", "params")[1], b"\x9f" * 4, b""),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_no_items_and_too_many_items_are_refused_with_the_limit(unharmed: Server, form: Form) -> None:
    assert_refused(send(unharmed, form, form.dump({"items": []})), 400, "INVALID_INPUT", "items", "empty")
    body = form.dump({"items": [{"text": "a"}] * 10_001})
    assert_refused(
        send(unharmed, form, body, within_s=LARGE_S), 400, "INVALID_INPUT", "items", "10001", "10000"
    )


def test_embeddings_refuse_too_many_inputs_with_the_limit(unharmed: Server) -> None:
    body = JSON.dump({"model": "fake/echo", "input": ["a"] * 10_001})
    answer = send(unharmed, JSON, body, "/v1/embeddings", LARGE_S)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "input", "10001", "10000")


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_text_of_100_mb_is_refused_with_its_place_size_and_limit(unharmed: Server, form: Form) -> None:
    body = form.dump({"items": [{"text": "short"}, {"text": "é " * 33_000_000}]})
    answer = send(
        unharmed, form, body if form is MSGPACK else body.replace(b"\\u00e9", "é".encode()), within_s=LARGE_S
    )
    assert_refused(answer, 400, "INVALID_INPUT", "items[1].text", "99000000", str(1 << 20))


@pytest.mark.parametrize("bomb", BOMBS)
def test_millions_of_small_elements_are_refused_without_the_memory_for_them(
    warm_server: Warm, unharmed: Server, bomb: str
) -> None:
    form, before, element, after = BOMBS[bomb]
    body = before + element * min(MANY, 100_000_000 // len(element)) + after
    status = Path(f"/proc/{warm_server.pid}/status")
    (status.parent / "clear_refs").write_text("5")  # the peak starts again from here, see proc(5)
    held = private_bytes(warm_server.pid)
    assert_refused(send(unharmed, form, body, within_s=LARGE_S), 400, "INVALID_INPUT")
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    # The body arrives in pieces, is put together, and is looked at without its strings: three times its size at most.
    assert int(peak.split()[1]) * 1024 - held < 3 * len(body) + 2 * MAX_GROWTH_BYTES


@pytest.mark.parametrize("value", [b"1000", b"[1]", b'"a"'], ids=bytes.decode)
def test_embeddings_refuse_millions_of_inputs_without_the_memory_for_them(
    unharmed: Server, value: bytes
) -> None:
    body = b'{"model":"fake/echo","input":[' + (value + b",") * MANY + value + b"]}"
    answer = send(unharmed, JSON, body, "/v1/embeddings", LARGE_S)
    assert_refused_openai(answer, 400, "INVALID_INPUT", "invalid_input", "values", "limits.max_items")


def test_a_model_name_longer_than_a_request_head_may_be_is_refused(unharmed: Server) -> None:
    answer = send(unharmed, JSON, b'{"items":[]}', "/v1/encode/" + "a" * 400_000)
    assert answer.status == 431
    assert answer.json()["detail"]["message"]


def test_a_content_length_over_the_limit_is_refused_before_the_body_is_sent(unharmed: Server) -> None:
    for path in (PATH, "/v1/embeddings"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        answer = exchange(unharmed, head.encode(), timeout_s=QUICK_S)
        assert b" 413 " in answer.partition(b"\r\n")[0]
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["detail"]["code"] == "INPUT_TOO_LONG"
        for part in ("body", str(MAX_BODY_BYTES + 1), str(MAX_BODY_BYTES), "limits.max_body_bytes"):
            assert part in body["detail"]["message"]
        assert ("error" in body) == (path == "/v1/embeddings")


@pytest.mark.parametrize("path", [PATH, "/v1/embeddings"])
def test_a_chunked_body_over_the_limit_is_refused_while_it_arrives(unharmed: Server, path: str) -> None:
    chunk = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", unharmed.port), timeout=PATIENCE_S) as connection:
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
def test_half_a_body_and_then_silence_is_ended_with_408(unharmed: Server, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    began = time.monotonic()
    answer = exchange(unharmed, head.encode() + b'{"items":[', timeout_s=30)
    assert time.monotonic() - began < 15
    assert b" 408 " in answer.partition(b"\r\n")[0]
    detail = json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]
    assert set(detail) >= {"code", "message"} and "1024" in detail["message"]
