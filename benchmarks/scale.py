"""Simulated devices: how the rate grows with 1, 2, 4 and 8 workers behind 1 and 2 frontends.

The fake model `fake/sleep` sleeps a fixed time per batch and computes nothing, so many workers fit on few cores and the
frontends, the routing and ZeroMQ are what is measured. Batches are kept small, so that a device saturates early.
Efficiency is the rate over devices times the rate of one device behind the same frontends, in the same round.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from benchmarks.options import parser
from benchmarks.processes import cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import frontend_pids, penstock
from benchmarks.wrk import TOOL, measure

DEVICES, FRONTENDS = (1, 2, 4, 8), (1, 2)
_MAX_ITEMS = 4
_CONNECTIONS_PER_DEVICE = 16
_PATH = "/v1/encode/fake/sleep"
_BODY = json.dumps({"items": [{"text": "one short text"}]}).encode()


def _settings(frontends: int, devices: int) -> dict[str, int]:
    return {
        "server.frontends": frontends,
        "worker.count": devices,
        "worker.torch_threads": 1,
        "batch.max_items": _MAX_ITEMS,
        "arena.bytes": 16 << 20,
    }


def _measure(frontends: int, devices: int, seconds: int) -> dict[str, float]:
    """Rate, latency and processor time of one arrangement."""
    connections = _CONNECTIONS_PER_DEVICE * devices
    with penstock("fake/sleep", _settings(frontends, devices), fakes=True) as server:
        measure(server.address, _PATH, _BODY, connections, 1)
        pids = frontend_pids(server)
        before = cpu_seconds(pids)
        rate = measure(server.address, _PATH, _BODY, connections, seconds)
        cores = (cpu_seconds(pids) - before) / seconds
    return {
        "frontends": frontends,
        "devices": devices,
        "per_s": rate.per_s,
        "p50_ms": rate.p50_ms,
        "p99_ms": rate.p99_ms,
        "frontend_cores": cores,
        "failed": rate.failed,
    }


def _rounds(report: Report, rounds: int, seconds: int) -> Iterator[dict[str, float]]:
    for turn in range(rounds):
        for frontends in FRONTENDS:
            for devices in DEVICES:
                sample = _measure(frontends, devices, seconds)
                report.say(
                    f"round {turn + 1}/{rounds}: {frontends} frontends, {devices} devices: {sample['per_s']:.0f}/s"
                )
                yield sample | {"round": turn}


def run(rounds: int, seconds: int) -> Report:
    """Measure every arrangement in every round and save the report."""
    report = Report("scale", "Simulated devices behind frontends", {"rounds": rounds, "tool": TOOL})
    samples = list(_rounds(report, rounds, seconds))
    base = {(s["frontends"], s["round"]): s["per_s"] for s in samples if s["devices"] == 1}
    grouped: dict[tuple[float, float], list[dict[str, float]]] = defaultdict(list)
    for sample in samples:
        one = base[sample["frontends"], sample["round"]]
        grouped[sample["frontends"], sample["devices"]].append(
            sample | {"efficiency": sample["per_s"] / (one * sample["devices"])}
        )
    rows: list[Row] = []
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (frontends, devices), found in grouped.items():
        fields = ("per_s", "efficiency", "p50_ms", "p99_ms", "frontend_cores")
        values = [median(sample[field] for sample in found) for field in fields]
        rows.append(
            [f"{frontends:.0f} / {devices:.0f}", *values, int(sum(sample["failed"] for sample in found))]
        )
        series[f"{frontends:.0f} frontends"].append((devices, values[0]))
    headers = ["frontends / devices", "req/s", "efficiency", "p50 ms", "p99 ms", "frontend cores", "failed"]
    report.table("Rate by devices", headers, rows)
    report.lines("Simulated devices", "devices", "req/s", series)
    report.save(samples)
    return report


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((5, 8) if chosen.full else (1, 3)))


if __name__ == "__main__":
    main()
