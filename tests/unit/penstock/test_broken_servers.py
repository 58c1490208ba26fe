"""Commands that ask a server, against servers that are broken: one line that says why, and exit code 1."""

from __future__ import annotations

import functools
import gzip
import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock import cli, http_client
from penstock.cli import main
from penstock.command_line import parser
from tests.fakes.clock import Clock

_CLOSE = "Connection: close\r\n"
_HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"
_DEEP = b'{"error": ' + b"[" * 100_000


def _answer(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}{_CLOSE}\r\n"
    return head.encode() + body


def _stream(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """An event stream in chunks; `end` is what follows."""
    lines = [b"data: " + event + b"\n\n" for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(line), line) for line in lines)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    return head + _CLOSE.encode() + b"\r\n" + chunks + end


_PIECE = b'{"choices": [{"delta": {"content": "Hel"}}]}'
_ANSWERS = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a cut head": b"HTTP/1.1 200 O",
    "a head without an end": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n",
    "a status that is no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "a header that is none": b"HTTP/1.1 200 OK\r\n\x00\x01: \xff\r\n\r\n{}",
    "a length that is no number": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "a cut body": b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"a',
    "a cut error": b'HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\n{"a',
    "a cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{",
    "a chunk without a size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{",
    "a compressed body that is none": _answer(b"{}", more="Content-Encoding: gzip\r\n"),
    "a compressed body": _answer(gzip.compress(_HTML), more="Content-Encoding: gzip\r\n"),
    "no body": _answer(b""),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a page": _answer(_HTML, kind="text/html"),
    "a page of a proxy": _answer(_HTML, "502 Bad Gateway", "text/html"),
    "bytes": _answer(b"\xff\xfe\x00\x80"),
    "a text of other bytes": _answer(b'{"id": "\xff", "data": [{"id": "\xff"}], "models": []}'),
    "a number": _answer(b"5"),
    "null": _answer(b"null"),
    "a text": _answer(b'"error"'),
    "a list": _answer(b"[1]"),
    "an object": _answer(b'{"usage": 5, "items": 5, "inputs": 5}'),
    "a model without outputs": _answer(b'{"inputs": [], "usage": 5}'),
    "a model of an unknown datatype": _answer(
        b'{"inputs": [{"name": "x", "datatype": "FP7", "shape": [1]}], "outputs": [], "usage": 5}'
    ),
    "lists in lists": _answer(_DEEP),
    "an error of lists in lists": _answer(_DEEP, "500 Oops"),
    "an error of null": _answer(b'{"error": null}', "500 Oops"),
    "an error of a number": _answer(b'{"error": 5, "detail": [1]}', "500 Oops"),
    "an error without a message": _answer(b'{"error": {"code": 7}}', "418 Teapot"),
    "an error of other bytes": _answer(b'\xff{"error"', "500 Oops"),
    "a redirect to itself": _answer(b"", "302 Found", more="Location: /\r\n"),
    "a redirect to nowhere": _answer(b"", "307 Temporary Redirect"),
    "a redirect to no address": _answer(b"", "308 Permanent Redirect", more="Location: http://[::1\r\n"),
    "a stream that is cut": _stream(_PIECE, end=b""),
    "a stream that ends before its answer": _stream(_PIECE),
    "a stream of no JSON": _stream(b"Hel"),
    "a stream of numbers": _stream(b"5"),
    "a stream of texts": _stream(b'"error"'),
    "a stream of lists in lists": _stream(_DEEP),
    "a stream without deltas": _stream(b'{"choices": [{}]}'),
    "a stream of other deltas": _stream(b'{"choices": [{"delta": "Hel"}]}'),
    "a stream of other choices": _stream(b'{"choices": 5}'),
    "a stream with an error": _stream(_PIECE, b'{"error": {"message": "the model failed"}}'),
    "a stream with an error of text": _stream(b'{"error": "the model failed"}'),
    "a stream with an error without a message": _stream(b'{"error": {}}'),
    "a stream of other bytes": _stream(b'{"choices": [{"delta": {"content": "\xff"}}]}'),
    "a line without an end": _stream(b"x" * 1_000_000),
}
_COMMANDS = {
    "bench": ["bench", "m", "--protocol", "embeddings", "--requests", "1"],
    "bench chat": ["bench", "--protocol", "chat", "--requests", "1"],
    "embed": ["embed", "in.jsonl", "out.npy", "--model", "m", "--tries", "2"],
    "chat": ["chat"],
    "layout": ["layout", "m"],
}
_LOOKING = {"status": ["status"], "ps": ["ps"], "sweep": ["sweep"]}
"""Commands that look at processes of this machine, which ask no server over HTTP."""


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The address of a server that gives these answers in turn, the last one to all further requests, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    waiting = list(answers)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                _take(connection)
                connection.sendall(waiting.pop(0) if len(waiting) > 1 else waiting[0])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _take(connection: socket.socket) -> None:
    """Read one request, so that the end of the connection is no reset."""
    taken = b""
    while b"\r\n\r\n" not in taken:
        taken += connection.recv(65536)
    head, _, body = taken.lower().partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    missing = sum(map(int, lengths)) - len(body)
    while missing > 0:
        missing -= len(connection.recv(65536))


