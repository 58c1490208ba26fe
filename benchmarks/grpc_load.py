"""Small gRPC requests as fast as they go: `h2load` where it is installed, a Python client of raw bytes otherwise.

h2load costs a small part of the Python client's processor time, so its figures say more about the server.
"""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass

TOOL = "h2load" if shutil.which("h2load") else "grpc"
INFER, LIVE = (f"/inference.GRPCInferenceService/{rpc}" for rpc in ("ModelInfer", "ServerLive"))
_THREADS = 4


@dataclass(frozen=True, slots=True)
class GrpcRate:
    """Answered requests a second, and the number of failed requests."""

    per_s: float
    failed: int


def measure(address: str, method: str, message: bytes, connections: int, seconds: int) -> GrpcRate:
    """Send one message again and again, one request at a time on each connection."""
    if TOOL == "h2load":
        return _h2load(address, method, message, connections, seconds)
    return _python(address, method, message, connections, seconds)


def _h2load(address: str, method: str, message: bytes, connections: int, seconds: int) -> GrpcRate:
    """Raises RuntimeError when it reports nothing."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack(">BI", 0, len(message)) + message)
        file.flush()
        command = ["h2load", f"--duration={seconds}", "--warm-up-time=1", f"-c{connections}", "-m1"]
        command += ["-t1", f"--data={file.name}", "-Hcontent-type: application/grpc", "-Hte: trailers"]
        done = subprocess.run(
            [*command, f"http://{address}{method}"], capture_output=True, text=True, check=False
        )
    rate = re.search(r"finished in .*?, ([\d.]+) req/s", done.stdout)
    states = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", done.stdout)
    if rate is None or states is None:
        raise RuntimeError(f"h2load reported nothing: {done.stdout[-500:]} {done.stderr[-500:]}")
    return GrpcRate(float(rate[1]), int(states[2]) + int(states[3]))


def _python(address: str, method: str, message: bytes, at_a_time: int, seconds: int) -> GrpcRate:
    import grpc

    counted, failed, lock = 0, 0, threading.Lock()
    until = time.monotonic() + seconds

    def client() -> None:
        nonlocal counted, failed
        with grpc.insecure_channel(address) as channel:
            rpc: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            while time.monotonic() < until:
                sent = [rpc.future(message) for _ in range(max(1, at_a_time // _THREADS))]
                errors = sum(one.exception() is not None for one in sent)
                with lock:
                    counted, failed = counted + len(sent) - errors, failed + errors

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda _: client(), range(_THREADS)))
    return GrpcRate(counted / seconds, failed)
