"""Broken score requests: each field with wrong types and values, repeated keys, sizes; the server takes no harm."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.hostile import send
from tests.conformance.wire import FORMS, JSON, MSGPACK, Form, assert_refused
from tests.harness.server import Server

PATH = "/v1/score/fake/score"
GOOD: dict[str, Any] = {"query": {"text": "q"}, "items": [{"text": "1"}]}

WRONG_TEXT: tuple[Any, ...] = (5, 1.5, True, [], {}, ["a"])
WRONG_MAP: tuple[Any, ...] = (5, True, "x", [], [{}])
WRONG_ITEM = {
    "id": WRONG_TEXT,
    "text": (*WRONG_TEXT, None),
    "images": (5, "x", {}, [5], [{"data": 5}]),
    "audio": WRONG_MAP,
    "video": WRONG_MAP,
    "document": WRONG_MAP,
    "metadata": WRONG_MAP,
}
WRONG_OPTIONS = {
    "profile": (5, [], {}, True, "nope", ""),
    "instruction": (5, [], {}, True),
    "overflow_policy": (5, [], {}, True, "nope", ""),
    "lora_id": ("some", 5, "../../etc"),
    "lora": ("some", 5),
}
FIELDS = [
    *(("query", {**GOOD, "query": value}) for value in (*WRONG_MAP, None)),
    *(("items", {**GOOD, "items": value}) for value in (5, True, "x", {}, None, [], [5], ["x"], [[]], [None])),
    *(("instruction", {**GOOD, "instruction": value}) for value in (5, [], {}, True)),
    *(("options", {**GOOD, "options": value}) for value in WRONG_MAP),
    *((f"query.{name}", {**GOOD, "query": {"text": "q", name: value}})
      for name, values in WRONG_ITEM.items() for value in values),
    *((f"items[1].{name}", {**GOOD, "items": [{"text": "1"}, {"text": "1", name: value}]})
      for name, values in WRONG_ITEM.items() for value in values),
    *((f"options.{name}", {**GOOD, "options": {name: value}})
      for name, values in WRONG_OPTIONS.items() for value in values),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_wrong_type_or_value_at_any_field_is_refused_by_name(unharmed: Server, form: Form) -> None:
    wrong = []
    for place, body in FIELDS:
        answer = send(unharmed, form, form.dump(body), PATH)
        message = answer.json()["detail"]["message"] if answer.status == 400 else ""
        if place not in message:
            wrong.append((place, body, answer.status, message))
        else:
            assert_refused(answer, 400, "INVALID_INPUT", place)
    assert not wrong


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_missing_field_that_is_required_is_refused_by_name(unharmed: Server, form: Form) -> None:
    for field in GOOD:
        body = {name: value for name, value in GOOD.items() if name != field}
        assert_refused(send(unharmed, form, form.dump(body), PATH), 400, "INVALID_INPUT", field)
    body = {"items": GOOD["items"], "params": {"query": GOOD["query"]}}
    assert_refused(send(unharmed, form, form.dump(body), PATH), 400, "INVALID_INPUT", "query")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_null_is_the_same_as_absent_and_unknown_fields_are_skipped(unharmed: Server, form: Form) -> None:
    item = dict.fromkeys(WRONG_ITEM) | {"text": "1", "unknown": {"deep": [1, {"x": None}]}}
    body = {"query": item, "items": [item], "instruction": None, "options": dict.fromkeys(WRONG_OPTIONS)}
    for options in (None, {}, dict.fromkeys(WRONG_OPTIONS)):
        answer = send(unharmed, form, form.dump({**body, "options": options, "params": {"x": 1}}), PATH)
        assert answer.status == 200, answer.body


REPEATED = {
    "query": (JSON, b'{"query":{"text":"a"},"query":{"text":"b"},"items":[{"text":"1"}]}'),
    "items": (JSON, b'{"query":{"text":"a"},"items":[{"text":"1"}],"it\\u0065ms":[]}'),
    "text": (JSON, b'{"query":{"text":"a","text":"b"},"items":[{"text":"1"}]}'),
    "id": (JSON, b'{"query":{"text":"a"},"items":[{"text":"1","id":"a","id":"b"}]}'),
    "score_mode": (
        JSON,
        b'{"query":{"text":"a"},"items":[{"text":"1"}],"options":{"score_mode":"dense","score_mode":"sparse"}}',
    ),
    "msgpack query": (
        MSGPACK,
        b"\x83\xa5query\x81\xa4text\xa1a\xa5query\x81\xa4text\xa1b\xa5items\x91\x81\xa4text\xa11",
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_key_given_twice_is_refused_by_name(unharmed: Server, name: str) -> None:
    form, body = REPEATED[name]
    assert_refused(send(unharmed, form, body, PATH), 400, "INVALID_INPUT", name.split()[-1], "twice")


def test_a_query_that_is_long_before_many_items_is_refused_as_a_whole(unharmed: Server) -> None:
    body = {"query": {"text": "q" * 1_000_000}, "items": [{"text": "1"}] * 200}
    answer = send(unharmed, JSON, JSON.dump(body), PATH)
    assert_refused(answer, 400, "INVALID_INPUT", "query.text", "1000000", "200")
    body = {**GOOD, "items": [{"text": "1"}] * 200, "instruction": "q" * 1_000_000}
    assert_refused(send(unharmed, JSON, JSON.dump(body), PATH), 400, "INVALID_INPUT", "instruction", "200")


def test_more_items_than_a_request_may_hold_are_refused_with_the_limit(unharmed: Server) -> None:
    body = {**GOOD, "items": [{"text": "1"}] * 10_001}
    answer = send(unharmed, JSON, JSON.dump(body), PATH)
    assert_refused(answer, 400, "INVALID_INPUT", "items", "10001", "10000")


def test_a_query_or_item_of_media_alone_that_the_model_does_not_take_is_refused(unharmed: Server) -> None:
    media = {"data": b"\x89PNG", "format": "png"}
    for body in (
        {**GOOD, "query": {"images": [media]}},
        {**GOOD, "items": [{"text": "1"}, {"document": media}]},
    ):
        answer = send(unharmed, MSGPACK, MSGPACK.dump(body), PATH)
        assert_refused(answer, 400, "INVALID_INPUT", "takes text only")
