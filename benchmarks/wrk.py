"""Small requests as fast as they go: `wrk` where it is installed, the asyncio load generator otherwise.

wrk costs a fifth of the processor time, so its figures say more about the server; every result names its tool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import Address, closed_loop

TOOL = "wrk" if shutil.which("wrk") else "asyncio"
_SCRIPT = Path(__file__).with_name("request.lua")
_FALLBACK_RATE_PER_S = 2000
JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests answered 200 a second, failures, latency percentiles, requests in all."""

    per_s: float
    failed: int
    p50_ms: float
    p99_ms: float
    requests: int


def measure(
    address: Address,
    path: str,
    body: bytes,
    connections: int,
    seconds: int,
    headers: Mapping[str, str] = JSON_HEADERS,
) -> Rate:
    """Load `path` for `seconds` from `connections` keep-alive connections; POST `body`, or GET when it is empty."""
    if TOOL == "wrk":
        return _wrk(address, path, body, connections, seconds, headers)
    request = raw_request("POST" if body else "GET", path, headers, body)
    result = closed_loop(address, [request] * (_FALLBACK_RATE_PER_S * seconds), connections)
    timing = (result.latency_ms(50), result.latency_ms(99))
    return Rate(result.rate_per_s, result.failed, *timing, result.statuses.total())


def raw_request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """One HTTP/1.1 request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _wrk(
    address: Address, path: str, body: bytes, connections: int, seconds: int, headers: Mapping[str, str]
) -> Rate:
    """Run wrk with one thread. Raises RuntimeError when it reports nothing."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(_SCRIPT)]
    url = f"http://{address[0]}:{address[1]}{path}"
    fields = "\n".join(f"{name}: {value}" for name, value in headers.items())
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        environment = os.environ | {"WRK_BODY": file.name if body else "", "WRK_HEADERS": fields}
        done = subprocess.run([*command, url], env=environment, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            requests, failed, wall_us, p50_us, p99_us = map(float, line.split()[1:])
            rate = (requests - failed) / (wall_us / 1e6)
            return Rate(rate, int(failed), p50_us / 1e3, p99_us / 1e3, int(requests))
    raise RuntimeError(f"wrk reported nothing: {done.stdout[-500:]} {done.stderr[-500:]}")
