"""The routes of Responses over an engine that tells recorded events: what is asked, and every answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.engine.events import Called, Finished, Started, Text
from frontend.protocols.responses.requests import Names
from ipc.errors import InferenceFailed, InputTooLong, InvalidInput, QueueFull, WorkerLost
from tests.fakes.generation_server import ENDED, SCRIPT, RecordedServer

_FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
_NAMESPACE = {"type": "namespace", "name": "crm", "tools": [_FUNCTION]}


class Server(RecordedServer):
    """Asks for responses."""

    def ask(self, **fields: Any) -> Any:
        """The answer to a small request with further fields."""
        return self.post("/v1/responses", {"input": "hi"} | fields)

    def get(self, path: str) -> Any:
        """The answer to a GET below the responses."""
        return self.client.simulate_get(f"/v1/responses/{path}")

    def cancel(self, id_: str) -> Any:
        """The answer to a request to cancel."""
        return self.client.simulate_post(f"/v1/responses/{id_}/cancel")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path)


def _events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of each event; their numbers rise from 0 without gaps."""
    assert text.endswith("\n\ndata: [DONE]\n\n")
    told = []
    for event in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    assert all(name == data["type"] for name, data in told)
    return told


def test_a_request_is_answered_whole_and_stored(server: Server) -> None:
    fields = {"model": "default", "instructions": "be kind", "max_output_tokens": 3, "temperature": 0.5}
    response = server.ask(**fields, metadata={"a": "b"}, truncation="auto", session_id="s")
    assert response.status_code == 200
    answer = response.json
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    assert (answer["status"], answer["output_text"], answer["model"]) == ("completed", "Hello you", "default")
    assert answer["usage"]["total_tokens"] == 6
    assert {name: answer[name] for name in fields} == fields
    assert (answer["metadata"], answer["truncation"], answer["session_id"]) == ({"a": "b"}, "auto", "s")
    assert (answer["tools"], answer["tool_choice"], answer["parallel_tool_calls"]) == ([], "auto", True)
    assert None not in answer.values()
    [call] = server.engine.calls
    assert call.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert (call.ending.max_tokens, call.sampling.temperature, call.truncate) == (3, 0.5, True)
    assert server.get(answer["id"]).json == answer
    assert server.engine.ended == 1


def test_a_request_is_answered_by_a_stream_and_stored(server: Server) -> None:
    response = server.ask(stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    events = _events(response.text)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    whole = events[-1][1]["response"]
    assert events[0][1]["response"] | {"status": "in_progress"} == events[1][1]["response"]
    assert server.get(whole["id"]).json == whole
    assert server.engine.ended == 1


def test_a_response_may_say_that_it_is_not_kept(server: Server) -> None:
    for streams in (False, True):
        response = server.ask(store=False, stream=streams)
        id_ = _events(response.text)[-1][1]["response"]["id"] if streams else response.json["id"]
        found = server.get(id_)
        assert (found.status_code, found.json["error"]["type"]) == (404, "invalid_request_error")
        assert id_ in found.json["message"]


def test_a_conversation_goes_on_with_what_was_said_and_without_its_instructions(server: Server) -> None:
    first = server.ask(instructions="be kind", input=[{"role": "user", "content": "one"}]).json
    call = [[Started(4), *Called(0, 0, "call-1", "crm.f", '{"a":1}').events(), Finished(0, "stop"), ENDED]]
    server.script(call, SCRIPT)
    second = server.ask(input="two", previous_response_id=first["id"], tools=[_NAMESPACE]).json
    assert second["previous_response_id"] == first["id"]
    assert second["output"][0] | {"id": ""} == {
        "type": "function_call",
        "id": "",
        "call_id": "call-1",
        "name": "f",
        "namespace": "crm",
        "arguments": '{"a":1}',
        "status": "completed",
    }
    result = {"type": "function_call_output", "call_id": "call-1", "output": "3"}
    server.ask(input=[result], previous_response_id=second["id"], instructions="be brief")
    assert server.engine.calls[-1].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello you"},
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "crm.f", "arguments": {"a": 1}},
                }
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call-1", "name": "crm.f"},
    ]
    unknown = server.ask(previous_response_id="resp_none")
    assert (unknown.status_code, unknown.json["error"]["type"]) == (404, "invalid_request_error")


