"""Integers stay integers: what a request holds arrives with the same digits, or the refusal names the number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from frontend.generation.nested import written
from ipc.wire.messages import GenerateCall
from tests.fakes.generation_server import RecordedServer
from tests.tiny import chat_tokenizers
from workers.generation.templates import ChatTemplate

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
WITHIN = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**64 - 1]
BEYOND = [str(2**64), str(-(2**63) - 1), "1" + "0" * 40, "9007199254740993.0", "0.12345678901234567890"]
ARGUMENTS = [*map(str, WITHIN), str(2**64), str(-(2**63) - 1), "1" + "0" * 40 + "7"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> RecordedServer:
    """All routes."""
    return RecordedServer(tmp_path_factory.mktemp("numbers"))


@pytest.fixture
def server(running: RecordedServer) -> Iterator[RecordedServer]:
    """All routes, of which none has asked the engine."""
    running.engine.works.clear()
    yield running


_FORM = '{"type": "json_schema", "json_schema": {"name": "x", "schema": N}}'
_FLAT = '{"type": "json_schema", "name": "x", "schema": N}'
_TOOL = '[{"type": "function", "name": "f", "parameters": N}]'
_GRAMMAR = '{"type": "json_schema", "value": N}'
SCHEMAS = {
    "chat format": (CHAT, f'{{"messages": "a", "response_format": {_FORM}}}'),
    "chat flat format": (CHAT, f'{{"messages": "a", "response_format": {_FLAT}}}'),
    "chat grammar": (CHAT, f'{{"messages": "a", "grammar": {_GRAMMAR}}}'),
    "chat llguidance": (
        CHAT,
        '{"messages": "a", "grammar": {"type": "llguidance", "value": {"grammars": [{"json_schema": N}]}}}',
    ),
    "chat tool": (CHAT, f'{{"messages": "a", "tools": {_TOOL}}}'),
    "chat nested tool": (
        CHAT,
        '{"messages": "a", "tools": [{"type": "function", "function": {"name": "f", "parameters": N}}]}',
    ),
    "completions format": (COMPLETIONS, f'{{"prompt": "a", "response_format": {_FORM}}}'),
    "completions grammar": (COMPLETIONS, f'{{"prompt": "a", "grammar": {_GRAMMAR}}}'),
    "messages tool": (
        MESSAGES,
        f'{{"messages": {json.dumps(HI)}, "tools": [{{"name": "f", "input_schema": N}}]}}',
    ),
    "messages format": (
        MESSAGES,
        f'{{"messages": {json.dumps(HI)}, "output_config": {{"format": {_FLAT}}}}}',
    ),
    "responses format": (RESPONSES, f'{{"input": "a", "text": {{"format": {_FLAT}}}}}'),
    "responses tool": (RESPONSES, f'{{"input": "a", "tools": {_TOOL}}}'),
}
RULES = [
    '{"enum": [1, V]}',
    '{"const": V}',
    '{"minimum": V, "maximum": V}',
    '{"exclusiveMinimum": V}',
    '{"multipleOf": V}',
    '{"default": V}',
    '{"$defs": {"a": {"anyOf": [{"const": {"b": [V]}}]}}, "properties": {"c": {"items": {"enum": [V]}}}}',
]


def _schema_of(call: GenerateCall) -> Any:
    """The schema that a worker gets, read from the message as bytes."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=GenerateCall)
    if again.tools is not None:
        return again.tools.functions[0]["function"]["parameters"]
    assert again.grammar is not None
    found = json.loads(again.grammar.value, parse_float=Decimal)
    return found["grammars"][0]["json_schema"] if again.grammar.kind == "llguidance" else found


@pytest.mark.parametrize("place", SCHEMAS)
def test_a_schema_arrives_with_the_digits_that_were_sent(server: RecordedServer, place: str) -> None:
    path, body = SCHEMAS[place]
    for rule in RULES:
        for value in WITHIN:
            schema = rule.replace("V", str(value))
            answer = server.post(path, body.replace("N", schema).encode())
            assert answer.status_code == 200, answer.text
            assert _schema_of(server.engine.calls[-1]) == json.loads(schema)


@pytest.mark.parametrize("place", SCHEMAS)
def test_a_number_that_no_message_holds_is_refused_by_its_digits(server: RecordedServer, place: str) -> None:
    path, body = SCHEMAS[place]
    for rule in RULES:
        for value in BEYOND:
            answer = server.post(path, body.replace("N", rule.replace("V", value)).encode())
            assert answer.status_code == (400 if path == MESSAGES else 422), answer.text
            assert value.rstrip("0").rstrip(".") in answer.json["error"]["message"]
    assert server.engine.works == []


