"""The routes of Messages over an engine that tells recorded events: what is asked, every answer, every error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from frontend.engine.events import Called, Finished, Started, Text
from ipc.errors import InferenceFailed, InputTooLong, QueueFull, WorkerLost
from tests.fakes.generation_server import ENDED, RecordedServer

_ASK = {"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


class Server(RecordedServer):
    """Asks for messages."""

    def ask(self, **fields: Any) -> Any:
        """The response to a small conversation with further fields."""
        return self.post("/v1/messages", _ASK | fields)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Routes without a worker."""
    return Server(tmp_path)


def _events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of each event."""
    assert text.endswith("\n\n")
    told = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        told.append((name[7:], orjson.loads(data[6:])))
    assert all(name == data["type"] for name, data in told)
    return told


def _error(response: Any) -> tuple[int, str]:
    assert response.json["type"] == "error"
    assert set(response.json["error"]) == {"type", "message"}
    return response.status_code, response.json["error"]["type"]


def test_a_conversation_is_answered_whole(server: Server) -> None:
    response = server.ask(model="default", stop_sequences=["x"])
    assert response.status_code == 200
    answer = response.json
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny/chat")
    assert answer["content"] == [{"type": "text", "text": "Hello you"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"] == {"input_tokens": 4, "output_tokens": 2}
    [call] = server.engine.calls
    assert call.messages == [{"role": "user", "content": "hi"}]
    assert (call.ending.max_tokens, call.ending.stop) == (8, ["x"])
    assert server.engine.ended == 1


def test_a_conversation_is_answered_by_a_stream(server: Server) -> None:
    response = server.ask(stream=True)
    assert response.headers["content-type"] == "text/event-stream"
    assert [name for name, _ in _events(response.text)] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert server.engine.ended == 1


def test_a_stream_that_cannot_begin_has_a_status_of_its_own(server: Server) -> None:
    server.script(InputTooLong("the prompt has 70 tokens, the limit is 64"))
    assert _error(server.ask(stream=True)) == (400, "invalid_request_error")
    server.script(QueueFull("no room", retry_after_s=2))
    response = server.ask(stream=True)
    assert _error(response) == (503, "overloaded_error")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("error", [WorkerLost("the worker died"), InferenceFailed("not finite")])
def test_a_stream_that_fails_ends_with_one_error(server: Server, error: Any) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], error])
    *_, (before, _), (name, data) = _events(server.ask(stream=True).text)
    assert (before, name) == ("content_block_delta", "error")
    assert data == {"type": "error", "error": {"type": "api_error", "message": error.message}}
    server.script([[Started(4)], [Text(0, "Hel")], error])
    assert server.ask().json["error"]["message"] == error.message


def test_a_call_reaches_the_client(server: Server) -> None:
    server.script(
        [[Started(4), *Called(0, 0, "call-1", "f", '{"a":1}').events(), Finished(0, "tool_calls"), ENDED]]
    )
    response = server.ask(
        tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice={"type": "any"}
    )
    assert response.json["stop_reason"] == "tool_use"
    assert response.json["content"] == [{"type": "tool_use", "id": "call-1", "name": "f", "input": {"a": 1}}]
    used = server.engine.calls[0].tools
    assert used is not None and used.choice == "required"


def test_tokens_are_counted_without_generating(server: Server) -> None:
    server.script([[Started(11)], [Finished(0, "stop"), ENDED]], [[Started(11)]])
    for body in (_ASK, {"messages": _ASK["messages"], "system": "be kind"}):
        response = server.post("/v1/messages/count_tokens", body)
        assert response.status_code == 200
        assert set(response.json) == {"input_tokens"}
    assert response.json == {"input_tokens": 11}
    assert all(call.counts_only for call in server.engine.calls)
    assert _error(server.post("/v1/messages/count_tokens", {"messages": []})) == (
        400,
        "invalid_request_error",
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b'{"messages": "\\ud800"}', 400),
        ({}, 400),
        (_ASK | {"max_tokens": 0}, 400),
        (_ASK | {"max_tokens": "many"}, 400),
        (_ASK | {"tool_choice": {"type": "any"}}, 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_bad_input_is_refused_in_the_form_of_anthropic(
    server: Server, path: str, body: Any, status: int
) -> None:
    assert _error(server.post(path, body)) == (status, "invalid_request_error")
    assert server.engine.works == []


def test_errors_of_the_server_itself_have_the_form_of_anthropic(server: Server) -> None:
    get = server.client.simulate_get
    assert _error(get("/v1/messages")) == (405, "invalid_request_error")
    assert get("/v1/messages").headers["allow"] == "POST, OPTIONS"
    assert _error(server.post("/v1/messages/batches", {})) == (404, "not_found_error")
    assert _error(server.ask(model="gpt-4")) == (404, "not_found_error")
    assert "tiny/chat" in server.ask(model="gpt-4").json["error"]["message"]
    assert _error(server.ask(model="org/dense")) == (400, "invalid_request_error")
    plain = server.client.simulate_post("/v1/messages", body=b"{}", headers={"Content-Type": "text/plain"})
    assert _error(plain) == (415, "invalid_request_error")
    late = server.post("/v1/messages", _ASK, **{"X-Request-Timeout": "soon"})
    assert _error(late) == (400, "invalid_request_error")


def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, limits__max_body_bytes="1000000")
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 1_000_000)
    response = server.post("/v1/messages", body)
    assert _error(response) == (413, "request_too_large")
    assert response.json["error"]["message"] == "request body too large"


def test_a_bug_tells_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(server.engine, "generate", broken)
    response = server.ask()
    assert _error(response) == (500, "api_error")
    assert "secret" not in response.text


_AGENT: dict[str, Any] = {
    "model": "tiny/chat",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Work in /src.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I list.", "signature": "sig"},
                {"type": "text", "text": "Listing."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [
                        {"type": "text", "text": "a.py"},
                        {"type": "tool_reference", "tool_name": "Read"},
                    ],
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
        }
    ],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
"""A request as a coding agent sends it."""


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true"])
def test_a_coding_agent_is_answered(server: Server, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    response = server.post(path, _AGENT, **headers)
    assert response.status_code == 200
    assert _events(response.text)[-1][0] == "message_stop"
    [call] = server.engine.calls
    assert [message["role"] for message in call.messages or ()] == ["system", "user", "assistant", "tool"]
    assert (call.messages or [])[0]["content"] == "You are an agent. Work in /src."
    assert (call.messages or [])[3]["content"] == 'a.py {"type":"tool_reference","tool_name":"Read"}'
    assert call.variables["enable_thinking"] is True and call.variables["reasoning_effort"] == "high"
    assert call.tools is not None and call.tools.functions[0]["function"]["name"] == "Bash"
    server.post("/v1/messages/count_tokens?beta=true", _AGENT, **headers)
    counted = server.engine.calls[1]
    assert counted.counts_only and (counted.messages, counted.tools) == (call.messages, call.tools)


_THREADED = {"thread": {"type": "continue", "id": "thread_1"}, "max_tokens": 64, "messages": _ASK["messages"]}
"""The second turn of a tool runner, as the SDKs send it to a server that keeps conversations."""


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"])
@pytest.mark.parametrize("thread", [_THREADED["thread"], {"type": "create"}, {}])
def test_a_thread_is_refused_in_the_form_that_sdks_follow(server: Server, path: str, thread: Any) -> None:
    response = server.post(path, _THREADED | {"thread": thread})
    assert response.status_code == 400
    error = response.json["error"]
    assert (response.json["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["message"].startswith("thread: ")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert not server.engine.calls


_KEY, _ADMIN = api_keys.fresh(), api_keys.fresh()


def test_keys_come_in_either_header_and_refusals_have_the_form_of_anthropic(tmp_path: Path) -> None:
    entries = (KeyEntry("app", api_keys.hashed(_KEY)), KeyEntry("admin", api_keys.hashed(_ADMIN), ("admin",)))
    server = Server(tmp_path, Gate(entries))
    with server.listening() as url:

        def ask(**headers: str) -> Any:
            return httpx.post(f"{url}/v1/messages", json=_ASK, headers=headers, timeout=60)

        assert ask(**{"x-api-key": _KEY}).status_code == 200
        assert ask(Authorization=f"Bearer {_KEY}").status_code == 200
        for headers, status, kind in (
            ({}, 401, "authentication_error"),
            ({"x-api-key": "wrong"}, 401, "authentication_error"),
            ({"x-api-key": _ADMIN}, 403, "permission_error"),
        ):
            response = ask(**headers)
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
