"""Files, sessions and decisions of the state directory against the same bytes and rows without state, in turn.

1. Files: 64 MiB are uploaded to `/v1/files` and downloaded again. Beside stands a plain copy through the same HTTP
   server: an application of a few lines writes the body to a file, and sends the file. The most memory that a process
   takes in a turn is read from the kernel.
2. Rows: a session of 4 KiB is saved, and a file is looked up. Beside stand the same rows in bare SQLite, with the same
   safety, a commit for each row, by processor time.
3. Decisions: a process has 300 waits; this process, in the place of another frontend, decides about them in turn. The
   times are those between the call of `decide` and the end of the wait. The processor time of waiting is that of
   the other process while nobody decides, beside an event loop that only wakes up as often.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.connection import Connection
from benchmarks.load import Address
from benchmarks.processes import Server, free_port
from benchmarks.report import Report, Row
from benchmarks.serving import answers, frontend_pids, penstock
from frontend.state.approvals import LOOK_EVERY_S, ApprovalStore, Decision
from frontend.state.files import FileStore, Origin
from frontend.state.places import OnDisk
from frontend.state.sessions import SessionStore
from ipc.settings import State

NBYTES = 64 << 20
WAITS = 300
_PIECE_NBYTES = 1 << 20
_PLAIN = """
from frontend.arbiter.hooks import take_over
from frontend.server.serving import PenstockWorker

bind = "127.0.0.1:{port}"
wsgi_app = "benchmarks.state:plain"
worker_class = "frontend.server.serving.PenstockWorker"
control_socket_disable = True
on_starting = lambda server: take_over(server, lambda: 1)
"""
_HEAD = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x\r\n'
_HEAD += b'Content-Disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'
_TAIL = b"\r\n--x--\r\n"


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that keeps one body in the file of its query, and sends the file back."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    place = Path(scope["query_string"].decode() or "/dev/null")
    # NOTE: the calls block the event loop for the time of a copy in memory, as a plain copy may.
    with place.open("wb" if scope["method"] == "POST" else "rb", buffering=0) as file:  # noqa: ASYNC230
        more = scope["method"] == "POST"
        while more:
            message = await receive()
            file.write(message.get("body", b""))
            more = message.get("more_body", False)
        nbytes = place.stat().st_size if scope["method"] == "GET" else 0  # noqa: ASYNC240
        head = [(b"content-length", b"%d" % nbytes)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        while nbytes > 0:
            piece = file.read(_PIECE_NBYTES)
            nbytes -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": nbytes > 0})
        if scope["method"] == "POST" or place.name == "null":
            await send({"type": "http.response.body", "body": b""})


@contextmanager
def plain_server(place: Path) -> Iterator[Server]:
    """The HTTP server of Penstock with the application `plain`."""
    port = free_port()
    config = place / "plain.conf.py"
    config.write_text(_PLAIN.format(port=port))
    command = [sys.executable, "-m", "gunicorn", "-c", str(config)]
    with Server("plain", command, ("127.0.0.1", port), lambda: answers(("127.0.0.1", port), "/")) as server:
        yield server


def upload(path: str, kind: str, *parts: bytes) -> tuple[bytes, ...]:
    """A whole POST request, its parts apart."""
    length = sum(map(len, parts))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    )
    return head.encode(), *parts


def download(path: str) -> bytes:
    """A whole GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


