"""`penstock chat` against the routes of chat: from a pipe, and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.access import api_keys
from frontend.access.gate import Gate
from frontend.engine.events import Ended, Finished, Reasoning, Started, Text
from ipc.errors import WorkerLost
from penstock import chat
from penstock.cli import main
from penstock.conversation import NoAnswer, Refused, Server, pieces
from tests.fakes.generation_server import CHAT, DENSE, ENDED, RecordedServer
from tests.harness.server import ROOT, wait_until

COMMAND = (sys.executable, "-m", "penstock", "chat")


@pytest.fixture
def server(tmp_path: Path) -> RecordedServer:
    return RecordedServer(tmp_path)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def piped(url: str, *lines: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The program, with lines at its standard input."""
    return subprocess.run(
        [*COMMAND, *arguments, "--url", url], cwd=ROOT, input="".join(f"{line}\n" for line in lines),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_answers_come_line_by_line_and_the_conversation_goes_on(server: RecordedServer) -> None:
    arguments = (CHAT, "--system", "be brief", "--max-tokens", "7", "--temperature", "0.5")
    with server.listening() as url:
        done = piped(url, "one", "", "two", "/reset", "three", "/exit", "four", arguments=arguments)
    assert (done.returncode, done.stdout) == (0, "Hello you\n" * 3)
    system = {"role": "system", "content": "be brief"}
    first = [system, {"role": "user", "content": "one"}]
    said = {"role": "assistant", "content": "Hello you"}
    assert [call.messages for call in server.engine.calls] == [
        first,
        [*first, said, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "three"}],
    ]
    call = server.engine.calls[0]
    assert (call.ending.max_tokens, call.sampling.temperature) == (7, 0.5)


def test_the_model_and_the_message_of_the_system_are_changed_on_the_way(server: RecordedServer) -> None:
    models = ("/model other", f"/model {DENSE}", f"/model {CHAT}", "/model")
    lines = ("/system be brief", "one", *models, "two", "/system", "three", "/what")
    with server.listening() as url:
        done = piped(url, *lines)
    assert done.stdout == "Hello you\n" * 3
    told = (
        f"model 'other' does not exist; models of generated text: default, {CHAT}; the model is still default",
        f"model '{DENSE}' generates no text; models of generated text: default, {CHAT}; the model is still default",
        f"the model is {CHAT}\n",
        f"the model is {CHAT}; models of generated text: default, {CHAT}\n",
        "the message of the system is set",
        "there is no message of the system",
    )
    assert all(text in done.stderr for text in (*told, "/model NAME and /system TEXT"))
    first, _, third = (call.messages or [] for call in server.engine.calls)
    assert [message["content"] for message in first] == ["be brief", "one"]
    assert [message["content"] for message in third] == ["one", "Hello you", "two", "Hello you", "three"]


def test_run_asks_a_server_that_has_the_model(
    server: RecordedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with server.listening() as url:
        assert main(["run", CHAT, "hi", "--url", url, "--max-tokens", "3"]) == 0
        assert capfd.readouterr().out == "Hello you\n"
        assert main(["run", "org/none", "--url", url]) == 3
    refused = capfd.readouterr().err
    assert (
        "has the model 'org/none' (404: Model 'org/none' not found); leave --url out to start one" in refused
    )
    [call] = server.engine.calls
    assert call.ending.max_tokens == 3


def test_reasoning_is_left_out_where_nobody_looks_and_of_the_conversation(server: RecordedServer) -> None:
    server.script([[Started(4)], [Reasoning(0, "hm")], [Text(0, "Yes"), Finished(0, "stop"), ENDED]])
    with server.listening() as url:
        done = piped(url, "one", "two")
    assert done.stdout == "Yes\nYes\n"
    assert server.engine.calls[1].messages[1]["content"] == "Yes"


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = api_keys.fresh()
    server = RecordedServer(tmp_path, Gate((api_keys.KeyEntry("me", api_keys.hashed(key)),)))
    with server.listening() as url:
        without = piped(url, "one")
        monkeypatch.setenv("PENSTOCK_KEY", key)
        assert piped(url, "one").stdout == "Hello you\n"
    assert without.returncode == 1 and "an API key is needed" in without.stderr


def test_a_failed_answer_is_told_and_forgotten(server: RecordedServer) -> None:
    server.script([[Started(4)], WorkerLost("the worker died")], [[Started(4)], WorkerLost("again")])
    with server.listening() as url:
        done = piped(url, "one", "two")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == ["penstock: the worker died", "penstock: again"]
    assert [len(call.messages) for call in server.engine.calls] == [1, 1]


def test_an_unknown_model_and_an_absent_server_are_told_in_one_line(server: RecordedServer) -> None:
    with server.listening() as url:
        unknown = piped(url, "one", arguments=("no/model",))
    assert (unknown.returncode, unknown.stdout, server.engine.calls) == (1, "", [])
    there = f"models of generated text: default, {CHAT}"
    assert unknown.stderr == f"penstock: model 'no/model' does not exist; {there}\n"
    absent = piped(url, "one")
    assert absent.returncode == 1
    assert absent.stderr.startswith(f"penstock: no answer from {url}: ") and absent.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["localhost:80", "http://", "http://h:port", "unix:/run/x", "http://[::1"])
def test_an_address_that_is_none_is_a_wrong_setting(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 3
    assert repr(url) in capsys.readouterr().err


def test_a_key_that_no_header_can_hold_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "pk_a\r\nX-Other: b")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 3
    assert "PENSTOCK_KEY: this is no API key" in capsys.readouterr().err


