"""Large binary responses over HTTP: GB/s of 1 to 256 MiB bodies on one connection, and the memory they take.

1. Start Penstock with the fake model `fake/wide`, whose output is 1 MiB for every item; n items make n MiB.
2. In every round, fetch every size over one connection that only receives, and the same sizes from a bare process
   that does nothing but write memory to a loopback socket.
3. Meanwhile the frontend's private memory is sampled; what it grows by is what a response costs.

"body" counts from the first byte to the last; "whole" from the request, with the worker's part.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.connection import Connection, Received
from benchmarks.load import post
from benchmarks.loopback import loopback
from benchmarks.loopback import request as loopback_request
from benchmarks.options import parser
from benchmarks.processes import Server, anonymous_nbytes, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import frontend_pids, penstock

SIZES = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
_ROUND_NBYTES = 512 << 20
_ITEM_NBYTES = 1 << 20
_LEAST_REPEATS = 3
_ARENA_NBYTES = 640 << 20
_SAMPLE_S = 0.004


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians of one size in one round."""

    nbytes: int
    whole_gb_per_s: float
    body_gb_per_s: float
    bare_gb_per_s: float
    frontend_cpu_ms: float
    grown_mib: float


class PeakMemory:
    """Samples the private memory of processes in a thread; `grown_nbytes` is the peak less the value at entry."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.grown_nbytes = 0

    def _now(self) -> int:
        return sum(anonymous_nbytes(pid) for pid in self._pids)

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            self.grown_nbytes = max(self.grown_nbytes, self._now() - self._before)

    def __enter__(self) -> PeakMemory:
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()
        self._thread.join()


def request(nbytes: int) -> bytes:
    """A request whose answer carries outputs of `nbytes` bytes in all, a multiple of 1 MiB."""
    body = {"items": [{"text": "wide"}] * (nbytes // _ITEM_NBYTES)}
    return post("/v1/encode/fake/wide", body, accept="application/msgpack")


def _fetch(connection: Connection, content: bytes, nbytes: int, repeats: int) -> list[Received]:
    """Fetch the same thing several times. Raises RuntimeError when an answer is not the one asked for."""
    found = [connection.drain(content) for _ in range(repeats)]
    for received in found:
        if received.status != 200 or received.nbytes < nbytes:
            raise RuntimeError(
                f"asked for {nbytes} bytes, got status {received.status}, {received.nbytes} bytes"
            )
    return found


def _measure(server: Server, connection: Connection, bare: Connection, nbytes: int) -> Sample:
    repeats = max(_LEAST_REPEATS, min(50, _ROUND_NBYTES // nbytes))
    pids = frontend_pids(server)
    plain = _fetch(bare, loopback_request(nbytes), nbytes, repeats)
    before = cpu_seconds(pids)
    found = _fetch(connection, request(nbytes), nbytes, repeats)
    cpu_ms = (cpu_seconds(pids) - before) / repeats * 1e3
    with PeakMemory(pids) as memory:
        _fetch(connection, request(nbytes), nbytes, _LEAST_REPEATS)
    return Sample(
        nbytes,
        median(one.nbytes / one.last_byte_s for one in found) / 1e9,
        median(one.nbytes / (one.last_byte_s - one.first_byte_s) for one in found) / 1e9,
        median(one.nbytes / one.last_byte_s for one in plain) / 1e9,
        cpu_ms,
        memory.grown_nbytes / 2**20,
    )


def run(rounds: int) -> Report:
    """Measure and save the report."""
    report = Report("response", "Large binary responses on one connection", {"rounds": rounds})
    samples: list[Sample] = []
    settings = {"server.frontends": 1, "worker.count": 1, "arena.bytes": _ARENA_NBYTES}
    with (
        loopback(SIZES[-1]) as bare_address,
        penstock("fake/wide", settings, fakes=True) as server,
        Connection(server.address) as connection,
        Connection(bare_address) as bare,
    ):
        _measure(server, connection, bare, SIZES[-1])
        for turn in range(rounds):
            samples += [_measure(server, connection, bare, nbytes) for nbytes in SIZES]
            report.say(
                f"round {turn + 1}/{rounds}: {samples[-1].whole_gb_per_s:.2f} GB/s at the largest size"
            )
    _show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def _show(report: Report, samples: list[Sample]) -> None:
    """Medians over rounds by size; ratios are taken within a round."""
    rows: list[Row] = []
    series: dict[str, list[tuple[float, float]]] = {"whole": [], "body": [], "bare": []}
    for nbytes in SIZES:
        chosen = [sample for sample in samples if sample.nbytes == nbytes]
        rates = [median(getattr(s, f"{name}_gb_per_s") for s in chosen) for name in series]
        ratios = [
            median(getattr(s, f"{name}_gb_per_s") / s.bare_gb_per_s for s in chosen)
            for name in ("whole", "body")
        ]
        rest = [
            median(sample.frontend_cpu_ms for sample in chosen),
            max(sample.grown_mib for sample in chosen),
        ]
        rows.append([f"{nbytes >> 20} MiB", *rates, *ratios, *rest])
        for points, rate in zip(series.values(), rates, strict=True):
            points.append((nbytes / 2**20, rate))
    rate_headers = ["whole GB/s", "body GB/s", "bare GB/s", "whole/bare", "body/bare"]
    report.table("One connection", ["size", *rate_headers, "frontend CPU ms", "memory grown MiB"], rows)
    report.lines("Large responses", "MiB", "GB/s", series)


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(7 if chosen.full else 3)


if __name__ == "__main__":
    main()