def test_a_deleted_response_is_gone(server: Server) -> None:
    id_ = server.ask().json["id"]
    deleted = server.client.simulate_delete(f"/v1/responses/{id_}")
    assert deleted.json == {"id": id_, "object": "response.deleted", "deleted": True}
    assert server.client.simulate_delete(f"/v1/responses/{id_}").status_code == 404
    assert server.get(id_).status_code == server.get(f"{id_}/input_items").status_code == 404
    assert server.ask(previous_response_id=id_).status_code == 404


def test_what_has_ended_cannot_be_cancelled_or_followed(server: Server) -> None:
    id_ = server.ask().json["id"]
    assert server.cancel(id_).status_code == server.cancel("resp_none").status_code == 404
    assert server.get(id_).json["status"] == "completed"
    followed = server.get(f"{id_}?stream=true")
    assert (followed.status_code, followed.json["error"]["param"]) == (422, "stream")


def test_input_items_are_listed_by_pages(server: Server) -> None:
    given = [{"role": "user", "content": str(index)} for index in range(5)]
    given.append({"type": "item_reference", "id": "msg_x"})
    given.append({"type": "function_call_output", "call_id": "c", "output": "x", "id": "mine"})
    id_ = server.ask(input=given).json["id"]
    page = server.get(f"{id_}/input_items?order=asc&limit=2").json
    assert (page["object"], page["has_more"]) == ("list", True)
    assert [item["content"] for item in page["data"]] == [
        [{"type": "input_text", "text": "0"}],
        [{"type": "input_text", "text": "1"}],
    ]
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][1]["id"])
    rest = server.get(f"{id_}/input_items?order=asc&after={page['last_id']}").json
    assert [item["id"] for item in rest["data"]][-1] == "mine"
    assert (len(rest["data"]), rest["has_more"]) == (4, False)
    newest = server.get(f"{id_}/input_items").json
    assert newest["data"][0]["id"] == "mine" and len(newest["data"]) == 6
    behind = server.get(f"{id_}/input_items?order=asc&after=mine").json
    assert behind == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


def test_input_items_with_one_id_are_told_apart(server: Server) -> None:
    given = [{"type": None, "role": "user", "content": str(index), "id": "mine"} for index in range(3)]
    id_ = server.ask(input=given).json["id"]
    ids = [item["id"] for item in server.get(f"{id_}/input_items?order=asc").json["data"]]
    assert (ids[0], len(set(ids))) == ("mine", 3)
    page = server.get(f"{id_}/input_items?order=asc&limit=1&after={ids[1]}").json
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[2]], False)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=1.5", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=nobody", "after"),
        ("?stream=maybe", "stream"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=" + "9" * 30, "starting_after"),
    ],
)
def test_bad_queries_name_their_field(server: Server, query: str, field: str) -> None:
    response = server.get(server.ask().json["id"] + query)
    assert (response.status_code, response.json["error"]["param"]) == (422, field)


def test_a_stream_that_cannot_begin_has_a_status_of_its_own(server: Server) -> None:
    server.script(InputTooLong("the prompt has 70 tokens, the limit is 64"))
    response = server.ask(stream=True)
    assert (response.status_code, response.json["error"]["code"]) == (422, "context_length_exceeded")
    server.script(QueueFull("no room", retry_after_s=2))
    response = server.ask(stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize("error", [WorkerLost("the worker died"), InferenceFailed("not finite")])
def test_a_model_that_fails_ends_a_stream_with_a_failed_response_which_is_stored(
    server: Server, error: Any
) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], error])
    events = _events(server.ask(stream=True).text)
    assert [name.removeprefix("response.") for name, _ in events[-5:]] == [
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "failed")
    ]
    whole = events[-1][1]["response"]
    assert whole["error"] == {"type": "model_error", "code": "server_error", "message": error.message}
    assert (whole["status"], whole["output_text"]) == ("failed", "Hel")
    assert server.get(whole["id"]).json == whole


def test_a_fault_of_the_request_ends_a_stream_with_an_error_event(server: Server) -> None:
    server.script([[Started(4)], InvalidInput("grammar.value: no rule")])
    events = _events(server.ask(stream=True).text)
    assert [name for name, _ in events[1:]] == ["response.in_progress", "error"]
    assert events[-1][1] == {
        "type": "error",
        "sequence_number": 2,
        "error": {"type": "validation_error", "message": "grammar.value: no rule"},
        "message": "grammar.value: no rule",
        "code": None,
        "param": None,
    }
    stored = server.get(events[0][1]["response"]["id"]).json
    assert (stored["status"], stored["error"]["type"]) == ("failed", "validation_error")


