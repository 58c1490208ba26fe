"""Small requests: what each protocol costs, as a multiple of `/healthz`. One frontend, one worker.

1. In every round each route is loaded from 1 and from 16 connections: add and subtract two INT32 [16] over KServe v2
   and TRTIS v1, one text through a model that does nothing, `/healthz`, which is HTTP alone, and ServerLive, which is
   gRPC alone.
2. Processor time of the frontend and of the worker is read around each load. A busy machine bends rates, but hardly
   bends processor time, and the ratio of two processor times in one run least of all.
3. One client sends the head of its request and the body apart: without TCP_NODELAY each would cost 40 ms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks import grpc_load
from benchmarks.connection import Connection
from benchmarks.load import Address
from benchmarks.options import parser
from benchmarks.processes import Server, cpu_seconds, free_port
from benchmarks.report import Report, Row
from benchmarks.serving import frontend_pids, worker_pids
from benchmarks.tensor_requests import add_sub, add_sub_v1, tensor_server
from benchmarks.wrk import JSON_HEADERS, TOOL, Rate, measure, raw_request
from ipc.protos import kserve_v2_pb2 as pb

CONNECTIONS = (1, 16)
TARGET_HTTP, TARGET_GRPC, TARGET_P50_MS = 4000.0, 2500.0, 0.8
ROUTES = ("healthz", "ServerLive", "KServe HTTP", "KServe gRPC", "TRTIS HTTP", "encode")
_TEXT = json.dumps({"items": [{"text": "lorem ipsum " * 40}]}).encode()
_APART = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """One load; processor times are microseconds a request; percentiles are NaN where the tool tells none."""

    route: str
    connections: int
    per_s: float
    p50_ms: float
    p99_ms: float
    frontend_us: float
    worker_us: float
    failed: int


def message() -> bytes:
    """The request of `add_sub` as a ModelInferRequest."""
    raw = add_sub()[2][-128:]
    made = pb.ModelInferRequest(model_name="add_sub", raw_input_contents=[raw[:64], raw[64:]])
    for name in ("INPUT0", "INPUT1"):
        made.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return made.SerializeToString()


_REQUESTS: dict[str, tuple[str, Mapping[str, str], bytes]] = {
    "healthz": ("/healthz", {}, b""),
    "KServe HTTP": add_sub(),
    "TRTIS HTTP": add_sub_v1(),
    "encode": ("/v1/encode/fake/noop", JSON_HEADERS, _TEXT),
}
_RPCS = {"ServerLive": (grpc_load.LIVE, b""), "KServe gRPC": (grpc_load.INFER, message())}


def load(address: Address, grpc_address: str, route: str, connections: int, seconds: int) -> Rate:
    """Load one of `ROUTES`, on the HTTP or the gRPC address of a server. Percentiles are NaN for gRPC."""
    if route in _RPCS:
        method, sent = _RPCS[route]
        answered = grpc_load.measure(grpc_address, method, sent, connections, seconds)
        requests = round(answered.per_s * seconds)
        return Rate(answered.per_s, answered.failed, float("nan"), float("nan"), requests)
    path, headers, body = _REQUESTS[route]
    return measure(address, path, body, connections, seconds, headers)


def _sample(server: Server, grpc_address: str, route: str, connections: int, seconds: int) -> Sample:
    frontends, workers = frontend_pids(server), worker_pids(server)
    before = cpu_seconds(frontends), cpu_seconds(workers)
    rate = load(server.address, grpc_address, route, connections, seconds)
    used = cpu_seconds(frontends) - before[0], cpu_seconds(workers) - before[1]
    frontend_us, worker_us = (cpu_s / max(rate.requests, 1) * 1e6 for cpu_s in used)
    times = (rate.p50_ms, rate.p99_ms, frontend_us, worker_us)
    return Sample(route, connections, rate.per_s, *times, rate.failed)


def apart_ms(server: Server) -> float:
    """Median milliseconds of a request whose head and body are sent in two segments."""
    path, headers, body = add_sub()
    whole = raw_request("POST", path, headers, body)
    head = whole[: len(whole) - len(body)]
    took = []
    with Connection(server.address) as connection:
        for _ in range(_APART):
            began = time.perf_counter()
            status, answer = connection.fetch(head, body)
            took.append(time.perf_counter() - began)
            if status != 200:
                raise RuntimeError(f"a request sent in two parts was answered {status}: {answer[:200]!r}")
    return median(took) * 1e3


def run(rounds: int, seconds: int) -> Report:
    """Measure and save the report."""
    tools = f"{TOOL}, {grpc_load.TOOL}"
    report = Report("tensors", "Small requests", {"rounds": rounds, "seconds": seconds, "tools": tools})
    address = f"127.0.0.1:{free_port()}"
    samples: list[Sample] = []
    with tensor_server(["add_sub"], grpc__enabled="true", grpc__bind=address) as server:
        for route in ROUTES:
            _sample(server, address, route, CONNECTIONS[-1], 1)
        for turn in range(rounds):
            for route in ROUTES:
                samples += [_sample(server, address, route, count, seconds) for count in CONNECTIONS]
            report.say(f"round {turn + 1}/{rounds}")
        two_parts_ms = apart_ms(server)
    _show(report, samples)
    report.note(f"Head and body sent apart: {two_parts_ms:.2f} ms at the median, no step of 40 ms.")
    report.save([asdict(sample) for sample in samples])
    return report


def _show(report: Report, samples: list[Sample]) -> None:
    rows: list[Row] = []
    fields = ("per_s", "p50_ms", "p99_ms", "frontend_us", "worker_us")
    found: dict[tuple[str, int], list[float]] = {}
    for route in ROUTES:
        for count in CONNECTIONS:
            chosen = [s for s in samples if (s.route, s.connections) == (route, count)]
            values = found[route, count] = [median(getattr(one, field) for one in chosen) for field in fields]
            shown = [None if value != value else value for value in values]
            unit_us = found["healthz", count][3]
            multiples = [value / unit_us if unit_us else None for value in values[3:]]
            rows.append([f"{route}, {count}", *shown, *multiples, sum(one.failed for one in chosen)])
    headers = ["route, connections", "per s", "p50 ms", "p99 ms", "frontend us", "worker us"]
    headers += ["frontend x healthz", "worker x healthz", "failed"]
    report.table("One request; add and subtract two INT32 [16], or encode one text", headers, rows)
    for text, value, target, at_least in (
        ("HTTP binary, 16 connections, infer/s", found["KServe HTTP", 16][0], TARGET_HTTP, True),
        ("gRPC, 16 connections, infer/s", found["KServe gRPC", 16][0], TARGET_GRPC, True),
        ("HTTP binary, one connection, p50 ms", found["KServe HTTP", 1][1], TARGET_P50_MS, False),
    ):
        met = value >= target if at_least else value <= target
        word = "at least" if at_least else "at most"
        report.note(f"Target: {text} {word} {target:g}: {value:.4g}, {'met' if met else 'missed'}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((5, 8) if chosen.full else (2, 3)))


if __name__ == "__main__":
    main()
