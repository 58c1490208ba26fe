"""Functions of clients that the operator's dispatch URL runs, over the routes of chat."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.agent.outside import MAX_ANSWER_NBYTES, Dispatch
from frontend.agent.results import Answer
from frontend.agent.tools import EXTERNAL, Tool
from frontend.generation.hosted import NOTHING, Offer
from frontend.state.approvals import Decision
from tests.fakes.agent import FakeParts
from tests.fakes.dispatcher import Dispatcher, dispatcher
from tests.unit.frontend.agent.test_agent_chat import FINAL, AgentServer, calls

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OFFER = replace(NOTHING, dispatches=True)
CITY = ("weather", '{"city":"Rome"}')


class DispatchingServer(AgentServer):
    """A server without tools of its own, and with a dispatch URL."""

    def __init__(self, root: Path, url: str, timeout_s: float = 60.0) -> None:
        super().__init__(root, calls(CITY), FINAL)
        parts: FakeParts = self.parts
        self.dispatch = Dispatch(url, timeout_s)
        self.services.agent = replace(parts.parts, offer=OFFER, backends={EXTERNAL: self.dispatch})

    def ask(self, **fields: Any) -> Any:
        """The response of a request with the function."""
        return self.chat(tools=[WEATHER], **fields)


def test_a_function_of_the_client_runs_at_the_url_and_the_model_reads_its_content(tmp_path: Path) -> None:
    with dispatcher(b'{"content":"22 degrees"}') as program:
        server = DispatchingServer(tmp_path, program.url)
        body = server.ask().json
    assert program.calls == [{"name": "weather", "arguments": {"city": "Rome"}}]
    assert body["choices"][0]["message"]["content"] == "It is 42." and body["session_id"]
    assert body["agentic_tool_calls"] == [
        {"round": 0, "name": "weather", "arguments": '{"city":"Rome"}', "result_content": "22 degrees"}
    ]
    assert server.engine.calls[1].messages[-1]["content"] == "22 degrees"
    assert server.parts.counts.calls == [(EXTERNAL, "success")]


def test_a_stream_tells_the_call_and_asks_for_leave_as_an_external_tool(tmp_path: Path) -> None:
    with dispatcher(b'"sunny"') as program:
        server = DispatchingServer(tmp_path, program.url)
        server.parts.approvals.decisions.append(Decision(True))
        events = [
            (name, body)
            for name, body in server.events(tools=[WEATHER], agent_permission="ask", session_id="s")
            if name
        ]
    assert [name for name, _ in events] == [
        "agentic_tool_call_progress",
        "agentic_tool_approval_required",
        "agentic_tool_call_progress",
    ]
    assert events[0][1]["data"] == {"tool_type": "custom", "arguments": {"city": "Rome"}}
    assert events[1][1]["tool"] == {"source": "external", "kind": "external", "label": "weather"}
    assert events[2][1]["data"] == {"tool_type": "custom", "content": "sunny"}


def test_a_denied_function_is_not_sent(tmp_path: Path) -> None:
    with dispatcher(b'"never"') as program:
        body = DispatchingServer(tmp_path, program.url).ask(agent_permission="deny").json
    assert program.calls == [] and "denied by policy" in body["agentic_tool_calls"][0]["result_content"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
        ("/v1/responses", {"input": "Weather?", "tools": [{"type": "function", "name": "weather"}]}),
    ],
)
def test_messages_and_responses_run_functions_at_the_url_too(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    with dispatcher(b'"sunny"') as program:
        server = DispatchingServer(tmp_path, program.url)
        given = {"messages": [{"role": "user", "content": "?"}]} if path == "/v1/messages" else {}
        assert server.post(path, {**given, **fields}).status_code == 200
    assert [call["name"] for call in program.calls] == ["weather"]


def test_a_request_without_functions_or_with_no_rounds_goes_straight_to_the_model(tmp_path: Path) -> None:
    with dispatcher() as program:
        server = DispatchingServer(tmp_path, program.url)
        server.script(FINAL)
        assert "session_id" not in server.chat(tools=[]).json
        server.script(calls(CITY))
        body = server.ask(max_tool_rounds=0).json
    assert body["choices"][0]["finish_reason"] == "tool_calls" and "session_id" not in body
    assert program.calls == []


def test_without_a_url_functions_are_returned_to_the_client(tmp_path: Path) -> None:
    server = AgentServer(tmp_path, calls(CITY))
    server.offers(Offer())
    assert server.chat(tools=[WEATHER]).json["choices"][0]["finish_reason"] == "tool_calls"


async def _answer(program: Dispatcher, timeout_s: float = 60.0, text: str = "{}") -> Answer:
    dispatch = Dispatch(program.url, timeout_s)
    try:
        return await dispatch.run(Tool("weather", "custom", EXTERNAL, "weather", source=EXTERNAL), text)
    finally:
        await dispatch.close()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'"a text"', "a text"),
        (b"plain words", "plain words"),
        (b'{"content":"x","more":1}', "x"),
        (b'{"content":{"degrees":22}}', '{"degrees":22}'),
        (b'{"content":""}', ""),
        (b'"nul\\u0000"', "nul"),
    ],
)
def test_an_answer_is_a_text_or_an_object_with_content(body: bytes, expected: str) -> None:
    with dispatcher(body) as program:
        answer = asyncio.run(_answer(program))
    assert (answer.text, answer.status) == (expected, "success")


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{}", 200, "neither a text nor an object with content"),
        (b"[1]", 200, "neither a text nor an object with content"),
        (b'{"content":null}', 200, "neither a text nor an object with content"),
        (b"\xff\xfe", 200, "is no text"),
        (b'{"content":' + b"[" * 500 + b"]" * 500 + b"}", 200, "too many levels"),
        (b'"x"', 404, "status 404"),
        (b'"x"', 500, "status 500"),
        (b"x" * (MAX_ANSWER_NBYTES + 1), 200, f"over {MAX_ANSWER_NBYTES} bytes"),
    ],
)
def test_every_other_answer_gives_the_model_an_error(body: bytes, status: int, reason: str) -> None:
    with dispatcher(body, status=status) as program:
        answer = asyncio.run(_answer(program))
    told = orjson.loads(answer.text)
    assert (told["tool"], told["status"], answer.status) == ("weather", "failed", "failed")
    assert reason in told["error"] and len(program.calls) == 1


def test_a_redirect_is_not_followed() -> None:
    with dispatcher(b'"elsewhere"') as other, dispatcher(b"", status=307) as program:
        program.headers["Location"] = other.url
        answer = asyncio.run(_answer(program))
    assert "status 307" in answer.text and other.calls == []


def test_an_answer_that_unfolds_is_taken_as_it_is() -> None:
    with dispatcher(b"\x1f\x8b\x08\x00", headers={"Content-Encoding": "gzip"}) as program:
        assert "is no text" in asyncio.run(_answer(program)).text


def test_a_program_that_does_not_answer_is_told_without_its_address() -> None:
    with dispatcher() as program:
        late = asyncio.run(_answer(program, timeout_s=0.05))
    assert "within 0.05 s" in late.text
    gone = asyncio.run(_answer(program))
    assert "does not answer" in gone.text and "127.0.0.1" not in gone.text and gone.status == "failed"


def test_arguments_that_are_no_json_are_not_sent() -> None:
    with dispatcher(b'"x"') as program:
        answer = asyncio.run(_answer(program, text='{"city":'))
    assert "no JSON" in answer.text and program.calls == []


def test_arguments_of_too_many_levels_are_not_sent() -> None:
    with dispatcher(b'"x"') as program:
        answer = asyncio.run(_answer(program, text="[" * 500 + "]" * 500))
    assert "too many levels" in answer.text and program.calls == []