def test_a_model_that_fails_tells_the_response_so_far(server: Server) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("not finite")])
    response = server.ask()
    assert (response.status_code, response.json["error"]["type"]) == (500, "server_error")
    partial = response.json["partial_response"]
    assert (partial["object"], partial["status"], partial["output_text"]) == ("response", "failed", "Hel")
    server.script(InferenceFailed("not finite"))
    assert "partial_response" not in server.ask().json


def test_items_become_messages(server: Server) -> None:
    response = server.ask(
        input=[
            {"role": "developer", "content": "rules"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": None, "text": "b"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "d"}]},
            {"type": "item_reference", "id": "msg_1"},
            {"role": "assistant", "content": "e"},
        ]
    )
    assert response.status_code == 200
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    assert server.engine.calls[0].messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c", "tool_calls": calls},
        {"role": "tool", "content": "d", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "e"},
    ]


@pytest.mark.parametrize("before", ["So: ", None])
def test_text_behind_a_call_is_of_the_turn_of_the_call(before: str | None, server: Server) -> None:
    said = [] if before is None else [{"role": "assistant", "content": before}]
    response = server.ask(
        input=[
            {"role": "user", "content": "a"},
            *said,
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"role": "assistant", "content": "That is it."},
            {"type": "function_call_output", "call_id": "1", "output": "b"},
        ]
    )
    assert response.status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert server.engine.calls[0].messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"{before or ''}That is it.", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1", "name": "f"},
    ]


