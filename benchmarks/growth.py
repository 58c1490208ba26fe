"""Memory of a worker under mixed load for a long time: whether the memory levels off, and which part grows.

1. Serve all-MiniLM-L6-v2 and a program of named tensors; a few clients send texts and batches of all lengths, as
   nobody sends them twice, and tensors of all sizes.
2. Every five seconds a thread inside of the worker (`inside/sitecustomize.py`) writes what glibc's heap has in use and
   free and, with `--trace`, what Python's objects take; resident memory is read from outside.
3. The slope of each is that of `benchmarks.cycles`, over the first and over the last half.

`ONEDNN_PRIMITIVE_CACHE_CAPACITY` and glibc's `MALLOC_` variables can be set to compare.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.connection import Connection
from benchmarks.cycles import slope
from benchmarks.load import Address, post
from benchmarks.options import parser
from benchmarks.processes import anonymous_nbytes
from benchmarks.report import Report, Row
from benchmarks.serving import MINILM, penstock, worker_pids
from tests.harness.lifecycle import MIB
from tests.tiny.programs import write_repository

INSIDE = Path(__file__).parent / "inside"
CLIENTS = 4
EVERY_S = 5.0
KINDS = ("resident", "used", "free", "mapped", "python")


def _request(draw: random.Random) -> bytes:
    """One of many kinds of requests, never the same twice."""
    if draw.random() < 0.2:
        data = [draw.random() for _ in range(draw.randint(1, 20_000))]
        tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, len(data)], "data": data}
        return post("/v2/models/identity_fp32/infer", {"inputs": [tensor]})
    words = draw.choice((8, 60, 200))
    texts = [
        " ".join(f"w{draw.getrandbits(24):x}" for _ in range(draw.randint(1, words)))
        for _ in range(draw.choice((1, 1, 1, 4, 32)))
    ]
    return post(f"/v1/encode/{MINILM}", {"items": [{"text": text} for text in texts]})


def _client(address: Address, seed: int, until: float, counts: list[int]) -> None:
    draw = random.Random(seed)
    with Connection(address) as connection:
        while time.monotonic() < until:
            status, _ = connection.fetch(_request(draw))
            counts[status == 200] += 1


def _watch(pid: int, until: float) -> list[tuple[float, int]]:
    """(instant, resident bytes) until then."""
    found = []
    while time.monotonic() < until:
        found.append((time.monotonic(), anonymous_nbytes(pid)))
        time.sleep(EVERY_S)
    return found


def measure(minutes: float, trace: bool) -> tuple[dict[str, list[float]], list[int]]:
    """Bytes of each kind over the time, and how many requests were (refused, answered)."""
    until, counts = time.monotonic() + 60 * minutes, [0, 0]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        report = Path(place) / "inside"
        os.environ |= {"GROWTH_FILE": str(report), "GROWTH_TRACE": "1" if trace else ""}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
        repository = write_repository(Path(place) / "models", ["identity_fp32"])
        with penstock(MINILM, {"worker.count": 1, "repository.dirs": str(repository)}) as server:
            (worker,) = worker_pids(server)
            clients = [
                threading.Thread(target=_client, args=(server.address, seed, until, counts))
                for seed in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            began = time.monotonic()
            watched = _watch(worker, until)
            for client in clients:
                client.join()
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    found = {kind: [float(line[kind]) for line in lines if line["at"] >= began] for kind in KINDS[1:]}
    return {"resident": [float(nbytes) for _, nbytes in watched]} | found, counts


def show(report: Report, found: dict[str, list[float]]) -> None:
    """A row for each kind of memory, with its growth in the first and in the last half."""
    rows: list[Row] = []
    for kind, values in found.items():
        if not any(values):
            continue
        halves: list[Sequence[float]] = [values[: len(values) // 2], values[len(values) // 2 :]]
        an_hour = [slope(half).value * 3600 / EVERY_S / MIB for half in halves]
        rows.append([kind, values[0] / MIB, max(values) / MIB, values[-1] / MIB, *an_hour])
    heads = [
        "memory",
        "first MiB",
        "most MiB",
        "last MiB",
        "first half, MiB an hour",
        "last half, MiB an hour",
    ]
    report.table("Memory of a worker under mixed load", heads, rows)
    lines = {
        kind: [(n * EVERY_S / 60, value / MIB) for n, value in enumerate(v)]
        for kind, v in found.items()
        if any(v)
    }
    report.lines("Memory of a worker under mixed load", "minutes", "MiB", lines)


def run(minutes: float, trace: bool) -> Report:
    """Measure and save the report."""
    capacity = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "default")
    report = Report(
        "growth", "Memory over time", {"minutes": minutes, "trace": trace, "primitives": capacity}
    )
    found, counts = measure(minutes, trace)
    report.note(f"{counts[1]} requests answered, {counts[0]} refused.")
    show(report, found)
    report.save(found)
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, help="default 5, or 60 with --full")
    options.add_argument("--trace", action="store_true", help="also Python's objects, which costs time")
    chosen = options.parse_args()
    run(chosen.minutes or (60.0 if chosen.full else 5.0), chosen.trace)


if __name__ == "__main__":
    main()
