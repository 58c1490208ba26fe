"""Tools of MCP servers in runs, over the routes of chat, Messages and Responses; the tool host is a fake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.state.approvals import Decision
from ipc.errors import SandboxFailed, ToolHostLost
from ipc.wire.tools import RemoteCall, RemoteResult, Remotes, RemoteTool
from tests.fakes.generation import Step
from tests.unit.frontend.agent.test_agent_chat import FINAL, AgentServer, calls

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = RemoteTool("fs_read", "files", "Reads a file.", SCHEMA, strict=True)
TIME = RemoteTool("fs_time", "files", "Tells the time.", {"type": "object", "$ref": "#"})
WEATHER = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "?"}]


class McpServer(AgentServer):
    """A server with two tools of an MCP server."""

    def __init__(self, root: Path, *scripts: Sequence[Step]) -> None:
        super().__init__(root, *(scripts or (calls(("fs_read", '{"path":"a"}')), FINAL)))
        self.parts.host.remotes = Remotes(1, [READ, TIME])
        self.parts.host.remote_tools = {tool.name: tool for tool in (READ, TIME)}

    def ask(self, **fields: Any) -> Any:
        """The response of a request with a function of the client."""
        return self.chat(tools=[WEATHER], **fields)


def test_a_request_with_functions_is_offered_the_tools_and_a_call_runs_in_the_host(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    body = server.ask().json
    tools = server.engine.calls[0].tools
    assert tools is not None and tools.strict == ["fs_read"]
    assert [each["function"]["name"] for each in tools.functions] == ["weather", "fs_read", "fs_time"]
    assert tools.functions[1]["function"] == {
        "name": "fs_read",
        "description": "Reads a file.",
        "parameters": SCHEMA,
    }
    assert server.parts.host.calls == [("", RemoteCall("fs_read", '{"path":"a"}'))]
    [record] = body["agentic_tool_calls"]
    assert record["result_content"] == 'ran fs_read with {"path":"a"}' and body["session_id"]
    assert server.engine.calls[1].messages[-1]["content"] == record["result_content"]
    assert server.parts.counts.calls == [("mcp", "success")]


def test_a_run_for_another_reason_is_offered_the_tools_too(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    server.chat()
    tools = server.engine.calls[0].tools
    assert tools is not None and {"fs_read", "mistralrs_execute_python"} <= {*tools.strict}


def test_requests_without_functions_or_rounds_get_no_tools(tmp_path: Path) -> None:
    server = McpServer(tmp_path, FINAL)
    assert "session_id" not in server.chat(tools=[]).json
    assert "session_id" not in server.ask(max_tool_rounds=0).json
    assert all("fs_read" not in str(call.tools) for call in server.engine.calls)


def test_approval_names_the_source_and_the_tool(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    server.parts.approvals.decisions.append(Decision(False, "not this file"))
    events = dict(server.events(tools=[WEATHER], agent_permission="ask", session_id="s"))
    asked = events["agentic_tool_approval_required"]
    assert asked["tool"] == {"source": "mcp", "kind": "custom", "label": "fs_read"}
    assert asked["arguments"] == {"path": "a"}
    assert "not this file" in events["agentic_tool_call_progress"]["data"]["content"]
    assert server.parts.host.calls == []


def test_a_denied_tool_is_shown_and_does_not_run(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    [record] = server.ask(agent_permission="deny").json["agentic_tool_calls"]
    assert "fs_read was denied by policy" in record["result_content"] and server.parts.host.calls == []


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (RemoteResult("error", "no such file"), "error"),
        (SandboxFailed("the program has ended"), "failed"),
        (ToolHostLost("the tool host ended"), "failed"),
    ],
)
def test_a_call_that_fails_gives_the_model_an_error_and_the_run_goes_on(
    tmp_path: Path, result: Any, status: str
) -> None:
    server = McpServer(tmp_path)
    server.parts.host.results.append(result)
    body = server.ask().json
    assert body["choices"][0]["message"]["content"] == "It is 42."
    [record] = body["agentic_tool_calls"]
    assert (result.text if status == "error" else result.message) in record["result_content"]
    if status == "failed":
        assert orjson.loads(record["result_content"])["status"] == "failed"
    assert server.parts.counts.calls == [("mcp", status)]


@pytest.mark.parametrize(("arguments", "reason"), [("[1]", "are no object"), ("{", "are no JSON")])
def test_arguments_that_are_no_object_are_not_sent(tmp_path: Path, arguments: str, reason: str) -> None:
    server = McpServer(tmp_path, calls(("fs_read", arguments)), FINAL)
    [record] = server.ask().json["agentic_tool_calls"]
    assert reason in record["result_content"] and server.parts.host.calls == []


def test_a_function_of_the_client_may_not_have_the_name_of_a_tool(tmp_path: Path) -> None:
    answer = McpServer(tmp_path).chat(tools=[{"type": "function", "function": {"name": "fs_read"}}])
    assert answer.status_code == 422 and "fs_read" in answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "mcp", "server_url": "http://x"}]}),
        ("/v1/responses", {"input": "?", "tools": [{"type": "mcp", "server_url": "http://x"}]}),
        ("/v1/messages", {"messages": ASKED, "mcp_servers": [{"type": "url", "url": "http://x"}]}),
    ],
)
def test_servers_of_clients_are_refused(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    answer = McpServer(tmp_path).post(path, fields)
    assert answer.status_code in (400, 422) and "named by the operator" in answer.text


def _events_of_response(server: McpServer, **fields: Any) -> list[dict[str, Any]]:
    tools = [{"type": "function", "name": "weather"}]
    text = server.post("/v1/responses", {"input": "?", "tools": tools, "stream": True, **fields}).text
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
    return [orjson.loads(line) for line in lines]


def test_responses_tell_the_call_as_an_item_with_its_events(tmp_path: Path) -> None:
    events = _events_of_response(McpServer(tmp_path))
    told = [event for event in events if event.get("output_index") == 0]
    assert [event["type"].removeprefix("response.") for event in told] == [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]
    item = told[-1]["item"]
    assert item.pop("id").startswith("mcp_") and item.pop("call_id")
    assert item == {
        "type": "mcp_call",
        "server_label": "files",
        "name": "fs_read",
        "arguments": '{"path":"a"}',
        "output": 'ran fs_read with {"path":"a"}',
        "error": None,
        "status": "completed",
    }
    assert told[2]["delta"] == told[3]["arguments"] == '{"path":"a"}'
    assert {event["phase"] for event in events if event["type"] == "agentic_tool_call_progress"} == {
        "calling",
        "complete",
    }


def test_an_item_of_a_call_that_failed_has_the_error_and_is_taken_back_as_input(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    server.parts.host.results.append(RemoteResult("error", "no such file"))
    events = _events_of_response(server)
    assert any(event["type"] == "response.mcp_call.failed" for event in events)
    item = events[-1]["response"]["output"][0]
    assert (item["status"], item["output"], item["error"]) == ("failed", None, "no such file")
    server.script(FINAL)
    again = [{"role": "user", "content": "?"}, item, {"role": "user", "content": "And?"}]
    assert server.post("/v1/responses", {"input": again}).status_code == 200
    _, call, result, _ = server.engine.calls[-1].messages
    assert call["tool_calls"][0]["function"] == {"name": "fs_read", "arguments": {"path": "a"}}
    assert result["content"] == "no such file"


def test_messages_run_the_tools_too(tmp_path: Path) -> None:
    server = McpServer(tmp_path)
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    body = server.post("/v1/messages", {"messages": ASKED, "tools": tools}).json
    assert [record["name"] for record in body["agentic_tool_calls"]] == ["fs_read"]
