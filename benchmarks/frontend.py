"""The cost of a frontend: requests a second through a model that does nothing, processor time, memory, start time.

1. Start Penstock with one frontend, one worker and the fake model `fake/noop`; note when it lives and when it is ready.
2. In every round, load `/healthz` (HTTP alone) and `/v1/encode/fake/noop` (HTTP, ZeroMQ and back) from 1 to 64
   connections; processor time of the frontend and of the worker is read around each load.
3. Read the memory of both processes after the load.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.options import parser
from benchmarks.processes import Server, cpu_seconds, memory_nbytes
from benchmarks.report import Report, Row
from benchmarks.serving import answers, frontend_pids, penstock, worker_pids
from benchmarks.wrk import TOOL, measure

CONNECTIONS = (1, 8, 32, 64)
_BODY = json.dumps({"items": [{"text": "lorem ipsum " * 40}]}).encode()
_PATHS = {"healthz": ("/healthz", b""), "noop": ("/v1/encode/fake/noop", _BODY)}
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """One load in one round; processor times are microseconds a request."""

    route: str
    connections: int
    per_s: float
    p50_ms: float
    p99_ms: float
    frontend_us: float
    worker_us: float
    failed: int


def _load(server: Server, route: str, connections: int, seconds: int) -> Sample:
    path, body = _PATHS[route]
    frontends, workers = frontend_pids(server), worker_pids(server)
    before = cpu_seconds(frontends), cpu_seconds(workers)
    rate = measure(server.address, path, body, connections, seconds)
    used = cpu_seconds(frontends) - before[0], cpu_seconds(workers) - before[1]
    frontend_us, worker_us = (cpu_s / max(rate.requests, 1) * 1e6 for cpu_s in used)
    return Sample(
        route, connections, rate.per_s, rate.p50_ms, rate.p99_ms, frontend_us, worker_us, rate.failed
    )


def _rates(report: Report, samples: list[Sample]) -> None:
    """Medians over rounds by route and connections."""
    rows: list[Row] = []
    units_us: dict[int, float] = {}
    for route in _PATHS:
        for connections in CONNECTIONS:
            chosen = [s for s in samples if (s.route, s.connections) == (route, connections)]
            fields = ("per_s", "p50_ms", "p99_ms", "frontend_us", "worker_us")
            values = [median(getattr(sample, field) for sample in chosen) for field in fields]
            units_us.setdefault(connections, values[3])
            multiples = [value / units_us[connections] for value in values[3:]]
            rows.append([f"{route}, {connections}", *values, *multiples, sum(one.failed for one in chosen)])
    headers = [
        "route, connections",
        "req/s",
        "p50 ms",
        "p99 ms",
        "frontend us/req",
        "worker us/req",
        "frontend x healthz",
        "worker x healthz",
        "failed",
    ]
    report.table("One frontend, one worker", headers, rows)
    report.bars("Requests a second", "req/s", {str(row[0]): float(row[1] or 0) for row in rows})


def _memory(server: Server) -> list[Row]:
    """USS, PSS and RSS of each process in MiB."""
    rows: list[Row] = []
    for kind, pids in (("frontend", frontend_pids(server)), ("worker", worker_pids(server))):
        for pid in pids:
            found = memory_nbytes(pid)
            rows.append([kind, *(found[name] / 2**20 for name in ("uss", "pss", "rss"))])
    return rows


def run(rounds: int, seconds: int) -> Report:
    """Measure and save the report."""
    report = Report(
        "frontend", "Frontend: rate, processor time, memory, start", {"rounds": rounds, "tool": TOOL}
    )
    samples: list[Sample] = []
    settings = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": 1}
    with penstock("fake/noop", settings, fakes=True, ready="/healthz") as server:
        since = time.perf_counter()
        while not answers(server.address, "/readyz"):
            time.sleep(_POLL_S)
        ready_s = server.started_s + time.perf_counter() - since
        for turn in range(rounds):
            for connections in CONNECTIONS:
                samples += [_load(server, route, connections, seconds) for route in _PATHS]
            report.say(
                f"round {turn + 1}/{rounds}: {samples[-1].per_s:.0f} req/s at {CONNECTIONS[-1]} connections"
            )
        memory = _memory(server)
    _rates(report, samples)
    report.table("Memory after the load, MiB", ["process", "USS", "PSS", "RSS"], memory)
    report.table("Start, seconds", ["moment", "s"], [["alive", server.started_s], ["ready", ready_s]])
    report.save({"samples": [asdict(sample) for sample in samples], "memory_mib": memory, "ready_s": ready_s})
    return report


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((5, 8) if chosen.full else (2, 3)))


if __name__ == "__main__":
    main()
