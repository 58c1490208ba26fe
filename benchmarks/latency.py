"""Latency under load: requests arrive at random, at shares of the server's capacity.

1. Start Penstock with the demo model; ask one text at a time for the latency without load.
2. Measure its capacity with 64 clients in a closed loop.
3. In every round, send short runs at 25, 50, 75 and 90 % of that capacity. Latency counts from the instant a request
   was due, so the time that it waits for the server, or for a connection, is part of it.
"""

from __future__ import annotations

from statistics import median

from benchmarks.connection import one_by_one
from benchmarks.corpus import fingerprint, passages
from benchmarks.load import LoadResult, closed_loop, open_loop
from benchmarks.options import add_threads, parser
from benchmarks.peers.servers import request
from benchmarks.report import Report, Row
from benchmarks.serving import MINILM, penstock

SHARES = (0.25, 0.5, 0.75, 0.9)
_LONE, _CLIENTS = 60, 64


def run(texts: int, rounds: int, threads: int) -> Report:
    """Measure and save the report."""
    chosen = passages(texts)
    settings = {"texts": texts, "corpus": fingerprint(chosen), "rounds": rounds, "threads": threads}
    report = Report("latency", "Latency while requests arrive at random", settings)
    requests = [request("penstock", [text], MINILM) for text in chosen]
    found: dict[str, list[LoadResult]] = {}
    with penstock(MINILM, {"worker.torch_threads": threads}) as server:
        closed_loop(server.address, requests[:_CLIENTS], 8)
        capacity = closed_loop(server.address, requests, _CLIENTS).rate_per_s
        report.say(f"capacity {capacity:.1f} texts/s")
        for turn in range(rounds):
            found.setdefault("one client", []).append(one_by_one(server.address, requests[:_LONE]))
            for share in SHARES:
                result = open_loop(server.address, requests, share * capacity, seed=turn)
                found.setdefault(f"{share:.0%} of capacity", []).append(result)
                report.say(f"round {turn + 1}/{rounds}: {share:.0%}: p99 {result.latency_ms(99):.0f} ms")
    rows: list[Row] = []
    for name, results in found.items():
        rate = median(result.rate_per_s for result in results)
        percentiles = [median(result.latency_ms(percent) for result in results) for percent in (50, 95, 99)]
        rows.append([name, rate, *percentiles, sum(result.failed for result in results)])
    report.table("One text a request", ["load", "texts/s", "p50 ms", "p95 ms", "p99 ms", "failed"], rows)
    report.save({name: [result.latencies_s for result in results] for name, results in found.items()})
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    add_threads(options)
    chosen = options.parse_args()
    texts, rounds = (1024, 3) if chosen.full else (256, 1)
    run(texts, rounds, chosen.threads)


if __name__ == "__main__":
    main()