def _message(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


_BAD: list[tuple[Any, int, str | None]] = [
    (b"{", 400, None),
    (b"", 400, None),
    (b'{"input": "\\ud800"}', 400, None),
    (b"[]", 422, "body"),
    ({}, 422, "input"),
    ({"input": 1}, 422, "input"),
    ({"input": []}, 422, "input"),
    ({"input": "a\0"}, 422, "input[0].content"),
    ({"input": [1]}, 422, "input[0]"),
    ({"input": [{"type": "reasoning", "summary": json.loads("[" * 99 + "]" * 99)}]}, 422, "input[0]"),
    ({"tools": [_NAMESPACE | {"name": f"n{k}", "tools": [_FUNCTION] * 100} for k in range(2)]}, 422, "tools"),
    ({"tools": [_NAMESPACE | {"tools": [_FUNCTION] * 129}]}, 422, "tools[0].tools"),
    (b'{"input": [{"type": "reasoning", "x": 1%s}]}' % (b"0" * 40), 422, "input[0]"),
    (b'{"input": "hi", "metadata": {"x": 1%s}}' % (b"0" * 40), 422, "metadata"),
    ({"metadata": {"a": json.loads("[" * 99 + "]" * 99)}}, 422, "metadata"),
    ({"text": {"a": json.loads("[" * 99 + "]" * 99)}}, 422, "text"),
    ({"tool_choice": json.loads("[" * 99 + "]" * 99)}, 422, "tool_choice"),
    ({"tools": json.loads("[" * 99 + "]" * 99)}, 422, "tools[0]"),
    ({"input": [{}]}, 422, "input[0].type"),
    ({"input": [{"type": 1}]}, 422, "input[0].type"),
    ({"input": [{"type": "local_shell_call"}]}, 422, "input[0].type"),
    ({"input": [{"type": "shell_call"}]}, 422, "input[0].call_id"),
    ({"input": [{"type": "shell_call_output", "call_id": "1"}]}, 422, "input[0].output"),
    ({"input": [{"type": "shell_call", "call_id": "1"}]}, 422, "input[0].action.commands"),
    ({"input": [{"type": "code_interpreter_call"}]}, 422, "input[0].code"),
    ({"input": [{"type": "message", "content": "x"}]}, 422, "input[0].role"),
    ({"input": [{"role": "king", "content": "x"}]}, 422, "input[0].role"),
    ({"input": [{"role": "user"}]}, 422, "input[0].content"),
    ({"input": [{"role": "assistant", "content": None}]}, 422, "input[0].content"),
    (_message({"type": "input_image", "image_url": "data:x"}), 422, "input[0].content[0].image_url"),
    (_message({"type": "input_file", "file_id": "x"}), 422, "input[0].content[0].type"),
    (_message({"type": "input_text"}), 422, "input[0].content[0].text"),
    (_message({"type": "smell"}), 422, "input[0].content[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 422, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, 422, "input[0].name"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
        422,
        "input[0].arguments",
    ),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, 422, "input[0].output"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, 422, "input[0].call_id"),
    ({"instructions": 1}, 422, "instructions"),
    ({"instructions": "a\0"}, 422, "instructions.content"),
    ({"max_output_tokens": 0}, 422, "max_output_tokens"),
    ({"max_tokens": 0}, 422, "max_tokens"),
    ({"max_output_tokens": 1, "max_tokens": 1}, 422, "max_tokens"),
    ({"max_tool_calls": 3}, 422, "max_tool_calls"),
    ({"max_tool_calls": 0}, 422, "max_tool_calls"),
    ({"conversation": "conv_1"}, 422, "conversation"),
    ({"conversation": {"id": "conv_1"}}, 422, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, 422, "prompt"),
    ({"metadata": []}, 422, "metadata"),
    ({"truncation": "middle"}, 422, "truncation"),
    ({"reasoning": {"effort": "huge"}}, 422, "reasoning.effort"),
    ({"reasoning": "low"}, 422, "reasoning"),
    ({"text": {"format": {"type": "xml"}}}, 422, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": 1}}}, 422, "text.format.schema"),
    ({"text": {"format": {"type": "text"}}, "grammar": {"type": "regex", "value": "a"}}, 422, "grammar"),
    ({"response_format": {"type": "xml"}}, 422, "response_format.type"),
    ({"top_logprobs": 21}, 422, "top_logprobs"),
    ({"n": 0}, 422, "n"),
    ({"tools": [{"type": "shell"}]}, 422, "tools[0].type"),
    ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, 422, "tools[0].type"),
    ({"tools": [_FUNCTION, {"type": "web_search"}]}, 422, "tools[1].type"),
    ({"tools": [{"type": "function", "name": f"f{k}"} for k in range(1000)]}, 422, "tools"),
    ({"tools": [{"type": "namespace", "name": "x", "tools": 1}]}, 422, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "tools": []}]}, 422, "tools[0].name"),
    ({"tools": [_NAMESPACE | {"tools": [{"type": "shell"}]}]}, 422, "tools[0].tools[0].type"),
    ({"tools": [_NAMESPACE | {"tools": [{"type": "function"}]}]}, 422, "tools[0].tools[0].name"),
    ({"tools": [1]}, 422, "tools[0]"),
    ({"tool_choice": "required"}, 422, "tool_choice"),
    ({"tools": [_FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, 422, "tool_choice.name"),
    ({"tools": [_FUNCTION], "tool_choice": {"type": "shell"}}, 422, "tool_choice.type"),
    ({"agent_permission": "ask"}, 422, "agent_permission"),
    ({"agent_permission": "ask", "stream": True, "background": True}, 422, "agent_permission"),
    ({"files": [{"name": "a.txt"}]}, 422, "files"),
    ({"max_tool_rounds": 3}, 422, "max_tool_rounds"),
    ({"background": True, "store": False}, 422, "store"),
    ({"previous_response_id": 1}, 422, "previous_response_id"),
    ({"model": 1}, 422, "model"),
]


@pytest.mark.parametrize(("body", "status", "field"), _BAD)
def test_bad_input_is_refused_with_its_field(
    server: Server, body: Any, status: int, field: str | None
) -> None:
    if isinstance(body, dict) and body and "input" not in body:
        body = {"input": "hi"} | body
    response = server.post("/v1/responses", body)
    assert (response.status_code, response.json["error"]["param"]) == (status, field), response.text
    assert response.json["message"] == response.json["error"]["message"]
    assert server.engine.works == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1, "top_p": 2, "min_p": -3, "top_k": -1, "max_output_tokens": 1 << 40},
        {
            "user": 5,
            "service_tier": [],
            "prompt_cache_key": "x",
            "safety_identifier": 1,
            "conversation": None,
        },
        {"include": ["message.output_text.logprobs"], "stream_options": {"include_obfuscation": False}},
        {
            "enable_thinking": False,
            "reasoning_effort": "huge",
            "truncate_sequence": 3,
            "web_search_options": {},
        },
        {"session_id": "s", "max_tool_rounds": 0, "agent_permission": "auto", "files": []},
        {"tools": None, "tool_choice": None, "text": None, "reasoning": None, "max_tool_calls": None},
        {"reasoning": {"effort": " None ", "summary": "auto"}, "text": {"verbosity": "low"}},
    ],
)
def test_odd_values_and_unknown_fields_are_accepted(server: Server, fields: dict[str, Any]) -> None:
    assert server.ask(**fields).status_code == 200


