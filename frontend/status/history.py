"""The last hour of the whole server: one point every ten seconds, kept by one frontend for all, in one small file.

1. Every frontend runs a `Keeper`. The keeper that holds the lock of the history writes. The kernel drops the lock when
   the holder dies, and the next keeper goes on.
2. The writer reads the counters of all processes, makes a point from their difference to the counters before, and
   replaces the file. A file holds `KEPT` points, whatever the load.
3. Readers take the file as it is. A viewer gets all points with the first frame, and each new point later.

The run directory and its metric files begin anew with a server, and so does the history.

Points and frames are made from traces of the requests of all frontends: counters, histograms, recent requests, errors,
latencies.

1. `TrafficReader` reads the files of the run directory for the frames of one frontend.
2. `counted` sums the counters of all processes up to the few numbers that the charts of the page show.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from frontend.engine.interface import WorkerView
from frontend.records.recent import CLIENT_GONE, LiveRun, Recent, RecentReader, RunReader
from frontend.status.health import LOST, trouble
from ipc.errors import PenstockError
from ipc.metrics.files import MetricFiles, Totals
from ipc.processes.liveness import SlotLock, SlotTaken
from ipc.processes.paths import RunPaths

log = logging.getLogger(__name__)

SHOWN_REQUESTS = 24
SHOWN_ERRORS = 20
MEASURED_REQUESTS = 1024
MEASURED_S = 30.0
EVERY_S = 10.0
KEPT = 360
LONGEST_STEP_S = 60.0
"""Counters from longer ago make no point: a mean over so long a time would hide when the requests came."""
LOCK = "history"
DRAINED = "drained"
"""Why a worker ended that was asked to; its end is no death."""


class Counted(msgspec.Struct, frozen=True):
    """Sums of all processes. `in_flight` and `waiting` are of this moment; the others only rise.

    `deaths` counts ends of workers that nobody asked for.
    """

    requests: float = 0.0
    errors: float = 0.0
    tokens: float = 0.0
    busy_s: float = 0.0
    in_flight: float = 0.0
    waiting: float = 0.0
    deaths: float = 0.0


def counted(totals: Totals) -> Counted:
    """The sums of which a point of the history is made, from the metric files of all processes."""
    codes = totals.codes.get("penstock_requests", {})
    failed = (value for code, value in codes.items() if int(code) >= 400 and int(code) != CLIENT_GONE)
    return Counted(
        sum(codes.values()),
        sum(failed),
        _sum(totals, "penstock_tokens"),
        sum(totals.others.get("penstock_device_busy_seconds", {}).values()),
        _sum(totals, "penstock_requests_in_flight"),
        _sum(totals, "penstock_queue_depth"),
        sum(
            value
            for labels, value in totals.others.get("penstock_worker_restarts", {}).items()
            if dict(labels).get("reason") != DRAINED
        ),
    )


def _sum(totals: Totals, family: str) -> float:
    return sum(totals.by_model.get(family, {}).values())


class Point(msgspec.Struct, array_like=True, frozen=True):
    """Ten seconds up to `at` (Unix seconds): rates per second, percentiles of answers in milliseconds, states at `at`.

    `busy` is the share of the time of all devices in which batches ran; `down` counts workers that did not serve,
    `deaths` the workers that died in these ten seconds.
    """

    at: float
    requests: float
    errors: float
    tokens: float
    p50_ms: float | None
    p99_ms: float | None
    in_flight: float
    waiting: float
    busy: float
    down: int
    deaths: int = 0


class History(msgspec.Struct, frozen=True):
    """Points, oldest first, and the counters of the last look."""

    points: list[Point] = msgspec.field(default_factory=list)
    at: float = 0.0
    counted: Counted = Counted()


def extended(
    history: History, now: float, present: Counted, fresh: Sequence[Recent], workers: Sequence[WorkerView]
) -> History:
    """The history with one more point. The first look only notes the counters.

    A look too soon after the look before changes nothing: timers may fire a moment early, and come again.
    """
    step_s, before = now - history.at, history.counted
    if 0 <= step_s < EVERY_S / 2:
        return history
    if not 0 < step_s <= LONGEST_STEP_S:
        return History(history.points, now, present)
    answers = latencies(fresh, now, step_s)[""]

    def rate(name: str) -> float:
        risen: float = getattr(present, name) - getattr(before, name)
        return round(max(0.0, risen) / step_s, 4)

    point = Point(
        round(now, 3),
        rate("requests"),
        rate("errors"),
        rate("tokens"),
        answers["p50_ms"],
        answers["p99_ms"],
        present.in_flight,
        present.waiting,
        min(1.0, round(rate("busy_s") / max(1, len(workers)), 4)),
        sum(1 for worker in workers if trouble(worker) in LOST),
        int(max(0.0, present.deaths - before.deaths)),
    )
    return History([*history.points, point][-KEPT:], now, present)


class HistoryFile:
    """The file of the history, beside the metric files. A reader meets the old file or the new one, never a mixture."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.metrics() / "history.json"
        self._decoder = msgspec.json.Decoder(History)
        self._known, self._changed_ns = History(), 0

    def read(self) -> History:
        """The present history, an empty one without a file that can be read. Raises `OSError`."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._known, self._changed_ns = self._decoder.decode(self._path.read_bytes()), changed_ns
        except (FileNotFoundError, msgspec.DecodeError):
            self._known, self._changed_ns = History(), 0
        return self._known

    def write(self, history: History) -> None:
        """Replace the file. Raises `OSError`."""
        # NOTE: the thread of a keeper that ended may still write while the next keeper has begun.
        draft = self._path.with_suffix(f".draft-{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(history))
        draft.replace(self._path)


class Keeper:
    """Keeps the history for as long as no other frontend does."""

    def __init__(self, paths: RunPaths, workers: Callable[[], Sequence[WorkerView]]) -> None:
        self._paths, self._workers = paths, workers
        self._metrics, self._recent = MetricFiles(paths), RecentReader(paths)
        self._file = HistoryFile(paths)
        self._lock: SlotLock | None = None

    async def run(self) -> None:
        """Look every ten seconds, until cancelled. A full disk costs one point."""
        while True:
            await asyncio.sleep(EVERY_S - time.time() % EVERY_S)
            try:
                workers = self._workers()
                await asyncio.to_thread(self.look, time.time(), workers)
            except (OSError, PenstockError) as error:
                log.error("the history has no point of this moment: %s", error)

    def look(self, now: float, workers: Sequence[WorkerView]) -> None:
        """Add a point if this frontend keeps the history. Blocks on files."""
        if self._lock is None:
            try:
                self._lock = SlotLock(self._paths.lock(LOCK))
            except SlotTaken:
                return
        fresh, present = self._recent.read(), counted(self._metrics.read())
        self._file.write(extended(self._file.read(), now, present, fresh, workers))

    def close(self) -> None:
        """Let another frontend keep the history."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """One reading. `latencies` has percentiles by model, and of all models under the empty name.

    `requests` and `errors` are those of all callers, the newest first; `runs` are those under way, the oldest first.
    """

    totals: Totals
    requests: list[Recent]
    errors: list[Recent]
    latencies: dict[str, dict[str, Any]]
    runs: Sequence[LiveRun] = ()


class TrafficReader:
    """Reads the files of the run directory; keeps the last requests. One thread at a time."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics, self._recent, self._runs = MetricFiles(paths), RecentReader(paths), RunReader(paths)
        self._requests: deque[Recent] = deque(maxlen=MEASURED_REQUESTS)
        self._errors: deque[Recent] = deque(maxlen=MEASURED_REQUESTS)

    def read(self) -> Traffic:
        """Present state. Blocks on files."""
        fresh = self._recent.read()
        self._requests.extend(fresh)
        self._errors.extend(record for record in fresh if record.failed)
        return Traffic(
            self._metrics.read(),
            list(reversed(self._requests)),
            list(reversed(self._errors)),
            latencies(self._requests, time.time(), MEASURED_S),
            self._runs.read(),
        )


def latencies(records: Iterable[Recent], now: float, within_s: float) -> dict[str, dict[str, Any]]:
    """Median and 99th percentile of the answers of the last `within_s` seconds, by model and over all ("")."""
    totals: dict[str, list[float]] = {"": []}
    for record in records:
        if record.status < 400 and now - record.at <= within_s:
            total = record.phases.get("total", 0.0)
            totals[""].append(total)
            totals.setdefault(record.model, []).append(total)
    return {model: _percentiles(values) for model, values in totals.items()}


def _percentiles(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"p50_ms": None, "p99_ms": None, "requests": 0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "requests": len(values)}