class Told(Server):
    """A server that answers with the bodies that are given, by path, and refuses other paths."""

    def __init__(self, **bodies: bytes) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self._bodies = bodies

    @contextmanager
    def asked(self, method: str, path: str, body: Any = None) -> Iterator[Any]:
        """The answer to a GET."""
        name = path.removeprefix("/v1/").replace("/", "_")
        if name not in self._bodies:
            raise Refused("not found", 404, "")
        yield io.BytesIO(self._bodies[name])


def test_a_server_of_others_has_the_models_of_its_list_and_none_is_refused_without_a_list() -> None:
    listed = b'{"data": [{"id": "a/b"}, {"id": "c\\u001b"}], "object": "list"}'
    server = Told(models=listed)
    assert server.absence("a/b") == ""
    assert server.absence("x") == "model 'x' does not exist; models of generated text: a/b, c"
    many = b'{"data": [%s]}' % b",".join(b'{"id": "%d"}' % number for number in range(30))
    assert Told(models=many).absence("x").endswith(" 18, 19 and 10 more")
    vectors = b'{"data": [{"id": "v"}], "models": [{"name": "v", "outputs": ["dense"]}]}'
    none = "model 'default' does not exist; models of generated text: none"
    assert Told(models=vectors).absence("default") == Told(models=b'{"data": []}').absence("default") == none
    for body in (b"{", b"5", b"{}", b'{"data": [5]}'):
        assert Told(models=body).absence("x") == "" and Told(models=body).models() is None
    assert Told().absence("x") == "" and Told(models_x=b"{}").absence("x") == ""
    assert Told(models=listed).absence("\udcff").startswith("model '\\udcff' does not exist")


@pytest.mark.parametrize("data", [b"{", b"5", b"{}", b'{"choices": 5}', b'{"choices": [{}]}'])
def test_a_stream_of_another_server_is_told(data: bytes) -> None:
    response: Any = [b": comment\n", b"data: " + data + b"\n"]
    with pytest.raises(NoAnswer, match="cannot be read"):
        list(pieces(response, {}))


def test_no_answer_moves_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(screen, "isatty", lambda: True)
    shown = chat._Shown()
    shown.add("content", "a\x1b]0;title\x07\rb\x9bc\n\td")
    assert screen.getvalue() == "a]0;titlebc\n\td"


class Screen:
    """What the program has shown on our side of a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = b""

    @property
    def text(self) -> str:
        """All that was shown."""
        return self._seen.decode(errors="replace")

    def _shows(self, text: str, times: int) -> bool:
        if select.select([self._descriptor], [], [], 0)[0]:
            self._seen += os.read(self._descriptor, 4096)
        return self.text.count(text) >= times

    def wait(self, text: str, times: int = 1) -> None:
        """Wait until a text was shown so many times."""
        wait_until(lambda: self._shows(text, times), what=f"{text!r}, {times} times")

    def type(self, line: str, *, after: str, times: int = 1) -> None:
        """Type a line, or the end of the input, at a prompt that was shown so many times."""
        self.wait(after, times)
        os.write(self._descriptor, line.encode() if line == "\x04" else f"{line}\n".encode())


@contextmanager
def terminal(url: str, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The program on a terminal of its own: our side of the terminal, and the process."""
    ours, theirs = pty.openpty()
    # A session of its own makes the terminal the controlling one, so that Ctrl-C becomes a signal.
    process = subprocess.Popen(
        [sys.executable, "-c", _ON_TERMINAL, *COMMAND[1:], *arguments, "--url", url],
        cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


_ON_TERMINAL = (
    # A shell that runs the tests in the background has them ignore the signal.
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def test_ctrl_c_ends_an_answer_and_not_the_program(server: RecordedServer) -> None:
    endless = [[Started(4)], [Text(0, "Once upon")], None]
    server.script(endless, [[Started(4)], [Text(0, "The end"), Finished(0, "stop"), ENDED]])
    with server.listening() as url, terminal(url) as (screen, process):
        seen = Screen(screen)
        seen.type("a tale", after="> ")
        seen.wait("Once upon")
        os.write(screen, b"\x03")
        seen.wait("stopped")
        wait_until(lambda: server.engine.ended == 1, what="the server's end of it")
        seen.wait("> ", 2)
        os.write(screen, b"a slip\x03")
        seen.type("go on", after="> ", times=3)
        seen.wait("2 tokens, 4.0 tokens/s, the first after 0.50 s")
        # NOTE: the end of the input is lost where the terminal is not yet in the mode of the prompt.
        seen.type("\x04", after="> ", times=4)
        assert process.wait(60) == 0
    said = [message["content"] for message in server.engine.calls[1].messages]
    assert said == ["a tale", "Once upon", "go on"]


def test_a_rate_is_told_only_where_the_writing_took_long_enough(server: RecordedServer) -> None:
    at_once = Ended(4, 6, prompt_s=0.5, completion_s=0.0003)
    server.script([[Started(4)], [Text(0, "The end"), Finished(0, "stop"), at_once]])
    with server.listening() as url, terminal(url) as (screen, process):
        seen = Screen(screen)
        seen.type("a tale", after="> ")
        seen.wait("6 tokens, the first after 0.50 s")
        seen.type("\x04", after="> ", times=2)
        assert process.wait(60) == 0
