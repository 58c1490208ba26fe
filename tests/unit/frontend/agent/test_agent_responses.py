"""Runs with tools of the server over the Responses route: items, events, citations, background, input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.engine.events import Calling
from frontend.protocols.responses.output import Output
from frontend.state.approvals import Decision
from ipc.wire.tools import PythonResult, ShellResult
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, AgentServer, calls, events_of

CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL_TOOL = {"type": "shell", "environment": {"type": "container_auto"}}
COMMANDS = '{"commands":["ls"],"timeout_ms":5000,"max_output_length":100}'


class ResponsesServer(AgentServer):
    """Asks for responses."""

    def respond(self, **fields: Any) -> Any:
        """The response of a request with both tools."""
        return self.post("/v1/responses", {"input": "6 times 7?", "tools": [CODE_TOOL, SHELL_TOOL], **fields})

    def told(self, **fields: Any) -> list[tuple[str, Any]]:
        """Name and body of each event of a stream, whose numbers rise."""
        events = events_of(self.respond(stream=True, **fields).text)
        assert [body["sequence_number"] for _, body in events] == list(range(len(events)))
        assert all(body["type"] == name for name, body in events)
        return events


@pytest.fixture
def server(tmp_path: Path) -> ResponsesServer:
    """A model that calls the shell, then answers."""
    return ResponsesServer(tmp_path, calls((SHELL, COMMANDS)), FINAL)


def test_the_shell_is_told_by_items_in_both_dialects(server: ResponsesServer) -> None:
    body = server.respond(session_id="s").json
    call, output, message = body["output"]
    assert call == {
        "type": "shell_call",
        "id": call["id"],
        "call_id": "call-0",
        "action": {"commands": ["ls"], "timeout_ms": 5000, "max_output_length": 100},
        "environment": None,
        "status": "completed",
    }
    exited = {"outcome": {"type": "exit", "exit_code": 0}}
    assert output == {
        "type": "shell_call_output",
        "id": output["id"],
        "call_id": "call-0",
        "max_output_length": 100,
        "output": [
            {"type": "stdout", "text": "ran ls\n", "stdout": "ran ls\n", "stderr": "", **exited},
            {"type": "outcome", "status": "success", "exit_code": 0, "stdout": "", "stderr": "", **exited},
        ],
        "status": "completed",
    }
    assert call["id"].startswith("sc_") and output["id"].startswith("sco_")
    assert message["content"][0]["text"] == "It is 42." == body["output_text"]
    assert (body["session_id"], body["usage"]["total_tokens"], body["status"]) == ("s", 49, "completed")


def test_a_stream_tells_shell_items_in_place_of_progress(server: ResponsesServer) -> None:
    server.parts.approvals.decisions.append(Decision(False, message="No."))
    events = server.told(agent_permission="ask")
    item = ["response.output_item.added", "response.output_item.done"]
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        *item,
        "agentic_tool_approval_required",
        *item,
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    bodies = [body for _, body in events]
    assert [bodies[at]["item"]["status"] for at in (2, 3, 5, 6)] == [
        *("in_progress", "completed"),
        *("in_progress", "completed"),
    ]
    assert [body["output_index"] for body in bodies if "output_index" in body] == [0, 0, 1, 1, *[2] * 6]
    denied = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 126}}
    assert bodies[6]["item"]["output"] == [
        {"type": "stderr", "text": "No.", **denied, "stderr": "No."},
        {"type": "outcome", "status": "denied", "exit_code": 126, **denied},
    ]
    assert bodies[-1]["response"]["output"][0] == bodies[3]["item"]


def test_code_has_an_item_beside_its_progress(server: ResponsesServer) -> None:
    server.script(calls((EXECUTE, '{"code":"6*7"}')), FINAL)
    events = server.told(include=["code_interpreter_call.outputs"])
    assert [name for name, _ in events[2:11]] == [
        "agentic_tool_call_progress",
        "response.output_item.added",
        "response.code_interpreter_call.in_progress",
        "response.code_interpreter_call_code.delta",
        "response.code_interpreter_call_code.done",
        "response.code_interpreter_call.interpreting",
        "agentic_tool_call_progress",
        "response.code_interpreter_call.completed",
        "response.output_item.done",
    ]
    assert (events[3][1]["item"]["code"], events[5][1]["delta"], events[6][1]["code"]) == ("", "6*7", "6*7")
    item = events[10][1]["item"]
    assert (item["type"], item["code"], item["status"]) == ("code_interpreter_call", "6*7", "completed")
    assert item["outputs"] == [{"type": "logs", "logs": "ran 6*7\n"}]
    assert item["container_id"] == "cntr_" + events[0][1]["response"]["id"]


@pytest.mark.parametrize(
    "include", [None, [], ["web_search_call.action.sources"], "code_interpreter_call.outputs"]
)
def test_the_output_of_code_is_told_only_where_a_request_asks_for_it(
    server: ResponsesServer, include: Any
) -> None:
    server.script(calls((EXECUTE, '{"code":"6*7"}')), FINAL)
    events = server.told(include=include)
    told = next(body["item"]["outputs"] for name, body in events if name == "response.output_item.done")
    assert told is None and events[-1][1]["response"]["output"][0]["outputs"] is None
    path = "/v1/responses/" + events[-1][1]["response"]["id"]
    assert server.client.simulate_get(path).json["output"][0]["outputs"] is None
    for name in ("include", "include[]"):
        asked = server.client.simulate_get(path, params={name: ["code_interpreter_call.outputs", "other"]})
        assert asked.json["output"][0]["outputs"] == [{"type": "logs", "logs": "ran 6*7\n"}]
    server.script(calls((EXECUTE, '{"code":"6*7"}')), FINAL)
    assert server.respond(include=include).json["output"][0]["outputs"] is None


@pytest.mark.parametrize("outputs", [5, True, "logs", {"logs": "a"}])
def test_outputs_of_code_items_that_are_no_list_name_their_field(
    server: ResponsesServer, outputs: Any
) -> None:
    item = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": outputs}
    answer = server.respond(input=[item, {"role": "user", "content": "Sure?"}])
    assert (answer.status_code, answer.json["error"]["param"]) == (422, "input[0].outputs")


def test_files_are_cited_on_the_last_text(server: ResponsesServer) -> None:
    server.parts.host.files.append({"a.csv": b"1"})
    events = server.told()
    [file] = (body for name, body in events if name == "file_produced")
    whole = events[-1][1]["response"]
    [citation] = whole["output"][-1]["content"][0]["annotations"]
    assert citation == {
        "type": "container_file_citation",
        "file_id": file["id"],
        "container_id": "cntr_" + whole["id"],
        "filename": "a.csv",
        "start_index": 0,
        "end_index": 0,
    }
    done = next(body for name, body in events if name == "response.content_part.done")
    assert done["part"]["annotations"] == [citation]


def test_an_answer_without_text_carries_its_citations_in_an_empty_part(server: ResponsesServer) -> None:
    own = {"type": "function", "name": "weather"}
    server.script(calls((SHELL, COMMANDS), ("weather", "{}"), text="Wait."))
    server.parts.host.files.append({"a.csv": b"1", "b.csv": None})
    output = server.respond(tools=[SHELL_TOOL, own]).json["output"]
    assert [item["type"] for item in output] == [
        "message",
        "shell_call",
        "shell_call_output",
        "message",
        "function_call",
    ]
    [part] = output[3]["content"]
    assert part["text"] == "" and [each["filename"] for each in part["annotations"]] == ["a.csv"]


def test_items_of_tools_are_accepted_as_input(server: ResponsesServer) -> None:
    first = server.respond(session_id="s").json
    server.script(FINAL)
    items = [
        {"role": "user", "content": "6 times 7?"},
        *first["output"],
        {"role": "user", "content": "Sure?"},
    ]
    server.respond(input=items, tools=[])
    roles = [message["role"] for message in server.engine.calls[-1].messages or []]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    result = (server.engine.calls[-1].messages or [])[2]["content"]
    assert orjson.loads(result) == {"stdout": "ran ls\n", "stderr": "", "exit_code": 0, "timed_out": False}
    server.respond(input="Sure?", previous_response_id=first["id"], session_id="s")
    messages = server.engine.calls[-1].messages or []
    assert [message["role"] for message in messages] == roles
    assert orjson.loads(messages[2]["content"])["working_directory"] == "/work"


def test_code_items_are_accepted_as_input(server: ResponsesServer) -> None:
    server.script(calls((EXECUTE, '{"code":"6*7"}')), FINAL)
    first = server.respond().json
    server.script(FINAL)
    server.respond(input="Sure?", previous_response_id=first["id"], tools=[])
    called, result = (server.engine.calls[-1].messages or [])[1:3]
    assert called["tool_calls"][0]["function"] == {"name": EXECUTE, "arguments": {"code": "6*7"}}
    assert result["content"] == "ran 6*7\n" and result["tool_call_id"] == "call-0"


def test_a_skill_by_reference_and_files_of_the_environment(server: ResponsesServer) -> None:
    server.parts.skills["pdf"] = {"SKILL.md": b"---"}
    skills = [{"type": "skill_reference", "skill_id": "pdf", "version": "1"}]
    tool = {"type": "shell", "environment": {"type": "container_auto", "skills": skills}}
    assert server.respond(tools=[tool]).status_code == 200
    assert server.parts.host.mounted == [("skills/pdf/SKILL.md", b"---")]


@pytest.mark.parametrize(
    ("environment", "param"),
    [
        ({"type": "local"}, "tools[0].environment.type"),
        ({"type": "container_reference", "container_id": "c"}, "tools[0].environment.type"),
        ({"skills": [{"type": "inline"}]}, "tools[0].environment.skills[0].type"),
        ({"skills": [{"type": "skill_reference"}]}, "tools[0].environment.skills[0].skill_id"),
        (
            {"skills": [{"type": "skill_reference", "skill_id": "no"}]},
            "tools[0].environment.skills[0].skill_id",
        ),
        ({"network_policy": {"type": "allowlist"}}, "tools[0].environment.network_policy"),
        ({"file_ids": ["file-no"]}, "tools[0].environment.file_ids[0].file_id"),
        ({"file_ids": "a"}, "tools[0].environment.file_ids"),
    ],
)
def test_an_environment_that_is_not_offered_is_refused(
    server: ResponsesServer, environment: dict[str, Any], param: str
) -> None:
    response = server.respond(tools=[{"type": "shell", "environment": environment}])
    assert (response.status_code, response.json["error"]["param"]) == (422, param), response.text
    assert server.engine.works == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"agent_permission": "ask"}, "agent_permission"),
        ({"agent_permission": "ask", "stream": True, "background": True}, "agent_permission"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://x"}]}]},
            "input[0].content[0].file_url",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_field(
    server: ResponsesServer, fields: dict[str, Any], param: str
) -> None:
    response = server.respond(**fields)
    assert (response.status_code, response.json["error"]["param"]) == (422, param), response.text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (EXECUTE, '{"code":5}'),
        (EXECUTE, "[]"),
        (SHELL, '{"commands":"ls"}'),
        (SHELL, '{"commands":[1,"ls"]}'),
    ],
)
def test_calls_that_break_the_schema_can_be_gone_on_from(
    server: ResponsesServer, name: str, arguments: str
) -> None:
    server.script(calls((name, arguments)), FINAL)
    first = server.respond().json
    assert first["status"] == "completed"
    server.script(FINAL)
    response = server.respond(input="Sure?", previous_response_id=first["id"])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("script", "result"),
    [
        (calls((SHELL, COMMANDS)), ShellResult("success", "/w", stdout="a\0b", exit_code=0)),
        (calls((EXECUTE, '{"code":"1"}')), PythonResult("success", 1, "/w", stdout="a\0b")),
    ],
)
def test_output_with_nul_can_be_gone_on_from(server: ResponsesServer, script: Any, result: Any) -> None:
    server.script(script, FINAL)
    server.parts.host.results.append(result)
    first = server.respond().json
    server.script(FINAL)
    response = server.respond(input="Sure?", previous_response_id=first["id"])
    assert response.status_code == 200, response.text
    assert "ab" in (server.engine.calls[-1].messages or [])[2]["content"]


def test_code_that_is_cut_off_is_incomplete() -> None:
    output = Output({"id": "resp_1", "tools": []})
    output.take([Calling(0, "c", EXECUTE, '{"code":"1"}', {"tool_type": "code_execution", "code": "1"})])
    assert [item["status"] for item in output.items()] == ["incomplete"]


def test_a_network_that_tools_have_cannot_be_taken_away(server: ResponsesServer) -> None:
    environment = {"type": "container_auto", "network_policy": {"type": "disabled"}}
    tool = {"type": "shell", "environment": environment}
    assert server.respond(tools=[tool]).status_code == 200
    server.offers(replace(server.parts.offer, has_network=True))
    response = server.respond(tools=[tool])
    assert response.json["error"]["param"] == "tools[0].environment.network_policy"