def test_a_schema_as_text_is_read_as_one_in_place(server: RecordedServer) -> None:
    for value, status in ((2**64 - 1, 200), (2**64, 422)):
        text = json.dumps({"const": value})
        body = {"messages": "a", "grammar": {"type": "json_schema", "value": text}}
        answer = server.post(CHAT, json.dumps(body).encode())
        assert answer.status_code == status
        assert status == 200 or str(value) in answer.json["error"]["message"]


_CALL = '{"id": "c", "type": "function", "function": {"name": "f", "arguments": A}}'
CALLS = {
    "chat": (CHAT, f'{{"messages": [{{"role": "assistant", "tool_calls": [{_CALL}]}}]}}'),
    "messages": (
        MESSAGES,
        '{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": A}]},'
        ' {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}]}]}',
    ),
    "responses": (
        RESPONSES,
        '{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": A}]}',
    ),
}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """A template that writes arguments as JSON."""
    return ChatTemplate(chat_tokenizers.build("qwen3"))


@pytest.mark.parametrize(
    ("route", "as_text", "numbers"),
    [
        ("chat", False, ARGUMENTS),
        ("chat", True, ARGUMENTS),
        ("messages", False, ARGUMENTS),
        ("responses", True, ARGUMENTS),
        ("responses", False, ARGUMENTS[: len(WITHIN)]),
    ],
)
def test_arguments_of_earlier_calls_keep_their_digits_in_the_prompt(
    server: RecordedServer, template: ChatTemplate, route: str, as_text: bool, numbers: list[str]
) -> None:
    path, body = CALLS[route]
    for number in numbers:
        arguments = f'{{"ids": [{number}], "n": {{"id": {number}}}}}'
        told = json.dumps(arguments) if as_text else arguments
        answer = server.post(path, body.replace("A", told).encode())
        assert answer.status_code == 200, answer.text
        call = msgspec.msgpack.decode(msgspec.msgpack.encode(server.engine.calls[-1]), type=GenerateCall)
        text = template.prompt([*call.messages, *HI]).text
        # NOTE: a prompt of transformers has what `json.dumps` makes of the parsed arguments.
        assert json.dumps(json.loads(arguments)) in text


def test_a_stored_item_with_a_long_integer_is_refused_by_its_digits(server: RecordedServer) -> None:
    body = CALLS["responses"][1].replace("A", f'{{"id": {2**64}}}')
    answer = server.post(RESPONSES, body.encode())
    assert answer.status_code == 422 and str(2**64) in answer.json["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_seeds_of_64_bits_are_all_different_and_longer_ones_are_refused(
    server: RecordedServer, path: str
) -> None:
    base = (
        {"input": "a"} if path == RESPONSES else {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    )
    for seed in (5, -5, 2**62 + 5, 2**63 + 5, 2**53, 2**53 + 1, 2**64 - 6):
        assert server.post(path, json.dumps({**base, "seed": seed}).encode()).status_code == 200
    seeds = [call.sampling.seed for call in server.engine.calls]
    assert len(set(seeds)) == len(seeds) and seeds[0] == 5 and seeds[-2] == 2**53 + 1
    answer = server.post(path, json.dumps({**base, "seed": 2**64}).encode())
    assert answer.status_code in (400, 422) and str(2**64) in answer.json["error"]["message"]


def test_whole_numbers_in_the_form_of_reals_are_no_integers(server: RecordedServer) -> None:
    for field in ("max_tokens", "seed", "top_k", "n"):
        for number in ("1e3", "1.0", "9007199254740993.0"):
            answer = server.post(CHAT, f'{{"messages": "a", "{field}": {number}}}'.encode())
            assert answer.status_code == 422 and answer.json["error"]["param"] == field


@pytest.mark.parametrize(
    "key", ["2147483648", "9007199254740993", "18446744073709551617", "1e3", "1.0", "-1"]
)
def test_a_bias_for_what_is_no_token_id_is_refused_by_its_key(server: RecordedServer, key: str) -> None:
    answer = server.post(CHAT, {"messages": "a", "logit_bias": {key: 1}})
    assert answer.status_code == 422 and key in answer.json["error"]["message"]


def test_a_real_is_a_double_only_if_the_double_has_its_digits() -> None:
    for text in ("0.1", "1e3", "-2.5E-7", "1e21", "0.30000000000000004", "5e-324", "123456789.25", "1e-7"):
        assert written(text) == float(text) and isinstance(written(text), float)
    for text in ("9007199254740993.0", "0.1000000000000000055", "1.00000000000000000001", "1.2345e-320"):
        assert written(text) == Decimal(text) and isinstance(written(text), Decimal)
    for text in ("1e400", "-1e400"):
        with pytest.raises(ValueError, match="out of range"):
            written(text)
