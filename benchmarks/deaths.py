"""Workers that are killed under 24 streams: the time until the next token of each stream that goes on elsewhere.

1. Serve a tiny Llama with random weights by two workers with one torch thread each and two frontends.
2. For each kill, alternately of one worker and the other: begin 24 streams, wait until a drawn part of their text has
   come, and send SIGKILL. Then read all streams to their ends, and wait until both workers have the model again.
3. A frontend logs the parts of each gap: the time until the request had left for the other worker (resend), until its
   prompt was tokenized there (prepare), the wait for a place in a step, and the prefill, of the prompt and all written
   tokens. What lacks to the gap that the client saw is the detection of the death by the frontend, with the way of the
   token back. How long the kernel took to end the process (exit) stands beside: frontends do not wait for that end.

The gap ends with the first text that a client reads after the frontend has told that the text goes on. A later pause of
the same stream, such as one beside the start of the next worker, is none of the death.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from statistics import median

from benchmarks.chat_models import generator, letters
from benchmarks.connection import Connection
from benchmarks.load import Address, percentile
from benchmarks.options import parser
from benchmarks.processes import Server, ServerFailed
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock, worker_pids
from benchmarks.streaming import Readers, Streamed, chat

MODEL = "bench/llama"
STREAMS, WORKERS = 24, 2
PROMPT, ANSWER = 256, 192
"""Tokens."""
MOST_BESIDE_S = 1.0
"""The longest gap of a stream may be longer than its prefill by so much."""
PARTS = ("exit", "detection", "resend", "prepare", "wait", "prefill")
_FAILED = ("refused", "unkept", "failed")
_POLL_S = 0.05
_PATIENCE_S = 120.0
_LINE = re.compile(r"goes on with a text: (.*)$")
_PART = re.compile(r"(\w+) ([\d.]+) ms")


@dataclass(frozen=True, slots=True)
class Gap:
    """One stream whose worker was killed. Times in seconds: from the kill to the next token, and its parts."""

    kill: int
    gap_s: float
    exit_s: float
    detection_s: float
    resend_s: float
    prepare_s: float
    wait_s: float
    prefill_s: float

    @property
    def beside_s(self) -> float:
        """The gap without the prefill."""
        return self.gap_s - self.prefill_s


def _named(request: bytes, name: str) -> bytes:
    """A request with an id, which the log of the server tells."""
    return request.replace(b"\r\n", b"\r\nX-Request-ID: " + name.encode() + b"\r\n", 1)


def _metric(address: Address, name: str, label: str = "") -> float:
    """The sum of the series of a family that have this label."""
    with Connection(address) as connection:
        _, body = connection.fetch(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    series = rf"^{name}(?:{{[^}}]*{label}[^}}]*}})? (\S+)$"
    return sum(map(float, re.findall(series, body.decode(), re.MULTILINE)))


def _wait(done: Callable[[], bool], what: str) -> None:
    until = time.perf_counter() + _PATIENCE_S
    while not done():
        if time.perf_counter() > until:
            raise ServerFailed(f"{what} took longer than {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


def _both_serve(server: Server) -> bool:
    """Whether both workers are up and have the model."""
    ready = _metric(server.address, "penstock_worker_up") == WORKERS
    return ready and _metric(server.address, "penstock_model_state", 'state="loaded"') == WORKERS


@dataclass(frozen=True, slots=True)
class Told:
    """What a frontend has told of a gap: seconds of its parts, and when the text went on (Unix seconds)."""

    parts: dict[str, float]
    at: float


class Exit:
    """Kills a process, and waits beside for its end. Instants are of `time.perf_counter`."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self._ended_at = 0.0
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()
        self.killed_at, self.killed_unix_s = time.perf_counter(), time.time()
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _wait(self) -> None:
        select.select([self._pidfd], [], [])
        self._ended_at = time.perf_counter()

    def seconds(self) -> float:
        """From the signal to the end of the process."""
        self._thread.join()
        os.close(self._pidfd)
        return self._ended_at - self.killed_at


def _told(log: str, name: str) -> Told | None:
    """What a frontend has told of a stream; None for a stream that was not carried on."""
    for line in log.splitlines():
        if line.startswith("{") and name in line:
            told = json.loads(line)
            if told.get("request_id") == name and (found := _LINE.search(told["message"])):
                at = datetime.fromisoformat(told["time"]).timestamp()
                return Told({part: float(ms) / 1e3 for part, ms in _PART.findall(found[1])}, at)
    return None