class Peak:
    """The most memory of a process since the start of this object, without what the process had before."""

    def __init__(self, pid: int) -> None:
        self._place = Path(f"/proc/{pid}")
        (self._place / "clear_refs").write_text("5")
        self._before = self._value("VmRSS")

    def _value(self, name: str) -> int:
        lines = (self._place / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

    @property
    def nbytes(self) -> int:
        """The growth."""
        return self._value("VmHWM") - self._before


def sent(address: Address, *request: bytes) -> tuple[float, bytes]:
    """Seconds and body of an answered request. Raises ValueError for another status than 200."""
    with Connection(address) as connection:
        began = time.perf_counter()
        status, body = connection.fetch(*request)
        elapsed = time.perf_counter() - began
    if status != 200:
        raise ValueError(f"status {status}: {body[:300]!r}")
    return elapsed, body


def received(address: Address, request: bytes) -> float:
    """Seconds of a body of NBYTES. Raises ValueError for anything else."""
    with Connection(address) as connection:
        found = connection.drain(request)
    if (found.status, found.nbytes) != (200, NBYTES):
        raise ValueError(f"status {found.status} with {found.nbytes} bytes")
    return found.last_byte_s


def files(rounds: int, report: Report) -> list[Row]:
    """Uploads and downloads in turn."""
    data = bytes(range(256)) * (NBYTES >> 8)
    times: dict[str, list[float]] = {name: [] for name in ("up", "plain up", "down", "plain down")}
    peaks: dict[str, list[int]] = {"up": [], "down": []}
    with (
        tempfile.TemporaryDirectory() as place,
        penstock("fake/noop", {"server.frontends": 1}, fakes=True) as server,
        plain_server(Path(place)) as bare,
    ):
        [pid] = frontend_pids(server)
        copy = f"/?{place}/copy"
        for turn in range(rounds + 1):
            peak = Peak(pid)
            form = upload("/v1/files", "multipart/form-data; boundary=x", _HEAD, data, _TAIL)
            up, body = sent(server.address, *form)
            up_peak, peak = peak.nbytes, Peak(pid)
            path = f"/v1/files/{json.loads(body)['id']}"
            down = received(server.address, download(f"{path}/content"))
            down_peak = peak.nbytes
            plain_up, _ = sent(bare.address, *upload(copy, "application/octet-stream", data))
            plain_down = received(bare.address, download(copy))
            sent(server.address, f"DELETE {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            peaks["up"].append(up_peak)
            peaks["down"].append(down_peak)
            if turn:
                for name, value in zip(times, (up, plain_up, down, plain_down), strict=True):
                    times[name].append(value)
                report.say(
                    f"round {turn}: {up:.2f} s up, {down:.2f} s down; plain {plain_up:.2f}, {plain_down:.2f}"
                )
    rows: list[Row] = []
    for name, title in (("up", "upload of 64 MiB"), ("down", "download of 64 MiB")):
        shares = [bare / ours for ours, bare in zip(times[name], times[f"plain {name}"], strict=True)]
        rows.append([f"{title}, speed beside a plain copy", median(shares), 0.5, None])
        rows.append([f"{title}, MiB of memory", max(peaks[name]) / 2**20, None, 8.0])
    return rows


async def in_turn(
    rounds: int, count: int, ours: Callable[[int], Awaitable[object]], bare: Callable[[int], object]
) -> float:
    """The median of the processor time of bare SQLite over ours, of rounds of `count` calls."""
    shares = []
    for turn in range(rounds):
        numbers = range(turn * count, (turn + 1) * count)
        began = time.process_time()
        for number in numbers:
            await ours(number)
        middle = time.process_time()
        for number in numbers:
            bare(number)
        shares.append((time.process_time() - middle) / (middle - began))
    return median(shares)


def bare_sqlite(place: Path) -> sqlite3.Connection:
    """A file with the columns of sessions and files, as safe as those of the server."""
    connection = sqlite3.connect(place / "bare.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    columns = "owner TEXT, id TEXT, saved REAL, digest BLOB, messages BLOB, files BLOB, nbytes INTEGER"
    connection.execute(f"CREATE TABLE sessions ({columns}, PRIMARY KEY (owner, id))")
    return connection


async def rows(rounds: int, count: int) -> list[Row]:
    """Session saves, and look-ups of files."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x" * 4000},
        {"role": "assistant", "content": "y"},
    ]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sessions, stored = SessionStore(OnDisk(place), State()), FileStore(OnDisk(place), State())
        connection = bare_sqlite(place)
        encoded = json.dumps(messages).encode()

        def save(number: int) -> None:
            row = ("a", f"{number % 50}", time.time(), b"d" * 16, encoded, b"[]", len(encoded))
            connection.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        saves = await in_turn(
            rounds, count, lambda number: sessions.save("a", f"{number % 50}", messages, []), save
        )
        origin = Origin("upload", 0, 0)
        ids = [
            (await stored.add("a", b"x", name="a.txt", purpose="user_data", origin=origin)).id
            for _ in range(50)
        ]

        def find(number: int) -> object:
            query = "SELECT * FROM sessions WHERE owner = ? AND id = ?"
            return connection.execute(query, ("a", f"{number % 50}")).fetchone()

        looks = await in_turn(rounds, count, lambda number: stored.get("a", ids[number % 50]), find)
        connection.close()
    return [
        ["saves of a session, processor time of bare SQLite over theirs", saves, 0.5, None],
        ["look-ups of a file, processor time of bare SQLite over theirs", looks, 0.5, None],
    ]


async def waiting(place: Path, idle_s: float) -> None:
    """The other process: the processor time of nothing and of waits, then the instant of each decision."""
    store = ApprovalStore(OnDisk(place), State(approval_wait_s=3600.0))
    ids = [f"w{number}" for number in range(WAITS)]

    async def used(pause_s: float) -> float:
        began, until = time.process_time(), time.monotonic() + idle_s
        while time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(pause_s)
        return (time.process_time() - began) / idle_s

    without, awake = await used(idle_s), await used(LOOK_EVERY_S)
    for each in ids:
        await store.announce("a", "s", each)
    ends: dict[str, float] = {}

    async def one(name: str) -> None:
        await store.wait(name, 3600.0)
        ends[name] = time.monotonic()

    waits = [asyncio.create_task(one(each)) for each in ids]
    await asyncio.sleep(1.0)
    print(json.dumps([without, awake, await used(idle_s)]), flush=True)
    await asyncio.wait(waits)
    print(json.dumps(ends), flush=True)


async def decisions(idle_s: float) -> list[Row]:
    """Decide about all waits of another process."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.state", "--waits", place, "--idle", str(idle_s)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220
            assert child.stdout is not None
            without, awake, waits = json.loads(child.stdout.readline())
            store = ApprovalStore(OnDisk(Path(place)), State())
            began: dict[str, float] = {}
            for number in range(WAITS):
                began[f"w{number}"] = time.monotonic()
                await store.decide("a", f"w{number}", Decision(True))
                await asyncio.sleep(0.01)
            ends = json.loads(child.stdout.readline())
    times = [(ends[name] - begin) * 1e3 for name, begin in began.items()]
    return [
        [f"a decision at another process, {WAITS} waits, p50 ms", median(times), None, None],
        [f"a decision at another process, {WAITS} waits, p99 ms", quantiles(times, n=100)[98], None, 100.0],
        [f"% of a core for {WAITS} waits", (waits - without) * 100, None, 0.1],
        ["% of a core of an event loop that wakes up as often", (awake - without) * 100, None, None],
        ["% of a core without a wait", without * 100, None, None],
    ]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--full", action="store_true", help="the rounds that published figures need")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds that the processor time of waiting is read for"
    )
    parser.add_argument("--waits", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.waits:
        asyncio.run(waiting(Path(options.waits), options.idle))
        return
    rounds = 9 if options.full else 3
    report = Report("state", "Files, sessions and decisions", {"rounds": rounds, "idle s": options.idle})
    found = files(rounds, report)
    found += asyncio.run(rows(rounds, 500))
    found += asyncio.run(decisions(options.idle))
    report.table("Medians in turn", ["what", "measured", "target at least", "target at most"], found)
    report.save(found)


if __name__ == "__main__":
    main()
