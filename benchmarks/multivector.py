"""Token vectors over HTTP: 64 documents x 512 tokens x 128 dims as msgpack and as JSON, on one connection.

1. Start Penstock with the fake model `fake/colbert`, which has a vector for every four characters and costs nothing.
   One batch takes the whole request, as it does by default on CUDA; the smaller batches of a CPU have their own cost,
   which a real model hides.
2. In every round, fetch the same answer as msgpack and as JSON, and as many bytes as the msgpack answer has from a bare
   process that does nothing but write memory to a loopback socket.

GB/s counts the vectors' own bytes from the request to the last byte of the answer, with the worker's part. The steps
follow one another on one connection, so the bare writer is a limit that only a faster socket could move.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.connection import Connection
from benchmarks.load import post
from benchmarks.loopback import loopback
from benchmarks.loopback import request as loopback_request
from benchmarks.options import parser
from benchmarks.processes import cpu_seconds
from benchmarks.report import Report
from benchmarks.serving import frontend_pids, penstock, worker_pids

DOCUMENTS, TOKENS, DIMS = 64, 512, 128
PAYLOAD_NBYTES = DOCUMENTS * TOKENS * DIMS * 4
TARGET_GB_PER_S, TARGET_RATIO = 2.0, 20.0
_WARM_UP = 10
_ARENA_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians of one round: rates in GB/s of vectors, processor milliseconds per answer by process."""

    msgpack_gb_per_s: float
    body_gb_per_s: float
    json_gb_per_s: float
    bare_gb_per_s: float
    frontend_cpu_ms: float
    worker_cpu_ms: float
    client_cpu_ms: float


def request(accept: str) -> bytes:
    """All documents, each of exactly `TOKENS` tokens of the fake family."""
    texts = [f"{number} ".ljust(TOKENS * 4 - 1, "x") for number in range(DOCUMENTS)]
    return post("/v1/encode/fake/colbert", {"items": [{"text": text} for text in texts]}, accept=accept)


def _fetch(connection: Connection, content: bytes, repeats: int) -> tuple[float, float]:
    """Median seconds of (whole answer, its body). Raises RuntimeError when an answer is not the one asked for."""
    found = [connection.drain(content) for _ in range(repeats)]
    for received in found:
        if received.status != 200 or received.nbytes < PAYLOAD_NBYTES:
            raise RuntimeError(f"status {received.status} with {received.nbytes} bytes")
    whole = median(received.last_byte_s for received in found)
    return whole, median(received.last_byte_s - received.first_byte_s for received in found)


def _cpu_seconds(frontends: list[int], workers: list[int]) -> tuple[float, float, float]:
    """Of the frontends, the workers and this client."""
    return cpu_seconds(frontends), cpu_seconds(workers), time.process_time()


def run(rounds: int, repeats: int) -> Report:
    """Measure and save the report."""
    settings = {
        "server.frontends": 1,
        "worker.count": 1,
        "arena.bytes": _ARENA_NBYTES,
        "batch.max_tokens": DOCUMENTS * TOKENS,
    }
    shape = f"{DOCUMENTS} x {TOKENS} x {DIMS}"
    report = Report("multivector", "Token vectors over HTTP", {"rounds": rounds, "shape": shape})
    packed, shown = request("application/msgpack"), request("application/json")
    bare_request = loopback_request(PAYLOAD_NBYTES)
    samples: list[Sample] = []
    with (
        loopback(PAYLOAD_NBYTES) as bare_address,
        penstock("fake/colbert", settings, fakes=True) as server,
        Connection(server.address) as connection,
        Connection(bare_address) as bare,
    ):
        frontends, workers = frontend_pids(server), worker_pids(server)
        _fetch(connection, packed, _WARM_UP)
        _fetch(bare, bare_request, _WARM_UP)
        for turn in range(rounds):
            bare_s, _ = _fetch(bare, bare_request, repeats)
            before = _cpu_seconds(frontends, workers)
            whole_s, body_s = _fetch(connection, packed, repeats)
            after = _cpu_seconds(frontends, workers)
            json_s, _ = _fetch(connection, shown, max(1, repeats // 10))
            rates = [PAYLOAD_NBYTES / seconds / 1e9 for seconds in (whole_s, body_s, json_s, bare_s)]
            cpu_ms = [(stop - start) / repeats * 1e3 for start, stop in zip(before, after, strict=True)]
            samples.append(Sample(*rates, *cpu_ms))
            report.say(f"round {turn + 1}/{rounds}: {rates[0]:.2f} GB/s")
    _show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def _show(report: Report, samples: list[Sample]) -> None:
    """Medians over rounds; ratios are taken within a round."""
    whole = median(sample.msgpack_gb_per_s for sample in samples)
    ratio = median(sample.msgpack_gb_per_s / sample.json_gb_per_s for sample in samples)
    to_bare = median(sample.msgpack_gb_per_s / sample.bare_gb_per_s for sample in samples)
    headers = ("form", "GB/s", "body GB/s", "to a bare writer", "to JSON")
    spent = ("frontend CPU ms", "worker CPU ms", "client CPU ms")
    report.table(
        "One answer of 64 documents",
        (*headers, *spent),
        [
            (
                "msgpack",
                whole,
                median(sample.body_gb_per_s for sample in samples),
                to_bare,
                ratio,
                median(sample.frontend_cpu_ms for sample in samples),
                median(sample.worker_cpu_ms for sample in samples),
                median(sample.client_cpu_ms for sample in samples),
            ),
            ("JSON", median(sample.json_gb_per_s for sample in samples), None, None, 1.0, None, None, None),
            (
                "bare writer",
                median(sample.bare_gb_per_s for sample in samples),
                None,
                1.0,
                None,
                None,
                None,
                None,
            ),
        ],
    )
    met = ("met" if whole >= TARGET_GB_PER_S else "missed", "met" if ratio >= TARGET_RATIO else "missed")
    report.note(f"Target: msgpack at least {TARGET_GB_PER_S:g} GB/s end to end: {whole:.2f}, {met[0]}.")
    report.note(f"Target: at least {TARGET_RATIO:g} times JSON: {ratio:.0f} times, {met[1]}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((9, 100) if chosen.full else (3, 30)))


if __name__ == "__main__":
    main()
