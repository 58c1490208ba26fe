"""What all frontends of the server did lately: counters and histograms, recent requests, errors, latencies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frontend.status.recent import Recent, RecentReader
from ipc.metrics.files import MetricFiles, Totals
from ipc.processes.paths import RunPaths

PHASES = ("tokenize", "queue", "device", "copy", "encode")
SHOWN_REQUESTS = 24
SHOWN_ERRORS = 20
MEASURED_REQUESTS = 1024
MEASURED_S = 30.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """One reading. `latencies` has percentiles by model, and those of all under the empty name."""

    totals: Totals
    requests: list[Recent]
    errors: list[Recent]
    latencies: dict[str, dict[str, Any]]


class TrafficReader:
    """Reads the files of the run directory; keeps the last requests that it saw. One thread at a time."""

    def __init__(self, paths: RunPaths) -> None:
        self._metrics, self._recent = MetricFiles(paths), RecentReader(paths)
        self._requests: deque[Recent] = deque(maxlen=MEASURED_REQUESTS)
        self._errors: deque[Recent] = deque(maxlen=SHOWN_ERRORS)

    def read(self) -> Traffic:
        """Present state, newest requests first. Blocks on files."""
        fresh = self._recent.read()
        self._requests.extend(fresh)
        self._errors.extend(record for record in fresh if record.failed)
        newest = [self._requests[-1 - n] for n in range(min(SHOWN_REQUESTS, len(self._requests)))]
        return Traffic(
            self._metrics.read(), newest, list(reversed(self._errors)), latencies(self._requests, time.time())
        )


def latencies(records: Iterable[Recent], now: float) -> dict[str, dict[str, Any]]:
    """Median and 99th percentile of the answers of the last `MEASURED_S` seconds, by model and over all ("")."""
    totals: dict[str, list[float]] = {"": []}
    for record in records:
        if record.status < 400 and now - record.at <= MEASURED_S:
            total = record.phases.get("total", 0.0)
            totals[""].append(total)
            totals.setdefault(record.model, []).append(total)
    return {model: _percentiles(values) for model, values in totals.items()}


def _percentiles(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"p50_ms": None, "p99_ms": None, "requests": 0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2), "requests": len(values)}


def request_fields(record: Recent) -> dict[str, Any]:
    """A finished request as it goes into a frame; `other` is what no phase accounts for."""
    total = record.phases.get("total", 0.0)
    phases = {name: round(record.phases.get(name, 0.0), 3) for name in PHASES}
    return {
        "time": round(record.at, 3),
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "protocol": record.protocol,
        "operation": record.operation,
        "model": record.model,
        "status": record.status,
        "code": record.code,
        "total_ms": round(total, 3),
        "phases": {**phases, "other": round(max(0.0, total - sum(phases.values())), 3)},
    }


def counter_fields(totals: Totals) -> dict[str, dict[str, float]]:
    """`{counter without _total: {model: sum over labels}}`."""
    return {name: totals.by_model[name] for name in sorted(totals.counters)}


def histogram_fields(totals: Totals) -> dict[str, dict[str, Any]]:
    """`{histogram: {model: {buckets, counts, count, sum}}}`, counts up to each bound, without +Inf."""
    return {
        name: {
            model: {
                "buckets": found.bounds,
                "counts": found.counts,
                "count": found.observations,
                "sum": round(found.total, 6),
            }
            for model, found in models.items()
        }
        for name, models in sorted(totals.histograms.items())
    }


def fault_fields(totals: Totals) -> dict[str, dict[str, float]]:
    """What went wrong since the start, by reason: restarts of workers, retries, poison, leases taken back, OOM."""
    found = {
        kind: _by_label(totals, family, label)
        for kind, family, label in (
            ("worker_restarts", "penstock_worker_restarts", "reason"),
            ("retries", "penstock_retries", "reason"),
            ("poison", "penstock_poison", "reason"),
            ("leases_revoked", "penstock_shm_leases_revoked", "reason"),
        )
    }
    return {**found, "out_of_memory": totals.by_model.get("penstock_oom", {})}


def restart_fields(totals: Totals) -> dict[str, float]:
    """`{worker: restarts}`."""
    return _by_label(totals, "penstock_worker_restarts", "worker")


def _by_label(totals: Totals, family: str, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, value in totals.others.get(family, {}).items():
        key = dict(labels).get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found
