"""Runs with tools of the server over the chat route: scripted models, a host of the test, the real store of files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.agent import workplace
from frontend.engine.events import Called, Ended, Finished, Started, Text
from frontend.generation.hosted import CODE, NOTHING, Offer
from frontend.state.approvals import Decision
from frontend.state.files import FileStore
from frontend.state.places import OnDisk
from frontend.state.sessions import Session as KeptSession
from ipc.errors import InferenceFailed, ToolHostLost
from ipc.settings import State
from ipc.wire.tools import PythonCall, PythonResult, ShellCall, ShellResult, SurfaceCall, Wanted
from tests.fakes.agent import FakeParts
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT, RecordedServer

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "6 times 7?"}]
CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}
EXECUTE, SHELL = "mistralrs_execute_python", "mistralrs_shell"
FINAL: list[Step] = [[Started(30)], [Text(0, "It is 42."), Finished(0, "stop", tokens=4), Ended(30, 4)]]


def calls(*given: tuple[str, str], text: str = "") -> list[Step]:
    """A round that says a text and calls tools, each a name and arguments."""
    told = [
        event
        for at, (name, arguments) in enumerate(given)
        for event in Called(0, at, f"call-{at}", name, arguments).events()
    ]
    said = [Text(0, text)] if text else []
    return [[Started(10)], [*said, *told, Finished(0, "tool_calls", tokens=5), Ended(10, 5)]]


class AgentServer(RecordedServer):
    """Routes over scripted models, with tools."""

    def __init__(self, root: Path, *scripts: Sequence[Step], **settings: Any) -> None:
        super().__init__(root, **settings)
        self.parts = FakeParts(root)
        self.services.agent = self.parts.parts
        self.parts.counts.join(self.services.recorder)
        if scripts:
            self.script(*scripts)

    def offers(self, offer: Offer) -> None:
        """Offer something else from now on."""
        self.services.agent = replace(self.parts.parts, offer=offer)

    def chat(self, **fields: Any) -> Any:
        """The response of a request with code execution."""
        return self.post("/v1/chat/completions", {"messages": ASKED, "tools": [CODE_TOOL], **fields})

    def events(self, **fields: Any) -> list[tuple[str, Any]]:
        """Name and body of each event of a stream."""
        return events_of(self.chat(stream=True, **fields).text)


def events_of(text: str) -> list[tuple[str, Any]]:
    """Name ("" without one) and body of each event; the stream ends with `[DONE]`."""
    pieces = text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    found = []
    for piece in pieces[:-2]:
        *name, line = piece.split("\n")
        found.append(
            (name[0].removeprefix("event: ") if name else "", orjson.loads(line.removeprefix("data: ")))
        )
    return found


@pytest.fixture
def server(tmp_path: Path) -> AgentServer:
    """A model that runs code, then answers."""
    return AgentServer(tmp_path, calls((EXECUTE, '{"code":"6*7"}'), text="Wait. "), FINAL)


def test_a_whole_answer_has_the_last_text_the_calls_and_the_sum_of_usage(server: AgentServer) -> None:
    body = server.chat().json
    assert body["choices"][0]["message"]["content"] == "It is 42."
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["agentic_tool_calls"] == [
        {"round": 0, "name": EXECUTE, "arguments": '{"code":"6*7"}', "result_content": "stdout: ran 6*7\n"}
    ]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (40, 9)
    assert len(body["session_id"]) == 36 and "files" not in body


def test_the_model_reads_what_its_calls_gave(server: AgentServer) -> None:
    server.chat()
    first, second = server.engine.calls
    assert first.messages == ASKED and second.messages is not None
    assert first.tools is not None and EXECUTE in first.tools.strict
    said, result = second.messages[1:]
    assert said["content"] == "Wait. " and said["tool_calls"][0]["function"]["arguments"] == {"code": "6*7"}
    assert orjson.loads(result["content"]) == {
        "status": "success",
        "execution_time_ms": 3,
        "working_directory": "/work",
        "stdout": "ran 6*7\n",
    }
    assert server.engine.ended == 2


def test_a_stream_tells_named_events_between_its_chunks(server: AgentServer) -> None:
    events = server.events(session_id="s-1")
    assert [name for name, _ in events] == ["", *["agentic_tool_call_progress"] * 2, "", ""]
    texts = [body["choices"][0]["delta"]["content"] for name, body in events if not name]
    assert texts == ["Wait. ", "It is 42.", ""]
    assert events[1][1] == {
        "type": "agentic_tool_call_progress",
        "round": 0,
        "tool_name": EXECUTE,
        "phase": "calling",
        "data": {"tool_type": "code_execution", "code": "6*7"},
    }
    assert events[2][1]["phase"] == "complete"
    assert events[2][1]["data"] == {
        "tool_type": "code_execution",
        "stdout": "ran 6*7\n",
        "working_directory": "/work",
        "execution_time_ms": 3,
    }
    last = events[-1][1]
    assert last["choices"][0]["finish_reason"] == "stop" and last["session_id"] == "s-1"
    assert last["usage"]["total_tokens"] == 49


def test_a_request_without_server_tools_has_no_session_and_no_events(server: AgentServer) -> None:
    server.script(FINAL)
    events = server.events(tools=[])
    assert {name for name, _ in events} == {""} and "session_id" not in events[-1][1]
    assert server.parts.sessions.saved == []


def test_the_session_is_saved_after_each_round_and_at_the_end(server: AgentServer) -> None:
    server.chat(session_id="s-1")
    rounds = server.parts.sessions.saved
    assert [len(each.messages) for each in rounds] == [3, 4]
    assert rounds[-1].messages[-1] == {"role": "assistant", "content": "It is 42."}
    server.script(FINAL)
    more = [*ASKED, {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "Sure?"}]
    server.chat(session_id="s-1", messages=more)
    messages = server.engine.calls[-1].messages
    assert messages is not None and [each["role"] for each in messages] == [
        *("user", "assistant", "tool"),
        *("assistant", "user"),
    ]


def test_a_session_has_one_sandbox_and_other_sessions_have_others(server: AgentServer) -> None:
    script = calls((EXECUTE, '{"code":"1"}'))
    for name in ("a", "a", "b"):
        server.script(script, FINAL)
        server.chat(session_id=name)
    first, again, other = (sandbox for sandbox, _ in server.parts.host.calls)
    assert first == again != other and first != "a"


def test_calls_of_a_turn_run_in_order_under_one_round(server: AgentServer) -> None:
    server.script(calls((EXECUTE, '{"code":"1"}'), (EXECUTE, '{"code":"2"}')), FINAL)
    events = server.events()
    told = [(body["round"], body["phase"]) for name, body in events if name]
    assert told == [(0, "calling"), (0, "complete"), (0, "calling"), (0, "complete")]
    assert [call.code for _, call in server.parts.host.calls if isinstance(call, PythonCall)] == ["1", "2"]


def test_calls_of_the_client_are_returned_with_the_later_calls(server: AgentServer) -> None:
    own = {"type": "function", "function": {"name": "weather"}}
    server.script(calls((EXECUTE, '{"code":"1"}'), ("weather", "{}"), (EXECUTE, '{"code":"2"}')))
    body = server.chat(tools=[CODE_TOOL, own], session_id="s").json
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call-1", "call-2"]
    assert [each["arguments"] for each in body["agentic_tool_calls"]] == ['{"code":"1"}']
    server.script(FINAL)
    back = [*ASKED, choice["message"], {"role": "tool", "tool_call_id": "call-1", "content": "sun"}]
    body = server.chat(tools=[CODE_TOOL, own], session_id="s", messages=back).json
    assert [each["arguments"] for each in body["agentic_tool_calls"]] == ['{"code":"2"}']
    messages = server.engine.calls[-1].messages or []
    assert [each.get("tool_call_id") for each in messages] == [None, None, "call-0", None, "call-1", "call-2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{}", "exception: Object missing required field code"),
        ('{"code":1}', "exception: Expected str, got int - at $.code"),
        ('{"code":"1","x":2}', "exception: Object contains unknown field x"),
        ('{"code":', "exception: the arguments are no JSON"),
    ],
)
def test_arguments_that_break_the_schema_are_an_error_for_the_model(
    server: AgentServer, arguments: str, said: str
) -> None:
    server.script(calls((EXECUTE, arguments)), FINAL)
    body = server.chat().json
    assert body["agentic_tool_calls"][0]["result_content"].startswith(said)
    assert server.parts.host.calls == [] and body["choices"][0]["finish_reason"] == "stop"


def test_a_host_that_dies_costs_one_call_and_not_the_run(server: AgentServer) -> None:
    server.parts.host.results.append(ToolHostLost("the tool host ended"))
    body = server.chat().json
    assert body["agentic_tool_calls"][0]["result_content"] == "exception: the tool host ended"
    assert body["choices"][0]["message"]["content"] == "It is 42." and len(server.parts.host.calls) == 1
    assert server.parts.counts.calls[0][1] == "error"


def test_a_model_that_fails_behind_a_tool_ends_the_run_with_one_error(server: AgentServer) -> None:
    server.script(calls((EXECUTE, '{"code":"1"}')), [InferenceFailed("the model failed")])
    response = server.chat(session_id="s")
    assert response.status_code == 500 and response.json["message"] == "the model failed"
    assert len(server.parts.host.calls) == 1 and len(server.parts.sessions.saved) == 1


def test_code_gives_errors_results_and_pictures(server: AgentServer) -> None:
    result = PythonResult("error", 9, "/w", "out", "err", "boom", "42", "int", [b"png"])
    server.parts.host.results.append(result)
    events = server.events()
    assert events[2][1]["data"] == {
        "tool_type": "code_execution",
        "stdout": "out",
        "stderr": "err",
        "exception": "boom",
        "images_base64": [base64.b64encode(b"png").decode()],
        "working_directory": "/w",
        "execution_time_ms": 9,
    }
    read = orjson.loads((server.engine.calls[-1].messages or [])[-1]["content"])
    assert (read["result"], read["result_type"], read["images_generated"]) == ("42", "int", 1)


def test_code_that_takes_too_long_keeps_its_output(server: AgentServer) -> None:
    server.parts.host.results.append(PythonResult("timeout", 60000, "/w", "so far", interrupted=True))
    [record] = server.chat().json["agentic_tool_calls"]
    assert record["result_content"] == "stdout: so far\nexception: the code ran for more than 60 s"
    read = orjson.loads((server.engine.calls[-1].messages or [])[-1]["content"])
    assert read["timeout_info"] == {"timeout_secs": 60.0, "interrupted": True, "killed": False}
    assert read["stdout"] == "so far" and "execution_time_ms" not in read
    assert server.parts.counts.calls == [(EXECUTE, "timeout")]


def test_a_shell_says_how_it_ended(server: AgentServer) -> None:
    server.script(
        calls((SHELL, '{"commands":["cd x","ls"],"timeout_ms":900000,"max_output_length":9}')), FINAL
    )
    server.parts.host.results.append(ShellResult("error", "/w", "a", "b", 2))
    events = server.events(enable_shell=True)
    assert events[0][1]["data"] == {"tool_type": "shell", "commands": ["cd x", "ls"]}
    assert events[1][1]["data"] == {
        "tool_type": "shell",
        "commands": ["cd x", "ls"],
        "stdout": "a",
        "stderr": "b",
        "exit_code": 2,
        "status": "error",
        "working_directory": "/w",
        "timed_out": False,
    }
    [(_, call)] = server.parts.host.calls
    assert call == ShellCall(["cd x", "ls"], [], 600.0, 9)


def test_files_of_a_call_are_stored_told_and_attributed(server: AgentServer) -> None:
    server.parts.host.files.append({"a.csv": b"1,2\n", "plots/b.png": b"\x89PNG\xff"})
    events = server.events()
    names = [name for name, _ in events if name]
    assert names == [
        "agentic_tool_call_progress",
        "file_produced",
        "file_produced",
        "agentic_tool_call_progress",
    ]
    table, plot = (body for name, body in events if name == "file_produced")
    assert "type" not in table
    assert (table["name"], table["text"], table["purpose"]) == ("a.csv", "1,2\n", "agent_output")
    assert (plot["name"], plot["mime_type"]) == ("b.png", "image/png") and plot["data_base64"]
    run = table["id"].split("_")[1]
    assert [table["id"], plot["id"]] == [f"file_{run}_r0_0", f"file_{run}_r0_1"] and len(run) == 12
    assert table["source"] == {"tool": EXECUTE, "round": 0, "turn": 0}
    read = (server.engine.calls[-1].messages or [])[-1]["content"]
    assert "1,2\n" in read and f"id {table['id']}" in read


def test_whole_answers_have_the_files_and_records_their_ids(server: AgentServer) -> None:
    server.parts.host.files.append({"a.csv": b"1"})
    body = server.chat().json
    [file] = body["files"]
    assert body["agentic_tool_calls"][0]["file_ids"] == [file["id"]]
    assert server.parts.sessions.saved[-1].files == [file["id"]]


def test_expected_files_that_are_missing_become_placeholders(server: AgentServer) -> None:
    server.script(calls((EXECUTE, '{"code":"1","outputs":[{"name":"b.csv","format":"csv"}]}')), FINAL)
    server.parts.host.files.append({"b.csv": None, "a.png": None})
    body = server.chat(files=[{"name": "a.png", "description": "a plot"}]).json
    assert [(file["name"], file["code"], file["bytes"]) for file in body["files"]] == [
        ("b.csv", "not_produced", 0),
        ("a.png", "not_produced", 0),
    ]
    [(_, call)] = server.parts.host.calls
    assert isinstance(call, PythonCall) and call.outputs == [Wanted("a.png"), Wanted("b.csv", "csv")]
    told = server.engine.calls[0].tools
    assert told is not None and "a.png (a plot)" in told.functions[0]["function"]["description"]


def test_files_of_earlier_calls_are_surfaced(server: AgentServer) -> None:
    arguments = '{"outputs":[{"name":"a.txt"},{"name":"b.txt"}]}'
    server.script(calls(("mistralrs_surface_outputs", arguments)), FINAL)
    server.parts.host.files.append({"a.txt": b"x", "b.txt": None})
    events = server.events(enable_shell=True)
    data = events[-3][1]["data"]
    assert data["arguments"] == orjson.loads(arguments) and data["tool_type"] == "custom"
    assert [(each["name"], each["status"]) for each in orjson.loads(data["content"])["files"]] == [
        ("a.txt", "success"),
        ("b.txt", "error"),
    ]
    [(_, call)] = server.parts.host.calls
    assert isinstance(call, SurfaceCall)


@pytest.mark.parametrize(
    ("decision", "said", "wait", "outcome"),
    [
        (Decision(True, "ignored"), "stdout: ran 6*7\n", "approved", "success"),
        (Decision(False, message="Use pen and paper."), "exception: Use pen and paper.", "denied", "denied"),
        (Decision(False), "exception: Python code was denied by the user.", "denied", "denied"),
        (
            Decision(False, timed_out=True),
            "exception: Python code was denied: the request for approval timed out.",
            "timed_out",
            "denied",
        ),
    ],
)
def test_a_run_waits_for_a_decision(
    server: AgentServer, decision: Decision, said: str, wait: str, outcome: str
) -> None:
    server.parts.approvals.decisions.append(decision)
    events = server.events(agent_permission="ask", session_id="s")
    [asked] = (body for name, body in events if name == "agentic_tool_approval_required")
    assert asked == {
        "type": "agentic_tool_approval_required",
        "approval_id": asked["approval_id"],
        "session_id": "s",
        "round": 0,
        "tool": {"source": "built_in", "kind": "code_execution", "label": "Python code"},
        "arguments": {"code": "6*7"},
    }
    assert asked["approval_id"].startswith("appr_") and len(asked["approval_id"]) == 37
    assert server.parts.approvals.announced == [("", "s", asked["approval_id"])]
    complete = events[3][1]["data"]
    assert said == "".join(
        f"{name}: {complete[name]}" for name in ("stdout", "exception") if name in complete
    )
    counts = server.parts.counts
    assert (counts.rounds, counts.calls, counts.waits) == ([CHAT, CHAT], [(EXECUTE, outcome)], [wait])


def test_a_remembered_session_is_not_asked(server: AgentServer) -> None:
    server.parts.approvals.remembered.add(("", "s"))
    events = server.events(agent_permission="ask", session_id="s")
    assert "agentic_tool_approval_required" not in {name for name, _ in events}
    assert len(server.parts.host.calls) == 1


def test_input_files_are_told_mounted_and_read(server: AgentServer) -> None:
    data = "data:text/plain;base64," + base64.b64encode(b"secret is 7").decode()
    part = {"type": "file", "file": {"filename": "../notes.txt", "file_data": data}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "Read."}, part, part]}]
    server.chat(messages=asked)
    note, user = server.engine.calls[0].messages or []
    assert note["role"] == "system" and "secret is 7" in note["content"]
    assert "as notes.txt" in note["content"] and "as notes_2.txt" in note["content"]
    assert user["content"] == "Read." and "base64" not in note["content"]
    assert server.parts.host.mounted == [("notes.txt", b"secret is 7"), ("notes_2.txt", b"secret is 7")]
    saved = server.parts.sessions.saved[-1]
    assert saved.messages[0]["role"] == "user" and len(saved.files) == 1
    read = f'{{"file_id":"{saved.files[0]}","start":7}}'
    server.parts.sessions.kept["", "again"] = KeptSession([], saved.files)
    server.script(calls(("mistralrs_read_file", read), ("mistralrs_list_files", "{}")), FINAL)
    body = server.chat(session_id="again").json
    part, listed = (orjson.loads(each["result_content"]) for each in body["agentic_tool_calls"])
    assert (part["text"], part["start"], part["end"], part["total_chars"]) == ("is 7", 7, 11, 11)
    assert [each["source"] for each in listed["files"]] == ["input_file"]


def test_a_file_of_another_conversation_cannot_be_read(server: AgentServer) -> None:
    server.script(calls(("mistralrs_read_file", '{"file_id":"file-1"}')), FINAL)
    [record] = server.chat().json["agentic_tool_calls"]
    assert orjson.loads(record["result_content"])["error"] == "this conversation has no file with this id"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"max_tool_rounds": -1}, "max_tool_rounds"),
        ({"agent_permission": "ask"}, "agent_permission"),
        ({"files": [{}]}, "files[0].name"),
        ({"files": [{"name": "a"}], "tools": []}, "files"),
        ({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "tools[0].container"),
        (
            {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["a"]}}]},
            "tools[0].container.file_ids",
        ),
        ({"tools": [{"type": "function", "function": {"name": EXECUTE}}]}, "tools"),
        ({"tool_choice": {"type": "code_interpreter"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": EXECUTE}}, "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]}, None),
        ({"continue_final_message": True, "messages": [{"role": "assistant", "content": "a"}]}, None),
    ],
)
def test_what_cannot_run_is_refused_with_its_field(
    server: AgentServer, fields: dict[str, Any], param: Any
) -> None:
    response = server.chat(**fields)
    assert response.status_code == 422
    assert param in (None, response.json["error"]["param"]), response.text
    assert server.engine.works == []


def test_a_tool_that_is_off_is_refused_with_its_flag(server: AgentServer) -> None:
    for offer in (NOTHING, replace(server.parts.offer, features=frozenset(("shell",)))):
        server.offers(offer)
        response = server.chat()
        assert response.status_code == 422 and "--enable-code-execution" in response.json["message"]
    server.offers(replace(NOTHING, features=frozenset((CODE,))))
    assert "--enable-shell" in server.chat(enable_shell=True).json["message"]


def test_the_model_name_is_that_of_the_catalog(server: AgentServer) -> None:
    assert server.chat().json["model"] == CHAT


def test_a_decision_is_waited_for_as_long_as_the_settings_say(tmp_path: Path) -> None:
    script = calls((EXECUTE, '{"code":"1"}'))
    server = AgentServer(tmp_path, script, FINAL, state__approval_wait_s=7.0)
    server.parts.approvals.decisions.append(Decision(True))
    server.events(agent_permission="ask")
    assert server.parts.approvals.waited_s == [7.0]


def test_files_that_newer_ones_displace_are_told_without_bodies(server: AgentServer) -> None:
    server.parts.files = FileStore(OnDisk(server.parts.root), State(max_files=1))
    server.services.agent = server.parts.parts
    server.parts.host.files.append({"a.csv": b"1", "b.csv": b"2"})
    body = server.chat().json
    assert [(file["name"], file.get("text")) for file in body["files"]] == [("a.csv", None), ("b.csv", "2")]
    assert body["choices"][0]["message"]["content"] == "It is 42."


def test_a_file_without_room_is_a_placeholder_and_the_run_goes_on(server: AgentServer) -> None:
    server.parts.files = FileStore(OnDisk(server.parts.root), State(max_files_bytes=4096))
    server.services.agent = server.parts.parts
    server.parts.host.files.append({"a.bin": bytes(5000), "b.csv": b"2"})
    body = server.chat().json
    assert [(file["name"], file.get("code")) for file in body["files"]] == [
        ("a.bin", "no_room"),
        ("b.csv", None),
    ]
    assert "no room for the file" in (server.engine.calls[-1].messages or [])[-1]["content"]


def test_bodies_and_figures_of_a_run_are_bounded_together(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workplace, "MAX_BODIES_NBYTES", 12)
    result = PythonResult("success", 1, "/w", images_png=[b"1234", b"5678", b"9"])
    server.parts.host.results.append(result)
    server.parts.host.files.append({"a.csv": b"1234", "b.csv": b"123"})
    body = server.chat().json
    [record] = body["agentic_tool_calls"]
    assert len(record["result_images_base64"]) == 3
    assert [file.get("text") for file in body["files"]] == [None, "123"]


def test_input_files_are_mounted_again_in_the_next_host(server: AgentServer) -> None:
    server.parts.host.results.append(ToolHostLost("the tool host ended"))
    server.script(calls((EXECUTE, '{"code":"1"}'), (EXECUTE, '{"code":"2"}')), FINAL)
    data = base64.b64encode(b"1").decode()
    part = {"type": "file", "file": {"filename": "a.csv", "file_data": data}}
    server.chat(messages=[{"role": "user", "content": [part]}])
    assert server.parts.host.mounted == [("a.csv", b"1")] * 2
