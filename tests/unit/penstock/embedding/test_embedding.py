"""`penstock embed` without a server: lines, the file that is resumed, requests that are split and tried again."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import errno
import gzip
import io
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ipc.errors import ConfigError
from penstock import http_client
from penstock.cli import main
from penstock.embedding import job as jobs
from penstock.embedding import lines
from penstock.embedding.job import Job, Stopped
from penstock.embedding.lines import BadInput, ChangedInput, Lines
from penstock.embedding.output import Output, Rows
from penstock.embedding.progress import Shown
from penstock.http_client import Reply, Unreachable

ASKED: dict[str, Any] = {"model": "m", "dtype": "float32"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def vector(text: str) -> list[float]:
    """What the fake server makes of a text."""
    return [float(len(text)), float(sum(map(ord, text)))]


class Server:
    """Answers as `/v1/encode` does. A request with `poison` in a text is refused, `bad` is an error of its item."""

    url = "http://server"

    def __init__(self, stop_after: int | None = None, most_texts: int = 0) -> None:
        self.sizes: list[int] = []
        self._most_texts = most_texts
        self._stop_after = stop_after

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def post_until_answered(
        self, path: str, body: bytes, headers: Any, tries: int, again: Any
    ) -> Reply:
        assert path == "/v1/encode/org/m"
        texts = [item["text"] for item in msgspec.msgpack.decode(body)["items"]]
        if self._stop_after is not None and len(self.sizes) >= self._stop_after:
            return Reply(401, b'{"detail": {"message": "no key"}}')
        self.sizes.append(len(texts))
        if self._most_texts and len(texts) > self._most_texts:
            assert 504 not in again
            return Reply(504, b'{"detail": {"message": "too late"}}')
        if any("poison" in text for text in texts):
            return Reply(400, b'{"detail": {"code": "INVALID_INPUT", "message": "poison"}}')
        items = [
            {"error": {"code": "X", "message": "bad item"}} if text == "bad" else
            {"dense": {"values": {b"data": np.asarray(vector(text), "<f4").tobytes(), b"type": "<f4"}}}
            for text in texts
        ]  # fmt: skip
        return Reply(200, msgspec.msgpack.encode({"items": items}))


def written(*texts: str) -> bytes:
    return b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in texts)


def embedded(
    content: bytes,
    path: Path,
    server: Any = None,
    *,
    batch: int = 2,
    max_errors: int = 100,
    restart: bool = False,
) -> np.ndarray:
    """Run a job over `content`, and load the file."""
    options = argparse.Namespace(
        model="org/m", field="text", dtype="float32", dimensions=None, query=False, instruction=None,
        batch=batch, in_flight=2, tries=1, max_errors=max_errors,
    )  # fmt: skip
    output = Output(path, ASKED, restart=restart, force=False)
    try:
        job = Job(options, Lines(io.BytesIO(content), "text"), output, Shown("in.jsonl", len(content)))
        asyncio.run(job.run(server or Server()))
    finally:
        output.close()
    return np.load(path)


def save_after_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(jobs, "WINDOW_REQUESTS", 1)


def test_rows_stand_in_the_order_of_the_lines(tmp_path: Path) -> None:
    texts = [f"text {'x' * n}" for n in range(11)]
    found = embedded(written(*texts), tmp_path / "out.npy", batch=3)
    assert found.dtype == np.float32 and found.tolist() == [vector(text) for text in texts]
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


def test_lines_without_a_vector_are_told_by_number_and_keep_their_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b'\n{"text": 7}\n"plain"\nnot json\n{"other": "x"}\n' + written("a", "poison", "b", "bad", "c")
    found = embedded(content, tmp_path / "out.npy", batch=4)
    rows = [None, None, "plain", None, None, "a", None, "b", None, "c"]
    assert [None if np.isnan(row).all() else row.tolist() for row in found] == [
        text and vector(text) for text in rows
    ]
    told = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"in.jsonl, line {number}" for number in (1, 2, 4, 5, 7, 9)]


def test_a_refused_request_is_split_until_the_text_stands_alone(tmp_path: Path) -> None:
    server = Server()
    embedded(written("a", "b", "c", "poison"), tmp_path / "out.npy", server, batch=4)
    # The longest text comes first.
    assert server.sizes == [4, 2, 1, 1, 2]


def test_a_request_that_the_server_answers_too_late_is_split(tmp_path: Path) -> None:
    server = Server(most_texts=1)
    found = embedded(written("a", "b", "c"), tmp_path / "out.npy", server, batch=4)
    assert server.sizes == [3, 1, 2, 1, 1] and len(found) == 3


def test_long_texts_make_requests_of_fewer_texts() -> None:
    content = written(*["x" * 3000] * 60, *["y"] * 60)
    [window] = Lines(io.BytesIO(content), "text").windows(200)
    assert [len(request) for request in window.requests(50)] == [21, 21, 50, 28]
    [window] = Lines(io.BytesIO(written(*["x" * 9000] * 40)), "text").windows(200)
    assert [len(request) for request in window.requests(50)] == [16, 16, 8]


def test_texts_of_a_request_are_about_equally_long(tmp_path: Path) -> None:
    texts = ["x" * length for length in (3, 90, 1, 60, 2, 61, 91, 92)]
    [window] = Lines(io.BytesIO(written(*texts)), "text").windows(100)
    assert [[place for place, _ in request] for request in window.requests(3)] == [
        [7, 6, 1],
        [5, 3, 0],
        [4, 2],
    ]
    found = embedded(written(*texts), tmp_path / "out.npy", batch=3)
    assert found.tolist() == [vector(text) for text in texts]


def test_windows_and_requests_end_before_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_WINDOW_NBYTES", 40)
    monkeypatch.setattr(lines, "MAX_REQUEST_CHARACTERS", 12)
    content = written("a" * 5, "b" * 6, "c" * 50, "d" * 7)
    windows = list(Lines(io.BytesIO(content), "text").windows(100))
    assert [len(window.texts) for window in windows] == [2, 1, 1]
    assert [(window.begin, window.end) for window in windows][-1][1] == len(content)
    assert [len(request) for window in windows for request in window.requests(9)] == [2, 1, 1]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {n}" for n in range(9)] + ["poison"]
    whole = embedded(written(*texts), tmp_path / "whole.npy")
    save_after_each_request(monkeypatch)
    path, first = tmp_path / "out.npy", Server(stop_after=3)
    with pytest.raises(Stopped, match="401: no key"):
        embedded(written(*texts), path, first)
    assert not path.exists()
    part = tmp_path / "out.npy.part"
    # Rows that were written and not noted are cut off.
    part.write_bytes(part.read_bytes() + b"garbage")
    second = Server()
    found = embedded(written(*texts), path, second)
    assert sum(second.sizes) < sum(first.sizes) + len(texts)
    assert np.array_equal(found, whole, equal_nan=True)
    assert sum(first.sizes) > 0 and len(found) == 10


def test_a_server_that_is_killed_leaves_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(Server):
        async def post_until_answered(self, *asked: Any) -> Reply:
            if len(self.sizes) == 3:
                raise Unreachable("no answer from http://server")
            return await super().post_until_answered(*asked)

    save_after_each_request(monkeypatch)
    source, path = tmp_path / "in.jsonl", tmp_path / "out.npy"
    texts = [f"text {n}" for n in range(10)]
    source.write_bytes(written(*texts))
    command = ["embed", str(source), str(path), "--model", "org/m", "--batch", "2"]
    monkeypatch.setattr(http_client, "Asker", lambda *_: Killed())
    assert main(command) == 1 and not path.exists()
    told = re.search(r"http://server; (\d) lines are done, the same command goes on", capsys.readouterr().err)
    assert told
    second = Server()
    monkeypatch.setattr(http_client, "Asker", lambda *_: second)
    assert main(command) == 0 and f"{told[1]} lines are done already" in capsys.readouterr().err
    assert sum(second.sizes) == 10 - int(told[1]) < 10 and np.load(path).tolist() == [
        vector(text) for text in texts
    ]


def test_a_changed_input_or_other_flags_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_request(monkeypatch)
    path = tmp_path / "out.npy"
    with pytest.raises(Stopped):
        embedded(written(*"abcdefgh"), path, Server(stop_after=2))
    with pytest.raises(BadInput, match="changed since"):
        embedded(written(*"xbcdefgh"), path)
    with pytest.raises(ConfigError, match="of a run with model m; --restart"):
        Output(path, {**ASKED, "model": "n"}, restart=False, force=False)
    found = embedded(written(*"xbcdefgh"), path, restart=True)
    assert len(found) == 8 and found[0].tolist() == vector("x")


def test_a_last_line_that_goes_on_is_a_changed_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "finish", lambda self: None)
    path, content = tmp_path / "out.npy", b'"a"\n"b"'
    with pytest.raises(FileNotFoundError):
        embedded(content, path)
    with pytest.raises(ChangedInput):
        embedded(content + b' \n"c"\n', path)
    monkeypatch.undo()
    assert len(embedded(content, path)) == 2


def test_an_input_that_has_changed_is_not_said_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_request(monkeypatch)
    server = Server(stop_after=2)
    monkeypatch.setattr(http_client, "Asker", lambda *_: server)
    source = tmp_path / "in.jsonl"
    command = ["embed", str(source), str(tmp_path / "out.npy"), "--model", "org/m", "--batch", "2"]
    source.write_bytes(written(*"abcdefgh"))
    assert main(command) == 1 and "the same command goes on" in capsys.readouterr().err
    source.write_bytes(written(*"xbcdefgh"))
    assert main(command) == 1
    told = capsys.readouterr().err
    assert "--restart begins anew" in told and "goes on" not in told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b'"a"\n', mtime=0), "compressed with gzip"),
        ('"a"\n'.encode("utf-16"), "in UTF-16"),
        (b"PAR1....", "a Parquet file"),
    ],
)
def test_an_input_of_another_format_is_told_by_its_format(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        embedded(content, tmp_path / "out.npy")
    assert not list(tmp_path.iterdir())


def test_the_mark_of_utf_8_before_the_first_line_is_no_part_of_the_line(tmp_path: Path) -> None:
    found = embedded(codecs.BOM_UTF8 + b'"a"\r\n"b"\r\n', tmp_path / "out.npy")
    assert found.tolist() == [vector("a"), vector("b")]


@pytest.mark.parametrize("content", [b"{", b'{"asked": {"model": "\xff"}}'])
def test_a_restart_forgets_a_note_that_cannot_be_read(content: bytes, tmp_path: Path) -> None:
    path, note = tmp_path / "out.npy", tmp_path / "out.npy.part.json"
    note.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read: .*--restart begins anew"):
        Output(path, ASKED, restart=False, force=False)
    output = Output(path, ASKED, restart=True, force=False)
    assert output.progress.rows == 0 and not note.exists()
    output.close()


def test_rows_that_failed_before_a_run_stopped_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_request(monkeypatch)
    path, content = tmp_path / "out.npy", b"\n\n\n" + written("a", "b")
    with pytest.raises(Stopped):
        embedded(content, path, Server(stop_after=0), batch=1)
    found = embedded(content, path, batch=1)
    assert np.isnan(found[:3]).all() and found[3:].tolist() == [vector("a"), vector("b")]


def test_too_many_errors_and_a_server_that_takes_nothing_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="more than --max-errors 2 lines"):
        embedded(written("a", "b") + b"\n" * 6, tmp_path / "out.npy", max_errors=2)
    with pytest.raises(Stopped, match="took no text of the first 3 lines: 400: poison"):
        embedded(written("poison 1", "poison 2", "poison 3"), tmp_path / "other.npy", batch=3)


def test_two_runs_do_not_write_one_file_and_a_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "out.npy"
    output = Output(path, ASKED, restart=False, force=False)
    with pytest.raises(ConfigError, match="another run writes"):
        Output(path, ASKED, restart=False, force=False)
    output.close()
    path.touch()
    with pytest.raises(ConfigError, match="--force replaces"):
        Output(path, ASKED, restart=False, force=False)
    with pytest.raises(ConfigError, match=r"must end in \.npy or \.parquet"):
        Output(tmp_path / "out.txt", ASKED, restart=False, force=False)


def test_int8_vectors_keep_their_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**ASKED, "dtype": "int8"}
    path = tmp_path / "out.npy"
    for first in (0, 2):
        output = Output(path, asked, restart=False, force=False)
        values = np.asarray([[127, -3], [5, first]], np.int8)
        output.append(values, 3, [1], np.asarray([0.5, first], np.float32))
        output.save(1, "")
        output.close()
    output = Output(path, asked, restart=False, force=False)
    output.finish()
    output.close()
    assert np.load(path).tolist() == [[127, -3], [0, 0], [5, 0], [127, -3], [0, 0], [5, 2]]
    scales = np.load(tmp_path / "out.scale.npy")
    assert np.array_equal(scales, [0.5, np.nan, 0, 0.5, np.nan, 2], equal_nan=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.npy", "out.scale.npy"]


def test_a_run_that_was_killed_between_its_last_two_renames_finishes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "out.npy", {**ASKED, "dtype": "int8"}
    output = Output(path, asked, restart=False, force=False)
    output.append(np.asarray([[127, -3]], np.int8), 1, [], np.asarray([0.5], np.float32))
    output.save(1, "")
    rename = Path.replace

    def killed(place: Path, target: Path) -> Path:
        if target == path:
            raise KeyboardInterrupt
        return rename(place, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        output.finish()
    output.close()
    monkeypatch.undo()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "out.npy.part",
        "out.npy.part.json",
        "out.scale.npy",
    ]
    output = Output(path, asked, restart=False, force=False)
    output.finish()
    output.close()
    assert np.load(path).tolist() == [[127, -3]] and np.load(tmp_path / "out.scale.npy").tolist() == [0.5]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.npy", "out.scale.npy"]


def test_the_scale_of_an_answer_is_read() -> None:
    values = {b"data": b"\x7f\x00", b"type": "|i1"}
    body = msgspec.msgpack.encode({"items": [{"dense": {"values": values, "scale": 0.25}}]})
    found = jobs._Found()
    jobs._read(body, [4], found)
    assert found.vectors[4].tolist() == [127, 0] and found.scales == {4: 0.25}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[1]\n"])
def test_an_input_without_a_text_leaves_no_file(content: bytes, tmp_path: Path) -> None:
    with pytest.raises((BadInput, Stopped), match="no line"):
        embedded(content, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_a_disk_that_fills_is_told_and_the_run_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_request(monkeypatch)
    monkeypatch.setattr(http_client, "Asker", lambda *_: Server())
    source, path = tmp_path / "in.jsonl", tmp_path / "out.npy"
    texts = [f"text {'x' * n}" for n in range(1000)]
    source.write_bytes(written(*texts))
    command = ["embed", str(source), str(path), "--model", "org/m", "--batch", "100"]
    append, calls = Rows.append, 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # The first call writes no row.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(*arguments)

    monkeypatch.setattr(Rows, "append", full)
    assert main(command) == 1
    told = capsys.readouterr().err
    assert f"{path}: No space left on device; 200 lines are done, the same command goes on" in told
    assert not path.exists()
    assert main(command) == 0
    assert np.load(path).tolist() == [vector(text) for text in texts]


def test_progress_has_share_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    shown = Shown("in.jsonl", 4000, lambda: now)
    shown.begin(1000, 1000)
    now = 11.0
    shown.answered(550, 1000.0)
    assert shown.text(now) == "1,550 lines, 50 %, 50 a second, 22 s left"
    assert capsys.readouterr().err.splitlines() == ["penstock: 1,000 lines are done already", shown.text(now)]
    shown.answered(10, 10.0)
    assert not capsys.readouterr().err
    assert Shown("standard input", None, lambda: now).text(now + 1) == "0 lines, 0.0 a second"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = Shown("in.jsonl", 4000, lambda: now)
    now += 1
    shown.answered(1, 2000.0)
    shown.error(7, "not JSON")
    shown.answered(1, 1.0)
    now += 1
    shown.answered(1, 1999.0)
    shown.end()
    moved = capsys.readouterr().err
    assert moved.startswith(
        "\r\x1b[K1 lines, 50 %, 1.0 a second, 1 s left\r\x1b[Kin.jsonl, line 7: not JSON\n\r"
    )
    assert moved.endswith("\r\x1b[K3 lines, 100 %, 1.5 a second, 0 s left\n")


def test_parquet_has_the_lines_and_null_for_a_line_without_a_vector(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "out.parquet"
    output = Output(path, ASKED, restart=False, force=False)
    output.append(np.asarray([[1, 2], [3, 4]], np.float32), 3, [1])
    output.finish()
    output.close()
    table = parquet.read_table(path)
    assert table["line"].to_pylist() == [1, 2, 3]
    assert table["embedding"].to_pylist() == [[1, 2], None, [3, 4]]
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def test_a_refused_request_is_tried_again_after_the_pause_that_the_server_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies = [Reply(503, b"", 7.0), Reply(429, b""), Reply(200, b"ok")]
    pauses: list[float] = []
    client = http_client.Asker("http://server", "", 1, 1.0)

    async def post(*_: Any) -> Reply:
        return replies.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(client, "post", post)
    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    assert asyncio.run(client.post_until_answered("/", b"", {}, 3)).body == b"ok"
    assert pauses == [7.0, 1.0]
    replies = [Reply(503, b"", 1e9), Reply(503, b"last")]
    assert asyncio.run(client.post_until_answered("/", b"", {}, 2)).body == b"last"
    assert pauses[2:] == [60.0]


def test_only_a_server_that_has_answered_before_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", b""] * 2

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async def run() -> list[bytes]:
        server = await asyncio.start_server(answer, "127.0.0.1")
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http_client.Asker(url, "", 1, 5.0) as client:
            bodies = [(await client.post_until_answered("/", b"", {}, 3)).body for _ in range(2)]
        server.close()
        async with http_client.Asker(url, "", 1, 5.0) as client:
            with pytest.raises(http_client.Unreachable, match=r"no answer from .*: Connection refused; is a"):
                await client.post_until_answered("/", b"", {}, 3)
        return bodies

    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    assert asyncio.run(run()) == [b"ok", b"ok"]
    assert (pauses, answers) == ([0.5], [b""])


def test_https_to_a_server_without_tls_is_told() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1")
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http_client.Asker(url, "", 1, 60.0) as client:
            with pytest.raises(http_client.Unreachable, match="no TLS connection could be made"):
                await client.post_until_answered("/", b"", {}, 1)
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail": {"code": "X", "message": "a\\n b"}}', "400: a b"),
        (b'{"error": {"message": "openai"}}', "400: openai"),
        (b'{"error": "kserve"}', "400: kserve"),
        (b"<html>", "400: <html>"),
        (b"[1]", "400: [1]"),
    ],
)
def test_the_message_of_an_error_is_read_in_the_forms_of_all_protocols(body: bytes, message: str) -> None:
    assert Reply(400, body).message == message


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch", "0"),
        ("--in-flight", "-1"),
        ("--timeout", "0"),
        ("--timeout", "inf"),
        ("--timeout", "nan"),
        ("--max-errors", "-1"),
        ("--url", "ftp://x"),
        ("--key-file", "/nowhere"),
    ],
)
def test_wrong_flags_end_with_3(flags: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(written("a"))
    assert main(["embed", str(source), str(tmp_path / "out.npy"), "--model", "m", *flags]) == 3
    assert list(tmp_path.iterdir()) == [source]


def test_the_input_is_not_replaced_by_its_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.npy"
    source.write_bytes(written("a"))
    assert main(["embed", str(source), str(source), "--model", "m", "--force"]) == 3
    assert "the file of the vectors must not be the input" in capsys.readouterr().err
    assert source.read_bytes() == written("a")


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "in.jsonl", "out.npy", "--model", "\udcff"),
        ("embed", "in.jsonl", "out.npy", "--model", "m", "--field", "\udcff"),
        ("embed", "in.jsonl", "out.npy", "--model", "m", "--instruction", "\udcff"),
        ("bench", "\udcff"),
        ("bench", "m", "--text", "\udcff"),
        ("layout", "\udcff"),
    ],
)
def test_a_flag_that_is_no_text_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "'\\udcff' is no text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("body", [b'{"detail": {"message": "no\\u001b[2J\\nmodel"}}', b"no\x1b[2J model"])
def test_the_message_of_a_server_is_one_line_that_a_terminal_only_shows(body: bytes) -> None:
    assert Reply(404, body).message == "404: no[2J model"