def _killed(server: Server, kill: int, draw: random.Random) -> list[Gap]:
    """The gaps of the streams of one killed worker."""
    names = [f"death-{kill}-{at}" for at in range(STREAMS)]
    # NOTE: one read may bring many tokens of a stream.
    enough = draw.uniform(1, 6) * STREAMS
    with Readers(server.address) as readers:
        for name in names:
            text = letters(PROMPT, name)
            readers.send(_named(chat(MODEL, text, ANSWER, ignore_eos=True), name))
        while readers.are_running and sum(len(each.arrivals) for each in readers.streams) < enough:
            readers.look()
        death = Exit(sorted(worker_pids(server))[kill % WORKERS])
        while readers.are_running:
            readers.look()
        if any(stream.tokens != ANSWER for stream in readers.streams):
            raise ServerFailed("a stream has lost tokens or has too many")
        log, exit_s = server.log, death.seconds()
        found = zip(readers.streams, [_told(log, name) for name in names], strict=True)
        return [_gap(kill, stream, death, exit_s, told) for stream, told in found if told is not None]


def _gap(kill: int, stream: Streamed, death: Exit, exit_s: float, told: Told) -> Gap:
    """The time from the kill to the text behind the one that went on; tokens of the dead worker may still arrive."""
    # NOTE: logs tell milliseconds, cut off. The text is read after the frontend has told.
    resumed_at = death.killed_at + (told.at - death.killed_unix_s)
    after = next(arrival for arrival in stream.arrivals if arrival >= resumed_at)
    gap_s = after - death.killed_at
    parts = told.parts
    return Gap(
        kill,
        gap_s,
        exit_s,
        gap_s - sum(parts.values()),
        parts["resend"],
        parts["prepare"],
        parts["wait"],
        parts["prefill"],
    )


def run(kills: int) -> Report:
    """Measure and save the report."""
    about = {"kills": kills, "streams": STREAMS, "prompt": PROMPT, "answer": ANSWER}
    report = Report("deaths", "Streams whose worker is killed", about)
    draw, gaps, hits = random.Random(4), list[Gap](), 0
    with generator(MODEL, "tiny") as (_, catalog):
        settings: Settings = {
            "catalog.dirs": str(catalog),
            "server.frontends": 2,
            "worker.count": WORKERS,
            "worker.torch_threads": 1,
            "worker.precision": "float32",
            "worker.healthy_after_s": 0.5,
            "limits.restart_wait_s": 60,
            "limits.load_wait_s": 60,
            "log.level": "info",
            "log.format": "json",
        }
        with penstock(MODEL, settings) as server:
            for kill in range(kills):
                _wait(lambda: _both_serve(server), "two workers")
                found = _killed(server, kill, draw)
                hits += bool(found)
                gaps += found
                report.say(f"kill {kill + 1}/{kills}: {len(found)} streams carried on")
            family = "penstock_continuations_total"
            failed = sum(_metric(server.address, family, f'outcome="{name}"') for name in _FAILED)
    report.say(f"{hits} of {kills} kills fell within a text, {failed:g} texts were cut off")
    show(report, gaps)
    report.save([asdict(gap) for gap in gaps])
    return report


def show(report: Report, gaps: list[Gap]) -> None:
    """The parts of the gaps of all streams, and the target."""
    if not gaps:
        raise ServerFailed("no kill fell within a text")
    rows: list[Row] = []
    for name in ("gap", *PARTS, "beside"):
        times = [1e3 * float(getattr(gap, f"{name}_s")) for gap in gaps]
        rows.append(
            [
                "gap without prefill" if name == "beside" else name,
                median(times),
                percentile(times, 95),
                max(times),
            ]
        )
    kills = len({gap.kill for gap in gaps})
    report.table(
        f"{len(gaps)} streams of {kills} kills, from the kill to the next token, ms",
        ["part", "p50", "p95", "longest"],
        rows,
    )
    longest = max(gap.beside_s for gap in gaps)
    met = "met" if longest <= MOST_BESIDE_S else "missed"
    report.note(
        f"Target: the longest gap at most {MOST_BESIDE_S:g} s above the prefill: {longest:.2f} s, {met}."
    )


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(20 if chosen.full else 4)


if __name__ == "__main__":
    main()
