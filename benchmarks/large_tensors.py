"""Large tensors over KServe v2 on one connection: an FP32 identity of 16 MiB, and numbers as JSON text.

1. In every round the identity goes in and out as binary tensors over HTTP, then in and out through shared memory that
   the client registered, at a server that copies inputs and at one that maps them, then the same bytes from a bare
   process that only writes memory to a loopback socket. A memcpy in this process is the measure of one copy.
2. Then 16 MiB of JSON text with FP32 numbers go in; the model sums them, so that the answer is small. orjson reads the
   same text in this process.

GB/s counts both directions, from the request to the last byte of the answer, with the worker's part.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from benchmarks.connection import Connection
from benchmarks.loopback import loopback
from benchmarks.loopback import request as loopback_request
from benchmarks.options import parser
from benchmarks.report import Report
from benchmarks.tensor_requests import Request, binary, identity, tensor_server
from benchmarks.wrk import raw_request

NBYTES = 16 << 20
TARGET_GB_PER_S, TARGET_SHARED, TARGET_JSON_MB_PER_S = 1.0, 8.0, 100.0
_WARM_UP = 5
_PREFIX = "client_bench_"
_JSON_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians of one round: GB/s in and out together, MB/s of JSON text.

    `mapped` is shared memory whose inputs are mapped; `copy` is as many bytes copied in memory.
    """

    http_gb_per_s: float
    shared_gb_per_s: float
    mapped_gb_per_s: float
    bare_gb_per_s: float
    copy_gb_per_s: float
    json_mb_per_s: float
    orjson_mb_per_s: float


