"""The MCP server of `server.mcp_port`: four methods of JSON-RPC over the planner and the runner of chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.protocols.chat import mcp
from ipc.errors import InferenceFailed, QueueFull
from ipc.mcp_servers import REVISIONS
from tests.fakes.generation_server import RecordedServer
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, AgentServer, calls

ASKED = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def server(tmp_path: Path) -> RecordedServer:
    """A server with the port."""
    return RecordedServer(tmp_path, server__mcp_port=9)


def ask(server: RecordedServer, method: str, params: Any = None, **headers: str) -> Any:
    """The answer to a request with the id 7."""
    message = {"jsonrpc": "2.0", "id": 7, "method": method, **({} if params is None else {"params": params})}
    answer = server.post("/mcp", message, **headers)
    assert answer.status_code == 200 and answer.json["jsonrpc"] == "2.0" and answer.json["id"] == 7
    return answer.json


def call(server: RecordedServer, **arguments: Any) -> Any:
    """The answer to a call of chat."""
    return ask(server, "tools/call", {"name": "chat", "arguments": {"messages": ASKED, **arguments}})


@pytest.mark.parametrize(
    ("asked", "given"), [("2025-06-18", "2025-06-18"), ("1999-01-01", REVISIONS[0]), (None, "2025-11-25")]
)
def test_the_handshake_settles_the_revision(server: RecordedServer, asked: str | None, given: str) -> None:
    params = None if asked is None else {"protocolVersion": asked, "capabilities": {}, "clientInfo": {}}
    result = ask(server, "initialize", params)["result"]
    assert result["protocolVersion"] == given and result["capabilities"] == {"tools": {"listChanged": False}}
    assert result["serverInfo"]["name"] == "penstock"
    assert ask(server, "ping")["result"] == {}


def test_one_tool_is_listed(server: RecordedServer) -> None:
    [tool] = ask(server, "tools/list")["result"]["tools"]
    assert tool["name"] == "chat" and tool["inputSchema"]["required"] == ["messages"]


def test_without_a_model_of_text_no_tool_is_listed(
    server: RecordedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "generators", lambda catalog: [])
    assert ask(server, "tools/list")["result"] == {"tools": []}


def test_a_call_runs_as_chat_does(server: RecordedServer) -> None:
    chat = server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 5}).json
    told = call(server, max_tokens=5)
    text = chat["choices"][0]["message"]["content"]
    assert told["result"] == {"content": [{"type": "text", "text": text}]}
    first, second = server.engine.calls
    assert first == second
    assert call(server, messages="Hello")["result"]["content"][0]["text"] == text


def test_tools_of_the_server_run_in_a_call(tmp_path: Path) -> None:
    server = AgentServer(tmp_path, calls((EXECUTE, '{"code":"6*7"}')), FINAL, server__mcp_port=9)
    told = call(server, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}])
    assert told["result"]["content"] == [{"type": "text", "text": "It is 42."}]
    assert [each[0] for each in server.parts.counts.calls] == [EXECUTE]


def test_calls_for_the_client_are_told_as_json(tmp_path: Path) -> None:
    server = AgentServer(tmp_path, calls(("weather", '{"city":"Rome"}')), server__mcp_port=9)
    told = call(server, tools=[{"type": "function", "function": {"name": "weather"}}])
    [text] = told["result"]["content"]
    [called] = orjson.loads(text["text"])["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}


@pytest.mark.parametrize(
    ("arguments", "code", "status", "text"),
    [
        ({"max_tokens": 0}, "INVALID_INPUT", 422, "max_tokens"),
        ({"model": "none"}, "MODEL_NOT_FOUND", 404, "'none' does not exist"),
        ({"stream": True}, "INVALID_INPUT", 422, "stream: a tool answers once"),
        ({"messages": 7}, "INVALID_INPUT", 422, "messages"),
    ],
)
def test_a_request_of_chat_that_fails_is_told_with_its_code(
    server: RecordedServer, arguments: dict[str, Any], code: str, status: int, text: str
) -> None:
    error = call(server, **arguments)["error"]
    assert error["code"] == -32603 and error["data"] == {"code": code, "status": status}
    assert text in error["message"]


@pytest.mark.parametrize(
    ("error", "status"), [(InferenceFailed("it broke"), 500), (QueueFull("full", retry_after_s=2.0), 503)]
)
def test_an_error_of_the_engine_is_told(server: RecordedServer, error: Any, status: int) -> None:
    server.script(error)
    told = call(server)["error"]
    assert told["code"] == -32603 and told["data"]["code"] == error.code
    assert told["data"].get("retry_after_s") == error.retry_after_s


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"\xff", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","\xff":1}', -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{},"more":"\xff"}', -32700),
        (b'{"jsonrpc":"2.0","id":7,"more":"\xc31\xbc","method":"ping","params":1}', -32700),
        (b'{"jsonrpc":' * 100_000, -32600),
        (b'{"params":' + b"[" * 100_000, -32700),
        (b"", -32700),
        (b"[]", -32600),
        (b"7", -32600),
        (b'{"id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', -32600),
        (b'{"jsonrpc":"2.0","id":123456789012345678901234567890,"method":"ping"}', -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600),
    ],
)
def test_a_body_that_is_no_request_is_refused(server: RecordedServer, body: bytes, code: int) -> None:
    answer = server.post("/mcp", body)
    assert answer.status_code == 400
    assert answer.json["error"]["code"] == code and answer.json["id"] is None


@pytest.mark.parametrize(
    "params",
    [
        b'{"name":"\xff"}',
        b'{"name":"chat","arguments":{"messages":"\xff"}}',
        b'{"name":"chat","arguments":{},"\xff":1}',
    ],
)
def test_parameters_that_are_no_text_are_refused(server: RecordedServer, params: bytes) -> None:
    body = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":' + params + b"}"
    answer = server.post("/mcp", body)
    assert answer.status_code == 200 and answer.json["id"] == 7
    assert answer.json["error"]["code"] in (-32700, -32603)


@pytest.mark.parametrize(
    ("method", "params", "code", "text"),
    [
        ("resources/list", {}, -32601, "resources/list"),
        ("tools/call", {"name": "other"}, -32601, "other"),
        ("tools/call", {}, -32600, "name"),
        ("tools/call", [], -32600, "params"),
        ("initialize", {"protocolVersion": 7}, -32600, "params"),
        ("tools/call", {"name": "chat"}, -32603, "messages"),
        ("tools/call", {"name": "chat", "arguments": None}, -32603, "body"),
        ("tools/call", {"name": "chat", "arguments": [1]}, -32603, "body"),
    ],
)
def test_unknown_methods_tools_and_parameters_are_errors(
    server: RecordedServer, method: str, params: Any, code: int, text: str
) -> None:
    error = ask(server, method, params)["error"]
    assert error["code"] == code and text in error["message"]


def test_notifications_and_answers_are_accepted_without_a_body(server: RecordedServer) -> None:
    for message in (
        {"method": "notifications/initialized"},
        {"method": "tools/call"},
        {"id": 1, "result": {}},
    ):
        answer = server.post("/mcp", {"jsonrpc": "2.0", **message})
        assert (answer.status_code, answer.content) == (202, b"")
    assert server.engine.calls == []


def test_other_methods_of_http_and_unknown_revisions_are_refused(server: RecordedServer) -> None:
    assert server.client.simulate_get("/mcp").status_code == 405
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert server.post("/mcp", ping, **{"MCP-Protocol-Version": "2025-06-18"}).status_code == 200
    assert server.post("/mcp", ping, **{"MCP-Protocol-Version": "2"}).status_code == 400


def test_without_the_port_there_is_no_path(tmp_path: Path) -> None:
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert RecordedServer(tmp_path).post("/mcp", ping).status_code == 404
