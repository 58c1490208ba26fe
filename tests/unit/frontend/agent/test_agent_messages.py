"""Runs with tools of the server over the Messages route."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.state.approvals import Decision
from tests.fakes.generation_server import CHAT
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, AgentServer, calls

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "6 times 7?"}]
CODE_TOOL = {"type": "code_execution_20250825", "name": "code_execution"}


class MessagesServer(AgentServer):
    """Asks for messages."""

    def message(self, **fields: Any) -> Any:
        """The response of a request with code execution."""
        return self.post("/v1/messages", {"messages": ASKED, "tools": [CODE_TOOL], **fields})

    def told(self, **fields: Any) -> list[tuple[str, Any]]:
        """Name and body of each event of a stream."""
        pieces = self.message(stream=True, **fields).text.split("\n\n")
        pairs = [piece.split("\n") for piece in pieces if piece]
        return [(name.removeprefix("event: "), orjson.loads(line[6:])) for name, line in pairs]


@pytest.fixture
def server(tmp_path: Path) -> MessagesServer:
    """A model that runs code, then answers."""
    return MessagesServer(tmp_path, calls((EXECUTE, '{"code":"6*7"}'), text="Wait."), FINAL)


def test_a_whole_message_has_session_records_and_files(server: MessagesServer) -> None:
    server.parts.host.files.append({"a.csv": b"1"})
    body = server.message(session_id="s").json
    assert body["content"] == [{"type": "text", "text": "It is 42."}]
    assert (body["stop_reason"], body["session_id"], body["model"]) == ("end_turn", "s", CHAT)
    assert body["usage"] == {"input_tokens": 40, "output_tokens": 9}
    [file], [record] = body["files"], body["agentic_tool_calls"]
    assert file["text"] == "1" and record["file_ids"] == [file["id"]]


def test_a_stream_tells_named_events_between_its_blocks(server: MessagesServer) -> None:
    server.parts.host.files.append({"a.csv": b"1"})
    server.parts.approvals.decisions.append(Decision(True))
    events = server.told(session_id="s", agent_permission="ask")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for name, _ in events] == [
        "message_start",
        *block,
        "agentic_tool_call_progress",
        "agentic_tool_approval_required",
        "file_produced",
        "agentic_tool_call_progress",
        *block,
        "message_delta",
        "message_stop",
    ]
    bodies = [body for _, body in events]
    assert bodies[0]["message"]["usage"]["input_tokens"] == 10
    assert [body["index"] for body in bodies if "index" in body] == [0, 0, 0, 1, 1, 1]
    assert (bodies[-2]["session_id"], bodies[-2]["usage"]["input_tokens"]) == ("s", 40)
    assert bodies[6]["name"] == "a.csv" and "type" not in bodies[6]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "code_execution"}])
def test_a_choice_may_be_a_tool_of_the_server(server: MessagesServer, choice: dict[str, Any]) -> None:
    assert server.message(tool_choice=choice).status_code == 200
    [first, _] = server.engine.calls
    assert first.tools is not None
    assert first.tools.choice == ("required" if choice["type"] == "any" else "auto")


def test_a_choice_of_none_removes_the_tools_of_the_server(server: MessagesServer) -> None:
    server.script(FINAL)
    body = server.message(tool_choice={"type": "none"}).json
    assert "session_id" not in body and server.engine.calls[0].tools is None


def test_documents_are_input_files(server: MessagesServer) -> None:
    data = base64.b64encode(b"from base64").decode()
    blocks = [
        {"type": "document", "title": "a.txt", "source": {"type": "base64", "data": data}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "from text"}},
        {"type": "text", "text": "Read."},
    ]
    server.script(FINAL)
    body = server.message(messages=[{"role": "user", "content": blocks}], tools=[]).json
    note, user = server.engine.calls[0].messages or []
    assert "from base64" in note["content"] and "from text" in note["content"] and user["content"] == "Read."
    assert body["session_id"]
    upload = [{"type": "container_upload", "file_id": "file-0"}]
    response = server.message(messages=[{"role": "user", "content": upload}])
    assert (response.status_code, response.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"source": {"type": "base64", "data": "?"}}, ".source.data: expected base64"),
        ({"source": {"type": "base64"}}, ".source.data: expected a string"),
        ({"source": {"type": "base64", "data": "YQ=="}, "title": "x" * 300}, "[0].title: 300 characters"),
        ({"source": {"type": "text", "data": "a"}, "title": "x" * 300}, "[0].title: 300 characters"),
    ],
)
def test_mistakes_of_documents_name_their_field(
    server: MessagesServer, document: dict[str, Any], said: str
) -> None:
    blocks = [{"type": "document", **document}, {"type": "text", "text": "Read."}]
    response = server.message(messages=[{"role": "user", "content": blocks}])
    assert response.status_code == 400 and said in response.json["error"]["message"], response.text


def test_skills_are_told_and_mounted(server: MessagesServer) -> None:
    server.parts.skills["pdf"] = {"SKILL.md": b"---", "lib/a.py": b"1"}
    server.script(calls((SHELL, '{"commands":["ls"]}')), FINAL)
    body = server.message(tools=[], container={"skills": [{"type": "custom", "skill_id": "pdf"}]}).json
    note = (server.engine.calls[0].messages or [])[0]["content"]
    assert "- pdf: Does pdf.\n  skills/pdf/SKILL.md\n  skills/pdf/lib/a.py" in note
    assert server.parts.host.mounted == [("skills/pdf/SKILL.md", b"---"), ("skills/pdf/lib/a.py", b"1")]
    assert body["agentic_tool_calls"][0]["name"] == SHELL


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"agent_permission": "ask"}, "agent_permission: 'ask' needs stream: true"),
        ({"container": {"skills": [{"type": "anthropic", "skill_id": "x"}]}}, "container.skills[0].type"),
        ({"container": {"skills": [{"type": "custom", "skill_id": "x"}]}}, "container.skills[0].skill_id"),
        ({"container": {"skills": [{"type": "custom", "skill_id": "x", "version": "y"}]}}, ".version"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web search"),
    ],
)
def test_what_cannot_run_is_a_bad_request(server: MessagesServer, fields: dict[str, Any], said: str) -> None:
    response = server.message(**fields)
    assert response.status_code == 400 and said in response.json["error"]["message"]
    assert server.engine.works == []


def test_tokens_are_counted_with_the_tools_of_the_server(server: MessagesServer) -> None:
    server.script(FINAL)
    body = {"messages": ASKED, "tools": [CODE_TOOL]}
    assert server.post("/v1/messages/count_tokens", body).json == {"input_tokens": 30}
    [call] = server.engine.calls
    assert call.counts_only and call.tools is not None and len(call.tools.functions) == 4


def test_tokens_of_a_stream_with_approvals_are_counted(server: MessagesServer) -> None:
    server.offers(replace(server.parts.offer, permission="ask"))
    server.script(FINAL)
    body = {"messages": ASKED, "tools": [CODE_TOOL]}
    assert server.post("/v1/messages/count_tokens", body).json == {"input_tokens": 30}
