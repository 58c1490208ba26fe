"""Hostile requests for generated text, in the form of every protocol: each is refused with its field, none is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from ipc.wire.streams import MOST_LEVELS
from tests.fakes.generation_server import RecordedServer

MIB = 1 << 20
HI = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT, RESPONSES = f"{MESSAGES}/count_tokens", "/v1/responses"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 8},
    COUNT: {"messages": HI},
    RESPONSES: {"input": "hi"},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> RecordedServer:
    """All routes."""
    return RecordedServer(tmp_path_factory.mktemp("hostile"))


@pytest.fixture
def server(running: RecordedServer) -> Iterator[RecordedServer]:
    """All routes, of which none has asked the engine."""
    running.engine.works.clear()
    yield running


def refusal(
    server: RecordedServer, path: str, body: Any, kind: str = "invalid_request_error"
) -> tuple[int, str]:
    """(status, message) of a refusal in the form of its path; nothing was run."""
    # NOTE: the writer of the standard library writes integers of any size.
    response = server.post(path, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert server.engine.works == []
    error = response.json["error"]
    assert error["type"] in (kind, "invalid_request_error")
    assert 0 < len(error["message"]) < 500, "a message is for people: neither empty nor a copy of the input"
    assert "Traceback" not in error["message"]
    return response.status_code, error["message"]


def assert_refused(server: RecordedServer, path: str, body: Any, mention: str) -> None:
    """The body is JSON of a wrong meaning, and the message begins with the name of the field."""
    status, message = refusal(server, path, body)
    assert status == (400 if path.startswith(MESSAGES) else 422), message
    assert message.startswith(mention), message


def nested(levels: int, leaf: str = "1") -> str:
    """JSON of so many objects, one in the other."""
    return '{"a":' * levels + leaf + "}" * levels


def function(path: str, **fields: Any) -> dict[str, Any]:
    """A function in the form of a path; `schema` has its arguments."""
    schema = fields.pop("schema", {"type": "object"})
    if path.startswith(MESSAGES):
        return {"name": "f", "input_schema": schema} | fields
    return {"type": "function", "name": "f", "parameters": schema} | fields


BIASES: list[tuple[Any, str]] = [
    ({"1": 101}, "logit_bias.1"),
    ({"1": -100.5}, "logit_bias.1"),
    ({"1": 1e300}, "logit_bias.1"),
    ({str(key): 1 for key in range(10_000)}, "logit_bias: 10000 given"),
    ({"-1": 1}, "logit_bias"),
    ({"٣": 1}, "logit_bias"),
    ({"1.5": 1}, "logit_bias"),
    ({"9" * MIB: 1}, "logit_bias"),
    ({"4294967296": 1}, "logit_bias"),
    ({"1": None}, "logit_bias"),
    ({"1": "1"}, "logit_bias"),
    ([1], "logit_bias"),
]


@pytest.mark.parametrize(("bias", "mention"), BIASES, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_bias_out_of_range_is_refused(server: RecordedServer, path: str, bias: Any, mention: str) -> None:
    assert_refused(server, path, BASES[path] | {"logit_bias": bias}, mention)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_stop_texts_are_bounded(server: RecordedServer, path: str) -> None:
    field = "stop_sequences" if path == MESSAGES else "stop"
    for stops, mention in (
        ([f"s{number}" for number in range(10_000)], f"{field}: 10000 given, the limit is 64"),
        (["x" * MIB], f"{field}[0]: 1048576 bytes"),
        ([""], f"{field}[0]"),
        ([5], f"{field}[0]"),
        ({"a": "b"}, field),
    ):
        assert_refused(server, path, BASES[path] | {field: stops}, mention)
    many = {"dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 10_000}
    assert_refused(server, path, BASES[path] | many, "dry_sequence_breakers: 10000 given")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT, RESPONSES])
def test_functions_are_bounded_in_number_size_and_depth(server: RecordedServer, path: str) -> None:
    schema = "tools[0].input_schema" if path.startswith(MESSAGES) else "tools[0].parameters"
    deep = orjson.loads(nested(MOST_LEVELS))
    for tools, mention in (
        (
            [function(path, name=f"f{number}") for number in range(1000)],
            "tools: 1000 given, the limit is 128",
        ),
        ([function(path, description="x" * MIB)], "tools: "),
        ([function(path, schema={"enum": ["x" * 1100] * 1000})], "tools: "),
        ([function(path, schema={"a": deep})], f"{schema}: nested over {MOST_LEVELS} levels"),
        ([function(path, schema={"minimum": 1 << 70})], f"{schema}: {1 << 70} is beyond 64 bits"),
        ([function(path, name="x" * MIB)], "tools[0].name"),
        ([function(path, name="f\0")], "tools[0].name"),
        ([function(path, name="ﬀ")], "tools[0].name"),
        ([function(path, description="a\0")], "tools[0].description: holds a NUL"),
        ([function(path, schema={"a\0": 1})], f"{schema}: holds a NUL"),
        ([function(path, schema=[])], schema),
        ([function(path, type={"x": 1})], "tools[0].type"),
        ([function(path, type="x" * MIB)], "tools[0].type"),
        ([None], "tools[0]"),
        ({"f": 1}, "tools"),
    ):
        assert_refused(server, path, BASES[path] | {"tools": tools}, mention)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_recursive_schema_is_passed_on_as_it_is(server: RecordedServer, path: str) -> None:
    schema = {"type": "object", "properties": {"next": {"$ref": "#"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    body = BASES[path] | {"tools": [function(path, schema=schema, strict=True)]}
    assert server.post(path, body).status_code == 200
    used = server.engine.calls[0].tools
    assert used is not None
    assert (used.functions[0]["function"]["parameters"], used.strict) == (schema, ["f"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_choices_of_tools_are_checked_whatever_they_are(server: RecordedServer, path: str) -> None:
    body = BASES[path] | {"tools": [function(path)]}
    huge = orjson.loads(nested(MOST_LEVELS * 4))
    choices: list[Any] = [5, [], huge, {"type": huge}, {"type": "x" * MIB}, {"type": "tool", "name": huge}]
    for choice in choices:
        assert_refused(server, path, body | {"tool_choice": choice}, "tool_choice")
    for named in ({"mode": huge}, {"mode": "auto", "tools": huge}, {"mode": "auto", "tools": [huge]}):
        choice = {"type": "allowed_tools", "allowed_tools": named}
        assert_refused(server, path, body | {"tool_choice": choice}, "tool_choice")


def _texts(path: str, text: str) -> list[tuple[dict[str, Any], str]]:
    """Bodies that have `text` in all places for texts, and the fields of these places."""
    if path == COMPLETIONS:
        return [({"prompt": text}, "prompt"), ({"prompt": ["a", text]}, "prompt[1]")]
    parts: Any = [{"type": "text", "text": text}]
    if path == RESPONSES:
        return _items(text, parts)
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": text}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": parts}]}, "messages[0].content"),
    ]
    if path == CHAT:
        call = {"id": "c", "function": {"name": "f", "arguments": {"a": [text]}}}
        written = {"id": "c", "function": {"name": "f", "arguments": orjson.dumps({"a": text}).decode()}}
        arguments = "messages[0].tool_calls[0].function.arguments"
        return [
            *bodies,
            ({"messages": text}, "messages.content"),
            (
                {"messages": [{"role": "tool", "content": "x", "tool_call_id": text}]},
                "messages[0].tool_call_id",
            ),
            ({"messages": [{"role": "user", "content": "x", "name": text}]}, "messages[0].name"),
            (
                {"messages": [{"role": "assistant", "content": "x", "reasoning_content": text}]},
                "messages[0].reasoning_content",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, arguments),
            ({"messages": [{"role": "assistant", "tool_calls": [written]}]}, arguments),
        ]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [text]}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": text}
    return [
        *bodies,
        ({"messages": HI, "system": text}, "system.content"),
        ({"messages": HI, "system": parts}, "system.content"),
        ({"messages": [{"role": "assistant", "content": [use]}]}, "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [result]}]}, "messages[0].content[0].content"),
    ]


def _items(text: str, parts: Any) -> list[tuple[dict[str, Any], str]]:
    """The same for a request of items."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": [text]}}
    output = {"type": "function_call_output", "call_id": "c", "output": text}
    return [
        ({"input": text}, "input[0].content"),
        ({"input": [{"role": "user", "content": parts}]}, "input[0].content"),
        ({"input": [{"role": "assistant", "content": text}]}, "input[0].content"),
        ({"input": [call]}, "input[0].arguments"),
        ({"input": [call | {"name": text, "arguments": "{}"}]}, "input[0].name"),
        ({"input": [call | {"call_id": text, "arguments": "{}"}]}, "input[0].id"),
        ({"input": [output]}, "input[0].content"),
        ({"input": [output | {"output": parts}]}, "input[0].content"),
        ({"input": [output | {"output": "x", "call_id": text}]}, "input[0].tool_call_id"),
        ({"instructions": text}, "instructions.content"),
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_nul_is_refused_in_every_text(server: RecordedServer, path: str) -> None:
    for body, field in _texts(path, "a\0b"):
        assert_refused(server, path, BASES[path] | body, f"{field}: holds a NUL character")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_texts_are_bounded(server: RecordedServer, path: str) -> None:
    for body, field in _texts(path, "é" * (MIB // 2 + 1)):
        status, message = refusal(server, path, BASES[path] | body)
        assert status in (400, 422)
        assert message.startswith(field) and "limits.max_text_bytes" in message, message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_text_of_just_the_limit_is_taken(server: RecordedServer, path: str) -> None:
    body = BASES[path] | {"messages": [{"role": "user", "content": "x" * MIB}]}
    assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT])
@pytest.mark.parametrize("text", [b"\\ud800", b"\\udfff a", b"\xed\xa0\x80", b"\xff", b"\xc0\xaf", b"\\u12"])
def test_a_text_that_is_no_unicode_is_no_json(server: RecordedServer, path: str, text: bytes) -> None:
    places = {COMPLETIONS: b'{"prompt": "%s"}', RESPONSES: b'{"input": "%s"}'}
    place = places.get(path, b'{"messages": [{"role": "user", "content": "%s"}]}')
    assert refusal(server, path, place % text)[0] == 400


def test_a_lone_surrogate_inside_of_arguments_is_refused(server: RecordedServer) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert_refused(server, CHAT, body, "messages[0].tool_calls[0].function.arguments: is no JSON")


_ANY: list[tuple[str, str]] = [
    (CHAT, '{"messages": [{"role": "user", "content": %s}]}'),
    (CHAT, '{"messages": [{"role": "user", "content": [%s]}]}'),
    (CHAT, '{"messages": [{"role": "assistant", "tool_calls": [%s]}]}'),
    (
        CHAT,
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]}',
    ),
    (CHAT, '{"messages": "a", "response_format": %s}'),
    (CHAT, '{"messages": "a", "response_format": {"type": "json_schema", "schema": %s}}'),
    (CHAT, '{"messages": "a", "grammar": {"type": "llguidance", "value": %s}}'),
    (CHAT, '{"messages": "a", "grammar": {"type": "json_schema", "value": %s}}'),
    (CHAT, '{"messages": "a", "chat_template_kwargs": {"reasoning_effort": %s}}'),
    (CHAT, '{"messages": "a", "web_search_options": %s}'),
    (CHAT, '{"messages": "a", "files": [%s]}'),
    (COMPLETIONS, '{"prompt": [%s]}'),
    (COMPLETIONS, '{"prompt": "a", "response_format": {"type": "json_schema", "schema": %s}}'),
    (MESSAGES, '{"messages": [{"role": "user", "content": %s}]}'),
    (MESSAGES, '{"messages": [{"role": "user", "content": [%s]}]}'),
    (
        MESSAGES,
        '{"messages": [{"role": "assistant", "content": '
        '[{"type": "tool_use", "id": "c", "name": "f", "input": %s}]}]}',
    ),
    (
        MESSAGES,
        '{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": %s}]}]}',
    ),
    (RESPONSES, '{"input": [%s]}'),
    (RESPONSES, '{"input": [{"role": "user", "content": [%s]}]}'),
    (RESPONSES, '{"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": %s}]}'),
    (RESPONSES, '{"input": [{"type": "function_call_output", "call_id": "c", "output": %s}]}'),
    (RESPONSES, '{"input": "a", "metadata": %s}'),
    (RESPONSES, '{"input": "a", "text": {"format": %s}}'),
    (RESPONSES, '{"input": "a", "tools": [%s]}'),
    (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "system": [%s]}'),
    (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "thinking": %s}'),
    (MESSAGES, '{"messages": [{"role": "user", "content": "a"}], "output_config": {"format": %s}}'),
]


