"""What a hit of the cache of embeddings costs the frontend, as a multiple of `/healthz`. One frontend, one worker.

1. One server keeps embeddings, another one keeps none. The model is the fake one of 16 dimensions that computes
   nothing, so that a miss shows the way to the worker and back.
2. In every round each route of each server is loaded from 16 connections: `/healthz`, which is HTTP alone, encode with
   an answer in JSON and in msgpack, and embeddings. All requests have the same text.
3. The frontend's processor time is read around each load. Loads are short and rounds are many: the ratio of two such
   times in one round hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.connection import Connection
from benchmarks.options import parser
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import frontend_pids, penstock
from benchmarks.wrk import JSON_HEADERS, TOOL, measure, raw_request

CONNECTIONS = 16
TARGET = 3.0
HEALTH = "healthz"
_MODEL, _TEXT = "fake/noop", "lorem ipsum " * 40
_ITEMS = json.dumps({"items": [{"text": _TEXT}]}).encode()
_MSGPACK = {"Content-Type": "application/json", "Accept": "application/msgpack"}
ROUTES: dict[str, tuple[str, Mapping[str, str], bytes]] = {
    HEALTH: ("/healthz", {}, b""),
    "encode, msgpack": (f"/v1/encode/{_MODEL}", _MSGPACK, _ITEMS),
    "encode, JSON": (f"/v1/encode/{_MODEL}", JSON_HEADERS, _ITEMS),
    "embeddings": (
        "/v1/embeddings",
        JSON_HEADERS,
        json.dumps({"model": _MODEL, "input": _TEXT}).encode(),
    ),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One load: whether embeddings were kept, microseconds of the frontend a request."""

    route: str
    kept: bool
    per_s: float
    frontend_us: float
    failed: int


def _sample(server: Server, route: str, kept: bool, seconds: int) -> Sample:
    path, headers, body = ROUTES[route]
    before = cpu_seconds(frontend_pids(server))
    rate = measure(server.address, path, body, CONNECTIONS, seconds, headers)
    used = cpu_seconds(frontend_pids(server)) - before
    return Sample(route, kept, rate.per_s, used / max(rate.requests, 1) * 1e6, rate.failed)


def _hits(server: Server) -> float:
    """Items found so far, by the server's own count."""
    with Connection(server.address) as connection:
        _, body = connection.fetch(raw_request("GET", "/metrics", {}, b""))
    lines = [line for line in body.decode().splitlines() if line.startswith("penstock_embedding_cache_hits")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def run(rounds: int, seconds: int) -> Report:
    """Measure and save the report."""
    report = Report("cached", "Hits of the cache of embeddings", {"rounds": rounds, "tool": TOOL})
    settings = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": 1}
    samples: list[Sample] = []
    with (
        penstock(_MODEL, {**settings, "cache.embeddings_bytes": 64 << 20}, fakes=True) as keeping,
        penstock(_MODEL, settings, fakes=True) as plain,
    ):
        servers = {True: keeping, False: plain}
        for route in ROUTES:
            for kept, server in servers.items():
                _sample(server, route, kept, 1)
        for turn in range(rounds):
            for route in ROUTES:
                samples += [_sample(server, route, kept, seconds) for kept, server in servers.items()]
            report.say(f"round {turn + 1}/{rounds}")
        found = _hits(keeping)
    _show(report, samples)
    report.note(f"{found:.0f} items were found in the cache.")
    report.save([asdict(sample) for sample in samples])
    return report


def _show(report: Report, samples: list[Sample]) -> None:
    rows: list[Row] = []
    hits: dict[str, float] = {}
    for route in ROUTES:
        costs = {
            kept: [one.frontend_us for one in samples if (one.route, one.kept) == (route, kept)]
            for kept in (True, False)
        }
        units = [one.frontend_us for one in samples if one.route == HEALTH and one.kept]
        hits[route] = median(cost / unit for cost, unit in zip(costs[True], units, strict=True))
        misses = median(cost / unit for cost, unit in zip(costs[False], units, strict=True))
        failed = sum(one.failed for one in samples if one.route == route)
        rows.append([route, median(costs[True]), hits[route], median(costs[False]), misses, failed])
    headers = ["route", "hit us", "hit x healthz", "computed us", "computed x healthz", "failed"]
    report.table("Processor time of the frontend for one request", headers, rows)
    for route, multiple in hits.items():
        if route != HEALTH:
            met = "met" if multiple <= TARGET else "missed"
            report.note(f"Target: a hit of {route} at most {TARGET:g} x healthz: {multiple:.2f}, {met}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((25, 2) if chosen.full else (9, 1)))


if __name__ == "__main__":
    main()
