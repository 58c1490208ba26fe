"""Traces of the requests of all frontends: counters, histograms, recent requests, errors, latencies.

1. `TrafficReader` reads the files of the run directory for the frames of one frontend.
2. `counted` sums the counters of all processes up to the few numbers that the charts of the page show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from frontend.records.recent import CLIENT_GONE, Recent, RecentReader
from ipc.metrics.files import MetricFiles, Totals
from ipc.processes.paths import RunPaths

SHOWN_REQUESTS = 24
SHOWN_ERRORS = 20
MEASURED_REQUESTS = 1024
MEASURED_S = 30.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """One reading. `latencies` has percentiles by model, and of all models under the empty name.

    `requests` and `errors` are those of all callers, the newest first.
    """

    totals: Totals
    requests: list[Recent]
    errors: list[Recent]
    latencies: dict[str, dict[str, Any]]


class TrafficReader:
    """Reads the files of the run directory; keeps the last requests. One thread at a time."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics, self._recent = MetricFiles(paths), RecentReader(paths)
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


class Counted(msgspec.Struct, frozen=True):
    """Sums of all processes. `requests`, `errors`, `tokens` and `busy_s` only rise; the others are of this moment."""

    requests: float = 0.0
    errors: float = 0.0
    tokens: float = 0.0
    busy_s: float = 0.0
    in_flight: float = 0.0
    waiting: float = 0.0


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
    )


def _sum(totals: Totals, family: str) -> float:
    return sum(totals.by_model.get(family, {}).values())