@pytest.mark.parametrize(("path", "body"), _ANY)
@pytest.mark.parametrize("levels", [MOST_LEVELS * 2, 900, 100_000])
def test_deep_nesting_is_refused_everywhere(
    server: RecordedServer, path: str, body: str, levels: int
) -> None:
    status, _ = refusal(server, path, (body % nested(levels)).encode())
    assert status in (400, 422)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_unknown_fields_may_be_anything_that_is_json(server: RecordedServer, path: str) -> None:
    unknown = {"later": [{"a": ["\0", 1e300, None]}] * 1000, "m" * MIB: "x" * MIB}
    assert server.post(path, BASES[path] | unknown).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "mention"),
    [
        (CHAT, {"messages": [{"role": "x" * MIB, "content": "a"}]}, "messages[0].role"),
        (MESSAGES, {"messages": [{"role": "x" * MIB, "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": HI, "reasoning_effort": "x" * MIB}, "reasoning_effort"),
        (CHAT, {"messages": HI, "agent_permission": "x" * MIB}, "agent_permission"),
        (CHAT, {"messages": HI, "response_format": {"type": "x" * MIB}}, "response_format.type"),
        (CHAT, {"messages": HI, "grammar": {"type": "regex", "value": "x" * MIB}}, "grammar.value"),
        (MESSAGES, {"messages": HI, "thinking": {"type": "x" * MIB}}, "thinking.type"),
        (CHAT, {"messages": HI, "max_tokens": -(10**500)}, "max_tokens"),
        (CHAT, {"messages": HI, "n": 10**500}, "n"),
        (CHAT, {"messages": HI, "top_logprobs": 10**500, "logprobs": True}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 10**500}, "logprobs"),
        (COMPLETIONS, {"prompt": [[1] * 300_000]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": "a", "best_of": 10**500}, "best_of"),
        (CHAT, {"messages": [HI[0]] * 10_001}, "messages: more than 10000"),
        (MESSAGES, {"messages": [HI[0]] * 10_001}, "messages: more than 10000"),
        (RESPONSES, {"input": HI * 10_001}, "input: more than 10000"),
        (RESPONSES, {"input": [{"type": "x" * MIB}]}, "input[0].type"),
        (RESPONSES, {"input": "a", "truncation": "x" * MIB}, "truncation"),
        (RESPONSES, {"input": "a", "max_output_tokens": -(10**500)}, "max_output_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_values_are_refused_and_not_repeated(
    server: RecordedServer, path: str, body: Any, mention: str
) -> None:
    assert_refused(server, path, body, mention)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_an_unknown_model_of_a_megabyte_is_not_found(server: RecordedServer, path: str) -> None:
    response = server.post(path, BASES[path] | {"model": "x" * MIB})
    assert (response.status_code, server.engine.works) == (404, [])
    assert len(response.json["error"]["message"]) < 500


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_a_body_of_too_many_values_is_refused_unbuilt(server: RecordedServer, path: str) -> None:
    body = orjson.dumps(BASES[path] | {"x": [{}] * 700_000})
    status, message = refusal(server, path, body)
    assert status in (400, 422) and "limits.max_items" in message


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_body_over_fifty_mebibytes_is_refused(server: RecordedServer, path: str) -> None:
    status, message = refusal(server, path, b" " * (50 * MIB + 1), "request_too_large")
    assert (status, message) == (413, "request body too large")
