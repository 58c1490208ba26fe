"""`penstock chat --agent` against the routes of chat: scripted models, real stores, a tool host of the test."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frontend.generation.hosted import NOTHING, Offer
from ipc.wire.tools import RemoteTool
from penstock.agent_chat import AgentConversation, ToolScreen
from penstock.cli import main
from penstock.conversation import Server
from tests.fakes.agent import OFFER
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT
from tests.harness.server import wait_until
from tests.process.test_chat_command import Screen, terminal
from tests.unit.frontend.agent.test_agent_chat import EXECUTE, FINAL, SHELL, AgentServer, calls

ASKS = "May it run? yes, no, always: "
CODE = calls((EXECUTE, '{"code":"6*7"}'))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def server_of(root: Path, *scripts: Sequence[Step], offer: Offer = OFFER) -> AgentServer:
    """A server with real sessions, files and decisions, and tools of the test."""
    server = AgentServer(root, *scripts)
    state, parts = server.services.state, server.parts
    parts.files, parts.sessions, parts.approvals = state.files, state.sessions, state.approvals  # type: ignore[assignment]
    server.offers(offer)
    return server


def piped(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str) -> int:
    """The exit code of the command with these lines at its standard input, without questions."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", CHAT, "--agent", "--no-ask", "--url", url])


def test_the_terminal_asks_before_each_call_and_fetches_files(tmp_path: Path) -> None:
    server = server_of(tmp_path, CODE, FINAL, CODE, FINAL, CODE, FINAL)
    server.parts.host.files = [{"plot.csv": b"1,2"}]
    place = tmp_path / "got.csv"
    with server.listening() as url, terminal(url, "--agent") as (screen, process):
        seen = Screen(screen)
        seen.type("first", after="> ")
        seen.wait("  6*7")
        seen.type("maybe", after=ASKS)
        seen.type("n", after=ASKS, times=2)
        seen.type("use a pen", after="Reason for the model (may be empty): ")
        seen.wait("It is 42.")
        seen.type("second", after="> ", times=2)
        seen.type("always", after=ASKS, times=3)
        seen.wait("file 1: plot.csv, 3 B")
        seen.type("third", after="> ", times=3)
        seen.wait("It is 42.", times=3)
        seen.type(f"/save 1 {place}", after="> ", times=4)
        seen.wait(f"saved {place}, 3 B")
        seen.type("\x04", after="> ", times=5)
        assert process.wait(60) == 0
    assert place.read_bytes() == b"1,2"
    denied = (server.engine.calls[1].messages or [])[-1]["content"]
    assert "use a pen" in denied and server.parts.counts.calls[0] == (EXECUTE, "denied")
    assert server.parts.counts.waits == ["denied", "approved"], "the third call was not asked about"
    assert len(server.parts.host.calls) == 2 and len(server.parts.host.ended) == 1
    assert seen.text.count(ASKS) == 3


def test_ctrl_c_at_a_question_ends_the_run_and_not_the_program(tmp_path: Path) -> None:
    server = server_of(tmp_path, CODE, FINAL)
    with server.listening() as url, terminal(url, "--agent") as (screen, process):
        seen = Screen(screen)
        seen.type("go", after="> ")
        seen.wait(ASKS)
        os.write(screen, b"\x03")
        seen.wait("stopped")
        wait_until(lambda: server.parts.counts.waits == ["cancelled"], what="the end of the wait")
        seen.type("\x04", after="> ", times=2)
        assert process.wait(60) == 0
    assert server.parts.host.calls == [] and len(server.parts.host.ended) == 1


def test_rounds_tools_and_files_are_told_beside_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    server = server_of(tmp_path, CODE, calls((SHELL, '{"commands":["ls","pwd"]}')), FINAL)
    server.parts.host.files = [{"out/plot.csv": b"1,2", "b.txt": b"b"}]
    with server.listening() as url:
        assert piped(monkeypatch, url, "go", "/files", "/save", "/save", "/save 1", "/save 3") == 0
    told = capfd.readouterr()
    assert told.out == "It is 42.\n"
    lines = told.err.splitlines()
    assert lines[:3] == [f"round 1, {EXECUTE}: 6*7", "file 1: plot.csv, 3 B", "file 2: b.txt, 1 B"]
    assert lines[3:5] == [f"round 1, {EXECUTE}: done in 0.00 s", "  ran 6*7"]
    assert lines[5:8] == [f"round 2, {SHELL}: ls pwd", f"round 2, {SHELL}: done", "  ran ls pwd"]
    assert lines[8:] == [
        "1: plot.csv, 3 B", "2: b.txt, 1 B", "saved plot.csv, 3 B", "saved b.txt, 1 B", "there is no new file",
        "file 1 was not saved: plot.csv: File exists; name another path behind the number",
        "expected /save NUMBER [PATH] with a number from 1 to 2, see /files",
    ]  # fmt: skip
    assert Path("plot.csv").read_bytes() == b"1,2"
    assert len(server.parts.host.ended) == 1, "the session is deleted at the end"