def test_fields_reach_the_model(server: Server) -> None:
    response = server.ask(
        tools=[
            _FUNCTION | {"strict": True},
            _NAMESPACE,
            {"type": "web_search", "external_web_access": False},
        ],
        tool_choice={"type": "function", "name": "crm.f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        response_format={"type": "json_object"},
        reasoning={"effort": "high"},
        top_logprobs=3,
        n=2,
        stop=["x"],
        seed=7,
        logit_bias={"5": 1},
    )
    assert response.status_code == 200
    [call] = server.engine.calls
    assert call.tools is not None and call.grammar is not None
    assert [each["function"]["name"] for each in call.tools.functions] == ["f", "crm.f"]
    assert (call.tools.choice, call.tools.name, call.tools.strict) == ("named", "crm.f", ["f"])
    assert (call.tools.parallel, call.n, call.sampling.seed) == (False, 2, 7)
    assert (call.grammar.kind, call.grammar.value) == ("json_schema", '{"type":"object"}')
    assert call.variables["enable_thinking"] is True and call.variables["reasoning_effort"] == "high"
    assert (call.sampling.logprobs, call.ending.stop, call.sampling.logit_bias) == (3, ["x"], {5: 1.0})
    assert len(response.json["tools"]) == 3
    server.ask(top_logprobs=3, logprobs=False)
    server.ask(logprobs=True)
    assert [call.sampling.logprobs for call in server.engine.calls[1:]] == [None, 1]


def test_a_coding_agent_that_keeps_its_own_history_is_served(server: Server) -> None:
    """The form of requests of Codex: everything in the body, nothing stored, items as they were streamed."""
    server.script(
        [
            [
                Started(4),
                *Called(0, 0, "call-1", "exec", '{"cmd":["ls"]}').events(),
                Finished(0, "stop"),
                ENDED,
            ]
        ],
        SCRIPT,
    )
    asked: dict[str, Any] = {
        "model": "tiny/chat",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
        ],
        "tools": [
            {"type": "function", "name": "exec", "description": "", "strict": False, "parameters": {}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "3f6d",
        "text": {"verbosity": "low"},
        "client_metadata": {"origin": "cli"},
    }
    events = _events(server.post("/v1/responses", asked).text)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [(item["type"], item["name"], item["call_id"]) for item in done] == [
        ("function_call", "exec", "call-1")
    ]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None}
    result = {"type": "function_call_output", "call_id": "call-1", "output": "a.py"}
    events = _events(
        server.post("/v1/responses", asked | {"input": [*asked["input"], thought, *done, result]}).text
    )
    assert events[-1][1]["response"]["usage"]["total_tokens"] == 6
    messages = server.engine.calls[-1].messages or []
    assert messages[0] == {"role": "system", "content": "You are a coding agent.\n\nrules"}
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]


def test_names_of_functions_are_taken_apart_as_they_were_put_together() -> None:
    names = Names([_FUNCTION, {"type": "namespace", "name": "a.b", "tools": [_FUNCTION]}])
    assert names.fields("f") == {"name": "f"}
    assert names.fields("a.b.f") == {"name": "f", "namespace": "a.b"}
    assert names.fields("a.b.g") == {"name": "a.b.g"}


def test_unknown_models_wrong_methods_and_wrong_types_are_refused(server: Server) -> None:
    for fields in ({}, {"stream": True}, {"background": True}):
        response = server.ask(model="gpt-4", **fields)
        assert (response.status_code, response.json["error"]["code"]) == (404, "model_not_found")
        assert server.ask(model="org/dense", **fields).status_code == 422
    response = server.client.simulate_get("/v1/responses")
    assert (response.status_code, response.headers["allow"]) == (405, "POST, OPTIONS")
    response = server.client.simulate_post(
        "/v1/responses", body=b"{}", headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 415


def test_a_store_that_cannot_be_reached_costs_no_answer(server: Server, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    response = server.ask()
    assert (response.status_code, response.json["output_text"]) == (200, "Hello you")
    assert _events(server.ask(stream=True).text)[-1][0] == "response.completed"
    for refused in (server.get(response.json["id"]), server.ask(background=True)):
        assert (refused.status_code, refused.json["error"]["type"]) == (503, "server_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert str(tmp_path) not in refused.text


@pytest.mark.parametrize("name", ["compact", "input_tokens"])
def test_routes_of_openai_that_are_not_served_are_not_found(server: Server, name: str) -> None:
    response = server.post(f"/v1/responses/{name}", {"input": "hi"})
    assert response.status_code == 404
    assert response.json["error"]["message"] == "there is nothing at this path"