@contextlib.contextmanager
def region(name: str) -> Iterator[mmap.mmap]:
    """A client's POSIX object of `NBYTES`, faulted in."""
    path = Path("/dev/shm") / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, NBYTES)
        with mmap.mmap(fd, NBYTES) as view:
            view[:] = np.random.default_rng(1).random(NBYTES // 8).tobytes()
            yield view
    finally:
        os.close(fd)
        path.unlink()


def _post(request: Request) -> bytes:
    path, headers, body = request
    return raw_request("POST", path, headers, body)


def _register(connection: Connection, name: str) -> None:
    body = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": NBYTES}).encode()
    path = f"/v2/systemsharedmemory/region/{name}/register"
    status, answer = connection.fetch(raw_request("POST", path, {}, body))
    if status != 200:
        raise RuntimeError(f"registering {name} was answered {status}: {answer[:200]!r}")


def shared_identity(source: str, target: str) -> Request:
    """The identity from one region into another."""

    def use(name: str) -> dict[str, str | int]:
        return {"shared_memory_region": name, "shared_memory_byte_size": NBYTES}

    shape = [1, NBYTES // 4]
    inputs = [{"name": "INPUT", "datatype": "FP32", "shape": shape, "parameters": use(source)}]
    outputs = [{"name": "OUTPUT", "parameters": use(target)}]
    return binary("identity_fp32", inputs, b"", outputs)


def json_sums() -> tuple[bytes, bytes]:
    """A request of about `NBYTES` of JSON text, and the part of it that is numbers."""
    rows = NBYTES // (_JSON_COLUMNS * 10)
    numbers = np.random.default_rng(2).random(rows * _JSON_COLUMNS, dtype=np.float32).round(6)
    data = json.dumps(numbers.astype(float).round(6).tolist(), separators=(",", ":"))
    head = f'{{"inputs":[{{"name":"INPUT","datatype":"FP32","shape":[1,{rows},{_JSON_COLUMNS}],"data":{data}}}]}}'
    return raw_request("POST", "/v2/models/variable/infer", {}, head.encode()), data.encode()


def _seconds(connection: Connection, request: bytes, repeats: int) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        received = connection.drain(request)
        took.append(time.perf_counter() - began)
        if received.status != 200:
            raise RuntimeError(f"status {received.status}")
    return median(took)


def _seconds_here(work: Callable[[], object], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return median(took)


def run(rounds: int, repeats: int) -> Report:
    """Measure and save the report."""
    report = Report("large_tensors", "Large tensors", {"rounds": rounds, "MiB": NBYTES >> 20})
    names = (f"{_PREFIX}in", f"{_PREFIX}out")
    plain, shared = _post(identity(NBYTES // 4)), _post(shared_identity(*names))
    sums, text = json_sums()
    room = np.empty(2 * NBYTES, np.uint8)
    full = np.ones(2 * NBYTES, np.uint8)
    settings = {"shared_memory__enabled": "true", "shared_memory__key_prefix": _PREFIX}
    samples: list[Sample] = []
    with (
        region(names[0]) as source,
        region(names[1]) as target,
        tensor_server(["identity_fp32", "variable"], **settings) as server,
        tensor_server(["identity_fp32"], shared_memory__map_inputs="true", **settings) as mapping_server,
        loopback(2 * NBYTES) as bare_address,
        Connection(server.address) as connection,
        Connection(mapping_server.address) as mapping,
        Connection(bare_address) as bare,
    ):
        for name in names:
            _register(connection, name)
            _register(mapping, name)
        _seconds(connection, plain, _WARM_UP)
        for way in (connection, mapping):
            target[:] = bytes(NBYTES)
            _seconds(way, shared, _WARM_UP)
            if source[:] != target[:]:
                raise RuntimeError("the identity over shared memory gave other bytes")
        for turn in range(rounds):
            seconds = [_seconds(connection, request, repeats) for request in (plain, shared)]
            seconds.append(_seconds(mapping, shared, repeats))
            seconds.append(_seconds(bare, loopback_request(2 * NBYTES), repeats))
            seconds.append(_seconds_here(lambda: np.copyto(room, full), repeats))
            rates = [2 * NBYTES / took / 1e9 for took in seconds]
            texts_s = [_seconds(connection, sums, max(1, repeats // 5))]
            texts_s.append(_seconds_here(lambda: orjson.loads(text), max(1, repeats // 5)))
            samples.append(Sample(*rates, *(len(text) / took / 1e6 for took in texts_s)))
            report.say(f"round {turn + 1}/{rounds}: {rates[0]:.2f} GB/s")
    _show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def _show(report: Report, samples: list[Sample]) -> None:
    names = [field.name for field in fields(Sample)]
    found = {name: median(getattr(sample, name) for sample in samples) for name in names}
    http, text = found["http_gb_per_s"], found["json_mb_per_s"]
    ratio = median(sample.mapped_gb_per_s / sample.http_gb_per_s for sample in samples)
    rows = [
        ("identity, HTTP binary", http, None, 1.0),
        ("identity, client shared memory", found["shared_gb_per_s"], None, found["shared_gb_per_s"] / http),
        ("the same, inputs mapped", found["mapped_gb_per_s"], None, ratio),
        ("bare writer, as many bytes", found["bare_gb_per_s"], None, None),
        ("memcpy of as many bytes", found["copy_gb_per_s"], None, found["copy_gb_per_s"] / http),
        ("JSON numbers in", None, text, None),
        ("orjson alone, the same text", None, found["orjson_mb_per_s"], None),
    ]
    report.table("On one connection", ("what", "GB/s", "MB/s", "to HTTP"), rows)
    for what, value, target_value in (
        ("16 MiB over HTTP binary, GB/s in and out", http, TARGET_GB_PER_S),
        ("with client shared memory (mapped), times that", ratio, TARGET_SHARED),
        ("JSON text parsed, MB/s", text, TARGET_JSON_MB_PER_S),
    ):
        met = "met" if value >= target_value else "missed"
        report.note(f"Target: {what} at least {target_value:g}: {value:.3g}, {met}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((7, 50) if chosen.full else (3, 15)))


if __name__ == "__main__":
    main()