def test_a_conversation_keeps_its_session_until_it_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of(tmp_path, CODE, FINAL, CODE, FINAL, CODE, FINAL)
    with server.listening() as url:
        assert piped(monkeypatch, url, "one", "two", "/reset", "three") == 0
    first, second, third = (sandbox for sandbox, _ in server.parts.host.calls)
    assert first == second != third and server.parts.host.ended == [first, third]
    assert [message["role"] for message in server.engine.calls[2].messages or []] == [
        "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip


def test_a_tool_that_is_off_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = server_of(tmp_path, FINAL, offer=Offer(frozenset(("shell",)), takes_files=True))
    with server.listening() as url:
        assert piped(monkeypatch, url, "one") == 0
        [call] = server.engine.calls
        assert call.tools is not None
        assert {tool["function"]["name"] for tool in call.tools.functions} >= {SHELL}
        server.offers(replace(NOTHING, remote={"m__t": RemoteTool("m__t", "m", "", {})}))
        assert piped(monkeypatch, url, "two") == 0
        assert server.engine.calls[1].tools is not None, "tools of MCP servers join by themselves"
        server.offers(NOTHING)
        assert piped(monkeypatch, url, "three") == 1
    told = capfd.readouterr()
    assert told.out == "It is 42.\n" * 2
    assert told.err == "penstock: this server runs no tools: start the server with --agent\n"


def test_ctrl_c_ends_a_command_and_not_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: ToolScreen, line: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(ToolScreen, "command", interrupted)
    server = server_of(tmp_path, FINAL)
    with server.listening() as url:
        try:
            code = piped(monkeypatch, url, "/save", "go")
        except KeyboardInterrupt:
            pytest.fail("the program has ended")
    assert code == 0 and len(server.engine.calls) == 1


def test_questions_need_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    assert main(["chat", "--agent"]) == 3
    assert "needs a terminal; --no-ask" in capsys.readouterr().err
    assert main(["chat", "--no-ask"]) == 3
    assert "--no-ask needs --agent" in capsys.readouterr().err


@pytest.fixture
def screen() -> ToolScreen:
    """A screen whose server is not there."""
    return ToolScreen(AgentConversation(Server("http://127.0.0.1:9", ""), CHAT, None, {}, asks=True))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"exception": "Traceback\n  at\nNameError: x"}, "NameError: x"),
        ({"exit_code": 3, "status": "error"}, "exit code 3"),
        ({"exit_code": None, "timed_out": True}, "took too long"),
        ({"status": "denied", "stderr": "no"}, "denied"),
        ({"execution_time_ms": 1250}, "done in 1.25 s"),
        ("no object", "done"),
    ],
)
def test_the_end_of_a_call_is_told_in_few_words(
    screen: ToolScreen, capsys: pytest.CaptureFixture[str], data: Any, said: str
) -> None:
    screen.tell(
        "agentic_tool_call_progress", {"round": 1, "tool_name": "t", "phase": "complete", "data": data}
    )
    assert capsys.readouterr().err.splitlines()[0] == f"round 2, t: {said}"


def test_no_tool_moves_the_terminal_or_floods_it(
    screen: ToolScreen, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"stdout": "\x1b[2J\x07a\n" * 20}
    event = {"round": 0, "tool_name": "\x1b]0;t\x07", "phase": "complete", "data": data}
    screen.tell("agentic_tool_call_progress", event)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "round 1, ]0;t: done" and lines[1:] == ["  [2Ja"] * 12 + ["  8 more lines"]
    screen.tell("another_event", {})
    screen.tell(
        "file_produced", {"name": "a", "code": "not_produced", "message": "the file was not produced"}
    )
    assert capsys.readouterr().err == "file a: the file was not produced\n"
    assert screen.command("/files") == "no tool has made a file"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"code": "a\nb"}, ["a", "b"]),
        ({"commands": ["ls", "pwd"]}, ["ls", "pwd"]),
        ({"code": "6*7", "outputs": [{"name": "a"}]}, ["code:", "6*7", "outputs:", '[{"name": "a"}]']),
        ({"dry_run": False}, ["dry_run:", "false"]),
        ({"path": "/a", "tool_type": "x", "to": []}, ["path:", "/a", "tool_type:", "x", "to:", "[]"]),
        ({"a": "x\u202ey\ud800z"}, ["xyz"]),
        ({}, []),
        ("no JSON", ["no JSON"]),
    ],
)
def test_a_question_shows_every_argument_with_its_name(
    screen: ToolScreen,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Any,
    shown: list[str],
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    monkeypatch.setattr(AgentConversation, "decide", lambda self, id_, **_: True)
    tool = {"label": "m__move\nNothing"}
    screen.tell("agentic_tool_approval_required", {"approval_id": "a", "tool": tool, "arguments": arguments})
    head, *lines = capsys.readouterr().err.strip("\n").split("\n")
    assert (
        head == "m__move Nothing wants to run:" and [line.strip() for line in lines if line.strip()] == shown
    )


def test_what_was_typed_before_a_question_is_no_answer(
    screen: ToolScreen, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[bool] = []
    monkeypatch.setattr(
        AgentConversation, "decide", lambda self, id_, *, approves, **_: decided.append(approves) or True
    )
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as stdin:

        def asked(prompt: str) -> str:
            os.write(ours, b"n\n")
            return stdin.readline()

        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr("builtins.input", asked)
        os.write(ours, b"y\n")
        screen.tell("agentic_tool_approval_required", {"approval_id": "a", "tool": {}, "arguments": {}})
    os.close(ours)
    assert decided == [False]


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "a\\evil", "\x1b\r\nevil", "x/../evil", ".evil", "a/...evil"]
)
def test_a_file_is_saved_under_its_own_name_in_the_working_directory(
    screen: ToolScreen, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(AgentConversation, "fetch", lambda self, id_, path: written.append(path) or 1)
    screen.tell("file_produced", {"id": "f", "name": name, "bytes": 1})
    assert screen.command("/save") == "saved evil, 1 B"
    screen.tell("file_produced", {"id": "g", "name": "..", "bytes": 1})
    assert screen.command("/save") == "saved file-2, 1 B" and written == [Path("evil"), Path("file-2")]
