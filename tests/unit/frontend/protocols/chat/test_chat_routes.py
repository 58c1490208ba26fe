"""The routes of chat and completions over an engine that tells recorded events: what is asked, and every answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from frontend.engine.events import Called, Ended, Event, Finished, Prompted, Started, Text
from frontend.scope import plain_scope
from frontend.sending import COMMENT, EventStream
from ipc import deadline
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InputTooLong,
    InvalidInput,
    ModelLoadFailed,
    NoReplica,
    PenstockError,
    QueueFull,
    WorkerLost,
)
from ipc.wire.messages import ModelStatus
from ipc.wire.streams import PromptToken, TokenLogprob
from tests.fakes.generation import Step
from tests.fakes.generation_server import ENDED, SCRIPT, RecordedServer

_ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


class Server(RecordedServer):
    """Asks for answers of chat."""

    def chat(self, **fields: Any) -> Any:
        """The response to a small conversation with further fields."""
        return self.post("/v1/chat/completions", _ASK | fields)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path)


def _events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    events = text.split("\n\n")[:-2]
    assert all(event.startswith("data: ") for event in events)
    return [orjson.loads(event[6:]) for event in events]


def test_a_conversation_is_answered_whole(server: Server) -> None:
    response = server.chat(model="default", max_tokens=3, stop=["x"], seed=7, n=1)
    assert response.status_code == 200
    assert response.json["model"] == "tiny/chat"
    assert response.json["choices"][0]["message"]["content"] == "Hello you"
    assert response.json["usage"]["total_tokens"] == 6
    [call] = server.engine.calls
    assert call.messages == [{"role": "user", "content": "hi"}]
    assert (call.ending.max_tokens, call.ending.stop, call.sampling.seed) == (3, ["x"], 7)
    assert server.engine.ended == 1


_BEGUN = {"role": "assistant", "content": "It is"}
_CALLING = {"role": "assistant", "content": "Wait", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"add_generation_prompt": None}])
def test_the_last_message_is_continued_where_the_request_asks_for_this(
    server: Server, fields: dict[str, Any]
) -> None:
    asked = {"messages": [*_ASK["messages"], _BEGUN]}
    assert server.post("/v1/chat/completions", asked | fields).status_code == 200
    assert server.chat(**asked, continue_final_message=True, **fields).status_code == 200
    plain, continuing = (call.variables for call in server.engine.calls)
    assert plain == ({"add_generation_prompt": False} if fields.get("add_generation_prompt") is False else {})
    assert continuing == {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("last", "fields", "param"),
    [
        (_BEGUN, {"add_generation_prompt": True}, "continue_final_message"),
        (_ASK["messages"][0], {}, "messages[1]"),
        ({"role": "system", "content": "a"}, {}, "messages[1]"),
        ({"role": "tool", "content": "a", "tool_call_id": "c"}, {}, "messages[1]"),
        (_CALLING, {}, "messages[1]"),
        (_CALLING | {"content": None}, {}, "messages[1]"),
        (_BEGUN, {"continue_final_message": "so"}, "continue_final_message"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    server: Server, last: Any, fields: dict[str, Any], param: str
) -> None:
    asked = {"messages": [*_ASK["messages"], last], "continue_final_message": True}
    response = server.chat(**asked | fields)
    assert response.status_code == 422 and response.json["error"]["param"] == param


def test_a_conversation_is_answered_by_a_stream(server: Server) -> None:
    response = server.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-request-id"].startswith("req_")
    chunks = _events(response.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello you"
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert server.engine.ended == 1


def test_a_stream_that_cannot_begin_has_a_status_of_its_own(server: Server) -> None:
    server.script(InputTooLong("the prompt has 70 tokens, the limit is 64"))
    response = server.chat(stream=True)
    assert response.status_code == 422
    assert response.json["error"]["code"] == "context_length_exceeded"
    server.script(InvalidInput("response_format: no such type", param="response_format"))
    assert server.chat(stream=True).json["error"]["param"] == "response_format"
    server.script(QueueFull("no room", retry_after_s=2))
    response = server.chat(stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize("error", [WorkerLost("the worker died"), InferenceFailed("not finite")])
def test_a_stream_that_fails_ends_with_one_error_and_done(server: Server, error: Any) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], error])
    *chunks, last = _events(server.chat(stream=True).text)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["Hel"]
    inner = {"message": error.message, "type": "server_error", "param": None, "code": None}
    assert last == {"error": inner}


def test_a_model_that_fails_tells_the_answer_so_far(server: Server) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("not finite")])
    response = server.chat()
    assert response.status_code == 500
    partial = response.json["partial_response"]
    assert partial["choices"][0]["message"]["content"] == "Hel"
    assert partial["object"] == "chat.completion"
    server.script(InferenceFailed("not finite"))
    assert "partial_response" not in server.chat().json


def test_a_call_reaches_the_client_with_its_arguments(server: Server) -> None:
    server.script(
        [[Started(4), *Called(0, 0, "call-1", "f", '{"a":1}').events(), Finished(0, "tool_calls"), ENDED]]
    )
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    response = server.chat(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert response.json["choices"][0]["finish_reason"] == "tool_calls"
    used = server.engine.calls[0].tools
    assert used is not None
    assert (used.choice, used.strict, used.parallel) == ("required", ["f"], False)


def test_the_choice_of_none_reaches_the_model_without_functions(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert server.chat(tools=tools, tool_choice="none").status_code == 200
    answer = server.post("/v1/responses", {"input": "hi", "tools": tools, "tool_choice": "none"})
    assert (answer.status_code, answer.json["tool_choice"], answer.json["tools"]) == (200, "none", tools)
    assert [call.tools for call in server.engine.calls] == [None, None]


_TWICE = {"id": "c", "function": {"name": "f", "arguments": "{}", "parameters": {}}}
_BAD_CHAT: list[tuple[Any, int, str | None]] = [
    (b"{", 400, None),
    (b"", 400, None),
    (b"[]", 422, "body"),
    ({}, 422, "messages"),
    ({"messages": []}, 422, "messages"),
    ({"messages": 1}, 422, "messages"),
    ({"messages": [{"content": "x"}]}, 422, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, 422, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 422, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        422,
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, 422, "messages[0].content"),
    (b'{"messages": "\\ud800"}', 400, None),
    (_ASK | {"max_tokens": 0}, 422, "max_tokens"),
    (_ASK | {"max_completion_tokens": 0}, 422, "max_completion_tokens"),
    (_ASK | {"max_tokens": 1, "max_completion_tokens": 1}, 422, "max_completion_tokens"),
    (_ASK | {"max_tokens": 1.5}, 422, "max_tokens"),
    (_ASK | {"temperature": "hot"}, 422, "temperature"),
    (_ASK | {"n": 0}, 422, "n"),
    (_ASK | {"n": 1000}, 422, "n"),
    (_ASK | {"stop": ["x"] * 10_000}, 422, "stop"),
    (_ASK | {"logit_bias": {"x": 1}}, 422, "logit_bias"),
    (_ASK | {"logprobs": True, "top_logprobs": 21}, 422, "top_logprobs"),
    (_ASK | {"response_format": {"type": "xml"}}, 422, "response_format.type"),
    (
        _ASK | {"response_format": {"type": "text"}, "grammar": {"type": "regex", "value": "a"}},
        422,
        "grammar",
    ),
    (_ASK | {"tools": [{"type": "shell"}]}, 422, "tools[0].type"),
    (_ASK | {"tools": [{"type": "function", "name": f"f{k}"} for k in range(1000)]}, 422, "tools"),
    (_ASK | {"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, 422, "tools[0].strict"),
    (
        _ASK | {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        422,
        "tools[0].function.strict",
    ),
    (_ASK | {"tool_choice": "required"}, 422, "tool_choice"),
    (
        _ASK | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        422,
        "tool_choice.function.name",
    ),
    (_ASK | {"reasoning_effort": "huge"}, 422, "reasoning_effort"),
    (_ASK | {"reasoning_effort": "low", "enable_thinking": False}, 422, "reasoning_effort"),
    (_ASK | {"web_search_options": {}}, 422, "web_search_options"),
    (_ASK | {"modalities": ["text", "audio"]}, 422, "modalities"),
    (_ASK | {"audio": {"voice": "alloy", "format": "wav"}}, 422, "audio"),
    (_ASK | {"functions": [{"name": "f"}]}, 422, "functions"),
    (_ASK | {"function_call": "auto"}, 422, "function_call"),
    (_ASK | {"agent_permission": "ask"}, 422, "agent_permission"),
    (_ASK | {"files": [{"name": "a.txt"}]}, 422, "files"),
    (_ASK | {"max_tool_rounds": 3}, 422, "max_tool_rounds"),
    (_ASK | {"model": 1}, 422, "model"),
    (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
        422,
        "messages[0].reasoning",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [_TWICE]}]},
        422,
        "messages[0].tool_calls[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("body", "status", "field"), _BAD_CHAT)
def test_bad_input_is_refused_with_its_field(
    server: Server, body: Any, status: int, field: str | None
) -> None:
    response = server.post("/v1/chat/completions", body)
    assert (response.status_code, response.json["error"]["param"]) == (status, field)
    assert response.json["message"] == response.json["error"]["message"]
    assert response.json["error"]["type"] == "invalid_request_error"
    assert server.engine.works == []


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1, "top_p": 2, "min_p": -3, "top_k": -1},
        {
            "user": 5,
            "metadata": {"a": 1},
            "service_tier": [],
            "store": True,
            "prediction": {},
            "verbosity": "low",
        },
        {"session_id": "s", "max_tool_rounds": 0, "agent_permission": "auto", "files": []},
        {"chat_template_kwargs": {"enable_thinking": False, "other": 1}},
        {
            "messages": [
                {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "a"},
                {"role": "user", "content": "hi"},
            ]
        },
        {"stop": None, "tools": None, "tool_choice": None, "response_format": None, "stream_options": None},
    ],
)
def test_odd_values_and_unknown_fields_are_accepted(server: Server, fields: dict[str, Any]) -> None:
    assert server.chat(**fields).status_code == 200


def test_a_wrong_content_type_is_refused(server: Server) -> None:
    response = server.client.simulate_post(
        "/v1/chat/completions", body=b"{}", headers={"Content-Type": "text/plain"}
    )
    assert response.status_code == 415
    assert "text/plain" in response.json["message"]


def test_an_unknown_model_is_answered_with_those_that_exist(server: Server) -> None:
    response = server.chat(model="gpt-4")
    assert (response.status_code, response.json["error"]["code"]) == (404, "model_not_found")
    assert "tiny/chat" in response.json["message"] and "default" in response.json["message"]
    assert server.chat(model="org/dense").status_code == 422


def test_what_a_worker_finds_wrong_is_422(server: Server) -> None:
    server.script(InvalidInput("grammar.value: line 1, column 3: expected a rule"))
    response = server.chat(grammar={"type": "lark", "value": "x"})
    assert (response.status_code, response.json["error"]["type"]) == (422, "invalid_request_error")


def test_a_prompt_is_completed(server: Server) -> None:
    response = server.post("/v1/completions", {"prompt": "Say", "max_tokens": 5, "echo": True, "suffix": "!"})
    assert response.status_code == 200
    assert (response.json["object"], response.json["choices"][0]["text"]) == (
        "text_completion",
        "SayHello you",
    )
    [call] = server.engine.calls
    assert (call.text, call.ids, call.splits) == ("Say", None, False)


_PIECES: list[Event] = [
    Prompted(0, "Sa", [PromptToken(1, b"<s>", 0), PromptToken(2, b"Sa", 0, -0.5, [(2, b"Sa", -0.5)])]),
    Prompted(0, "y", [PromptToken(3, b"y", 2, -4.0, [(4, b"!", -0.25)])], 2, 2),
]


def _scored(*texts: str) -> list[Step]:
    """What an engine tells for a prompt with log probabilities, and one token for each choice."""
    logprobs = [TokenLogprob(5, b"x", -1.0, [(5, b"x", -1.0)])]
    choices: list[Event] = [Text(at, text, logprobs=logprobs) for at, text in enumerate(texts)]
    ends: list[Event] = [Finished(at, "length", tokens=1) for at in range(len(texts))]
    return [[Started(3)], [_PIECES[0]], [_PIECES[1]], choices, [*ends, Ended(3, len(texts))]]


_COLUMNS = {
    "tokens": ["<s>", "Sa", "y", "x"],
    "token_logprobs": [None, -0.5, -4.0, -1.0],
    "top_logprobs": [None, {"Sa": -0.5}, {"!": -0.25, "y": -4.0}, {"x": -1.0}],
    "text_offset": [0, 0, 2, 3],
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompts", [["Say", "Say"], [[1, 2, 3], [1, 2, 3]]], ids=["texts", "ids"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Server, prompts: Any, streams: bool) -> None:
    server.script(_scored("x", "x"), _scored("x", "x"))
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 1, "n": 2, "stream": streams}
    response = server.post("/v1/completions", body)
    pieces: dict[int, list[Any]] = {}
    for answer in _events(response.text) if streams else [response.json]:
        for choice in answer["choices"]:
            pieces.setdefault(choice["index"], []).append(choice)
    assert sorted(pieces) == [0, 1, 2, 3]
    for choices in pieces.values():
        assert "".join(each["text"] for each in choices) == "Sayx"
        tables = [each["logprobs"] for each in choices if each["logprobs"]]
        assert {name: [one for table in tables for one in table[name]] for name in _COLUMNS} == _COLUMNS
    assert {(call.tells_prompt, call.prompt_logprobs) for call in server.engine.calls} == {(True, 1)}


def test_the_likeliest_choices_have_the_prompt_that_was_told_for_the_first(server: Server) -> None:
    said = [Text(at, "abc"[at], logprobs=[TokenLogprob(1, b"t", -at * -1.0)]) for at in range(3)]
    server.script(
        [[Started(3)], [_PIECES[0]], [*said, *(Finished(at, "stop") for at in range(3)), Ended(3, 3)]]
    )
    body = {"prompt": "Sa", "n": 2, "best_of": 3, "echo": True, "logprobs": 1}
    response = server.post("/v1/completions", body)
    assert [choice["text"] for choice in response.json["choices"]] == ["Sac", "Sab"]
    assert [len(choice["logprobs"]["tokens"]) for choice in response.json["choices"]] == [3, 3]


def test_an_echo_of_ids_is_the_text_that_the_worker_tells(server: Server) -> None:
    server.script([[Started(2)], [Prompted(0, "<s>Sa", [])], [Finished(0, "length"), Ended(2, 0)]])
    response = server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 0, "echo": True})
    [choice] = response.json["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("<s>Sa", "length", None)
    [call] = server.engine.calls
    assert (call.ids, call.ending.max_tokens, call.tells_prompt, call.prompt_logprobs) == (
        [1, 2],
        0,
        True,
        None,
    )


def test_several_prompts_are_completed_in_their_order(server: Server) -> None:
    second: list[Step] = [[Started(3)], [Text(0, "B"), Finished(0, "length", tokens=1), Ended(3, 1)]]
    server.script(SCRIPT, second)
    response = server.post("/v1/completions", {"prompt": [[1, 2], [3]], "stream": True})
    chunks = _events(response.text)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Hello you", "B"]
    assert chunks[-1]["usage"]["total_tokens"] == 4 + 2 + 3 + 1
    assert [call.ids for call in server.engine.calls] == [[1, 2], [3]]
    assert server.engine.ended == 2


def test_one_of_several_prompts_that_fails_ends_all(server: Server) -> None:
    server.script(SCRIPT[:2], [[Started(3)], InferenceFailed("not finite")])
    *_, last = _events(server.post("/v1/completions", {"prompt": ["a", "b"], "stream": True}).text)
    assert last["error"]["message"] == "not finite"
    assert server.engine.ended == 2


def _three_choices() -> list[Step]:
    """Three choices of a token each, of which the second is the likeliest."""
    script: list[Step] = [[Started(3)]]
    for choice, logprob in enumerate((-2.0, -0.5, -1.0)):
        token = TokenLogprob(1, b"t", logprob, [(1, b"t", logprob), (2, b"u", -3.0)])
        script.append([Text(choice, f"t{choice}", logprobs=[token]), Finished(choice, "stop")])
    return [*script, [Ended(3, 3)]]


def test_the_likeliest_of_several_choices_are_told_with_the_alternatives_that_were_asked_for(
    server: Server,
) -> None:
    server.script(_three_choices())
    response = server.post("/v1/completions", {"prompt": "x", "best_of": 3, "logprobs": 3})
    [choice] = response.json["choices"]
    assert (choice["text"], choice["logprobs"]["top_logprobs"]) == ("t1", [{"t": -0.5, "u": -3.0}])
    assert (server.engine.calls[0].n, server.engine.calls[0].sampling.logprobs) == (3, 3)


def test_the_likeliest_of_several_choices_are_told(server: Server) -> None:
    server.script(_three_choices())
    response = server.post("/v1/completions", {"prompt": "x", "n": 2, "best_of": 3})
    assert [(c["index"], c["text"], c["logprobs"]) for c in response.json["choices"]] == [
        (0, "t1", None),
        (1, "t2", None),
    ]
    assert (server.engine.calls[0].n, server.engine.calls[0].sampling.logprobs) == (3, 0)


_BAD_COMPLETIONS: list[tuple[Any, str]] = [
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": "a\0"}, "prompt"),
    ({"prompt": ["a"] * 200}, "prompt"),
    ({"prompt": "a", "n": 3, "best_of": 2}, "n"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "logprobs": 99}, "logprobs"),
    ({"prompt": "a", "tools": [{"type": "function", "name": "f"}]}, "tools"),
]


@pytest.mark.parametrize(("body", "field"), _BAD_COMPLETIONS)
def test_a_bad_completion_names_its_field(server: Server, body: Any, field: str) -> None:
    response = server.post("/v1/completions", body)
    assert (response.status_code, response.json["error"]["param"]) == (422, field)


def test_models_are_unloaded_and_loaded_again(server: Server) -> None:
    def asked(route: str, model: str = "tiny/chat") -> tuple[int, str]:
        response = server.post(f"/v1/models/{route}", {"model_id": model})
        assert response.json["model_id"] == model
        return response.status_code, response.json["status"]

    assert asked("reload") == (200, "loaded")
    assert asked("status") == (200, "loaded")
    assert asked("unload") == (200, "unloaded")
    assert asked("status") == (200, "unloaded")
    for route in ("unload", "reload", "status"):
        assert asked(route, "nobody") == (404, "not_found")
        assert server.post(f"/v1/models/{route}", {}).status_code == 422
    assert server.chat().status_code == 200


@pytest.mark.parametrize("error", [ModelLoadFailed("no such file"), NoReplica("no worker is up")])
@pytest.mark.parametrize("route", ["unload", "reload"])
def test_an_unload_and_a_reload_that_fail_say_why_in_their_own_form(
    server: Server, route: str, error: PenstockError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> str:
        raise error

    directory = server.services.directory
    monkeypatch.setattr(directory, {"unload": "unload", "reload": "load"}[route], fail)
    response = server.post(f"/v1/models/{route}", {"model_id": "tiny/chat"})
    told = {"model_id": "tiny/chat", "status": "internal_error", "error": error.message}
    assert (response.status_code, response.json) == (400, told)


def test_a_reload_that_takes_longer_than_its_request_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def outlast(*_: Any) -> str:
        raise DeadlineExceeded("the deadline passed")

    directory = server.services.directory
    monkeypatch.setattr(directory, "load", outlast)
    monkeypatch.setattr(directory, "status", lambda model: ModelStatus(model, "loading"))
    response = server.post("/v1/models/reload", {"model_id": "tiny/chat"})
    assert (response.status_code, response.json["status"]) == (200, "reloading")


def test_the_system_is_described_and_examined(server: Server) -> None:
    facts = server.client.simulate_get("/v1/system/info").json
    assert set(facts) == {"os", "kernel", "cpu", "memory", "devices", "build", "hf_cache_path"}
    assert facts["memory"]["total_bytes"] >= facts["memory"]["available_bytes"] > 0
    examined = server.client.simulate_post("/v1/system/doctor").json
    assert examined["system"]["kernel"] == facts["kernel"]
    names = {check["name"] for check in examined["checks"]}
    assert names == {"shared_memory", "open_files", "keys", "workers", "models", "sandbox"}
    assert all(("suggestion" in check) == (check["status"] != "ok") for check in examined["checks"])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/images/generations", 422),
        ("/v1/audio/speech", 422),
        ("/v1/models/tune", 501),
        ("/re_isq", 501),
        ("/calibration/start", 501),
        ("/v1/audio/transcriptions", 404),
    ],
)
def test_routes_that_are_not_here_say_so(server: Server, path: str, status: int) -> None:
    response = server.post(path, {})
    assert response.status_code == status
    assert response.json["message"] == response.json["error"]["message"] != ""


def test_a_wrong_method_is_405(server: Server) -> None:
    response = server.client.simulate_get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST, OPTIONS")


async def _framed(*steps: bytes | None) -> Any:
    """Framed events; behind None nothing comes any more."""
    for step in steps:
        if step is None:
            await asyncio.Event().wait()
        yield step


def _idle(server: Server, events: Any) -> EventStream:
    scope = plain_scope()
    scope.deadline_ns = deadline.after(20)
    req: Any = SimpleNamespace(path="/", method="POST", uri_template="", scope={})
    req.context = SimpleNamespace(penstock=scope)
    return EventStream(server.services, req, events, "chat", lambda error: (500, b"failed"), idle_s=0.001)


def test_a_silent_stream_sends_comments_and_can_be_left(server: Server) -> None:
    async def act() -> list[bytes]:
        stream = _idle(server, _framed(b"", b"data: 1\n\n", None))
        await stream.begin()
        told = [await anext(stream) for _ in range(3)]
        await stream.close()
        return told

    assert asyncio.run(act()) == [b"data: 1\n\n", b": keep-alive\n\n", b": keep-alive\n\n"]


def test_an_event_behind_a_comment_comes_once_and_the_stream_ends(server: Server) -> None:
    async def act() -> list[bytes]:
        going_on = asyncio.Event()

        async def events() -> Any:
            yield b""
            await going_on.wait()
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        stream = _idle(server, events())
        await stream.begin()
        told = [await anext(stream)]
        going_on.set()
        told += [event async for event in stream]
        await stream.close()
        return [told[0], *(event for event in told if event != COMMENT)]

    assert asyncio.run(act()) == [COMMENT, b"data: 1\n\n", b"data: 2\n\n"]


def test_a_stream_is_counted_though_its_next_event_fails_when_nobody_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    finisher = SimpleNamespace(finish=lambda *told: counted.append(told))
    monkeypatch.setattr(server.services, "finisher", finisher)

    async def act() -> None:
        going_on = asyncio.Event()

        async def events() -> Any:
            yield b""
            await going_on.wait()
            raise KeyError("a bug")

        stream = _idle(server, events())
        await stream.begin()
        assert await anext(stream) == b": keep-alive\n\n"
        going_on.set()
        for _ in range(3):
            await asyncio.sleep(0)
        await stream.close()

    asyncio.run(act())
    assert len(counted) == 1