_parser = functools.cache(parser)
"""PERF: half of the time of these tests would make the parser anew."""


@pytest.fixture(autouse=True)
def pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a command has paused; pauses take no time. The directory of the test holds a line to embed."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(cli, "parser", _parser)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_KEY", raising=False)
    (tmp_path / "in.jsonl").write_text('"hello"\n')
    return found


def _run(command: str, url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    return main([*(_COMMANDS | _LOOKING)[command], "--url", url])


@pytest.mark.parametrize("command", _COMMANDS | _LOOKING)
@pytest.mark.parametrize(
    "url",
    [
        "http://user:geheim@127.0.0.1:9",
        "http://user:geheim@127.0.0.1:99999",
        "http://user:geheim/x@127.0.0.1:9",
        "http://geheim@/",
        "user:geheim@host",
    ],
)
def test_a_password_in_an_address_is_refused_and_never_shown(
    command: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(command, url, monkeypatch) == 3
    told = capsys.readouterr()
    assert "no password" in told.err and "--key-file" in told.err
    assert "geheim" not in told.err + told.out


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("https://other.example/v1", "https://other.example/v1"),
        ("https://user:geheim@other.example/v1", "https://other.example/v1"),
        ("https://user:geheim@other.example/@a?b=http://c@d", "https://other.example/@a?b=http://c@d"),
        ("/@else\x1b[2J", "/@else"),
    ],
)
def test_chat_names_the_address_that_a_server_sends_requests_on_to(
    location: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(_answer(b"", "308 Permanent Redirect", more=f"Location: {location}\r\n")) as url:
        assert _run("chat", url, monkeypatch) == 1
    told = capsys.readouterr().err
    assert f"308: the server sends requests on to {shown}" in told
    assert "geheim" not in told and "\x1b" not in told


@pytest.mark.sample
@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("answer", _ANSWERS)
def test_a_broken_answer_is_told_in_one_line(
    command: str, answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(_ANSWERS[answer]) as url:
        assert _run(command, url, monkeypatch) == 1
    told = capsys.readouterr()
    # A load has figures once the first request was answered with 200.
    lines = [line for line in told.out.splitlines() if line.startswith("failed: ")] or told.err.splitlines()
    assert len(lines) == 1 or command == "embed", "the errors of lines come before the error of the whole"
    assert lines[-1].startswith(("penstock: ", "failed: ")) and len(lines[-1]) > len("penstock: ")


@pytest.mark.parametrize("command", [["list"], ["show", "m"], ["chat"]])
def test_texts_of_other_bytes_are_no_list_of_models_and_no_model(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with answering(_ANSWERS["a text of other bytes"]) as url:
        assert main([*command, "--url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock: ") and error.count("\n") == 1


@pytest.mark.parametrize("answer", _ANSWERS)
def test_run_takes_no_broken_answer_for_a_server_of_its_model(
    answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(_ANSWERS[answer]) as url:
        assert main(["run", "m", "hello", "--url", url]) == 3
    error = capsys.readouterr().err
    assert (
        error.startswith(f"penstock: run: no server at {url} has the model 'm' (") and error.count("\n") == 1
    )


@pytest.mark.parametrize("command", [["run", "m", "hello"], ["layout", "m"], ["chat"]])
def test_a_redirection_does_not_get_the_key(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_KEY", "geheim")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"http://127.0.0.1:{other.getsockname()[1]}/"
        with answering(_answer(b"", "302 Found", more=f"Location: {address}\r\n")) as url:
            assert main([*command, "--url", url]) in (1, 3)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert f"302: the server sends requests on to {address}; name" in capsys.readouterr().err


def test_run_asks_a_server_past_the_proxies_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering(_answer(b'{"name": "m"}'), _stream(_PIECE, b"[DONE]")) as url:
        assert main(["run", "m", "hello", "--url", url]) == 0
    assert capsys.readouterr().out == "Hel\n"


_ERRORS = [
    ("nothing", "no answer"),
    ("a cut head", "no answer"),
    ("a cut chunk", "no answer"),
    ("a page", "stream broke off"),
    ("a page of a proxy", "502"),
    ("a stream that is cut", "stream broke off"),
    ("a stream that ends before its answer", "stream broke off"),
    ("a stream of no JSON", "answer cannot be read"),
    ("a stream of other deltas", "answer cannot be read"),
    ("a stream of lists in lists", "answer cannot be read"),
    ("a stream with an error", "error in the stream"),
    ("a stream with an error of text", "error in the stream"),
]
_WHOLE = _stream(_PIECE, b'{"choices": [], "usage": {"completion_tokens": 7}}', b"[DONE]")


@pytest.mark.parametrize(("answer", "error"), _ERRORS)
def test_a_load_tells_the_failures_of_streams_apart(
    answer: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--protocol", "chat", "--requests", "2", "--connections", "1", "--json"]
    with answering(_WHOLE, _WHOLE, _ANSWERS[answer]) as url:
        assert main([*command, "--url", url]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["requests"], found["succeeded"], found["errors"]) == (2, 1, {error: 1})


@pytest.mark.parametrize(
    ("protocol", "whole", "broken"),
    [
        ("embeddings", _answer(b'{"data": []}'), _answer(b'{"id": "\xff"}')),
        ("embeddings", _answer(b'{"data": []}'), _answer(b'{"\xff": 1}')),
        ("encode", _answer(b"\x80"), _answer(b"\x81\xa2id\xa1\xff")),
        ("score", _answer(b"\x80"), _answer(b"\x81\xa1\xff\x01")),
        ("chat", _WHOLE, _stream(b'{"id": "\xff", "choices": []}', b"[DONE]")),
    ],
)
def test_a_load_counts_an_answer_with_texts_of_other_bytes_as_one_that_cannot_be_read(
    protocol: str, whole: bytes, broken: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "m", "--protocol", protocol, "--requests", "2", "--connections", "1", "--json"]
    with answering(whole, whole, broken) as url:
        assert main([*command, "--url", url]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert (found["requests"], found["succeeded"], found["errors"]) == (2, 1, {"answer cannot be read": 1})


@pytest.mark.parametrize("usage", [b"", b', "usage": {}', b', "usage": null'])
def test_a_load_tells_no_rate_of_tokens_that_the_server_does_not_count(
    usage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    last = b'{"choices": []' + usage + b"}"
    with answering(_stream(_PIECE, last, b"[DONE]")) as url:
        assert main(["bench", "--protocol", "chat", "--requests", "1", "--json", "--url", url]) == 0
        assert msgspec.json.decode(capsys.readouterr().out)["tokens_per_s"] is None
    with answering(_answer(b'{"data": []' + usage + b"}")) as url:
        assert (
            main(["bench", "m", "--protocol", "embeddings", "--requests", "1", "--json", "--url", url]) == 0
        )
        assert msgspec.json.decode(capsys.readouterr().out)["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("header", "pause_s"),
    [
        ("7", 7),
        ("7.5", 7.5),
        ("0", 0.5),
        ("100000", 60),
        ("-3", 0.5),
        ("nan", 0.5),
        ("inf", 60),
        ("soon", 0.5),
        ("", 0.5),
        ("Thu, 01 Jan 1970 00:16:45 GMT", 5),
        ("Thursday, 01-Jan-70 00:16:45 GMT", 5),
        ("Thu Jan  1 00:16:45 1970", 5),
        ("Thu, 01 Jan 1970 00:16:35 GMT", 0.5),
        ("Thu, 01 Jan 2970 00:00:00 GMT", 60),
        ("Thu, 99 Jan 1970 00:16:45 GMT", 0.5),
    ],
)
def test_a_command_pauses_as_the_server_asks_in_seconds_or_by_a_date(
    header: str, pause_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock.of(http_client, monkeypatch)
    with answering(
        _answer(_HTML, "502 Bad Gateway", "text/html", f"Retry-After: {header}\r\n"), _answer(b"{}")
    ) as url:
        assert _run("bench", url, monkeypatch) == 0
    assert pauses == [pytest.approx(pause_s)]


@pytest.mark.parametrize(
    "host", ["a" * 64, "a..b", "127.0.0.1:9/\u00fc", "127.0.0.1:9/a b", "127.0.0.1:9/\n"]
)
def test_an_address_that_cannot_be_asked_is_a_wrong_flag(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("chat", f"http://{host}", monkeypatch) == 3
    assert "no address of a server" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["?key=geheim", "/?", "/#geheim", "?@"])
def test_an_address_with_a_query_is_a_wrong_flag_and_not_shown(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("chat", f"http://127.0.0.1:9{end}", monkeypatch) == 3
    error = capsys.readouterr().err
    assert "no ? and no #" in error and "geheim" not in error
