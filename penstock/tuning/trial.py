"""One trial: a server with the settings under test, under load of several clients, then of a single client.

1. Start the server as `penstock serve` does, on a free port, with a run directory of its own (`own_server`).
2. Warm up, then let `CLIENTS` connections ask for `seconds`; count the items answered.
3. Let one connection ask for one item at a time. Read the memory of the workers. Stop the server.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from ipc.errors import PenstockError
from ipc.processes import starting
from ipc.processes.paths import asset
from penstock import own_server
from penstock.own_server import NotStarted, Server
from penstock.verification.samples import PASSAGES

CLIENTS = 16
ITEMS = 16
"""Items of a request."""
PREFIX = "penstock-tune-"
"""Beginning of the names of directories of trials, below the directory for temporary files."""
_POOL = 256
"""Different requests of each kind; equal items of one request would be computed once."""


class TrialFailed(PenstockError):
    """A server did not start, or did not answer; the message is the reason."""


class Measured(msgspec.Struct, frozen=True):
    """Items a second, p50 of a request under load and of one item alone in ms, and memory of all workers in bytes."""

    rate: float
    p50_ms: float
    alone_ms: float
    memory_nbytes: int


class Load(msgspec.Struct, frozen=True):
    """Path of the requests, bodies of `ITEMS` items, and bodies of one item."""

    path: str
    bodies: Sequence[bytes]
    single: Sequence[bytes]


def load_of(model: str, operation: str) -> Load:
    """Requests with texts of differing lengths; `operation` is encode or score."""
    chance = random.Random(1)

    def text(number: int) -> str:
        return f"{number}. " + " ".join(chance.choices(PASSAGES, k=chance.randint(1, 6)))

    numbers = itertools.count()

    def body(items: int) -> bytes:
        request = {"items": [{"text": text(next(numbers))} for _ in range(items)]}
        return msgspec.json.encode(request | ({"query": {"text": text(0)}} if operation == "score" else {}))

    return Load(
        f"/v1/{operation}/{model}", [body(ITEMS) for _ in range(_POOL)], [body(1) for _ in range(_POOL)]
    )


def measure(load: Load, environment: Mapping[str, str], workers: int, seconds: float) -> Measured:
    """Run one trial; `environment` is the environment of the server. Raises `TrialFailed`."""
    with _serving(environment, workers) as server:
        port = server.port
        _ask(port, load.path, load.bodies, CLIENTS, seconds / 3)
        began = time.monotonic()
        under_load = _ask(port, load.path, load.bodies, CLIENTS, seconds)
        took = time.monotonic() - began
        alone = _ask(port, load.path, load.single, 1, seconds / 3)
        return Measured(
            rate=len(under_load) * ITEMS / took,
            p50_ms=median(under_load) * 1e3,
            alone_ms=median(alone) * 1e3,
            memory_nbytes=sum(map(_pss_nbytes, _workers(server.process.pid))),
        )


def _ask(port: int, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds of each request. Every client sends at least one request. Raises `TrialFailed` for a refused request."""
    taken: list[float] = []
    refused: list[str] = []
    until = time.monotonic() + seconds

    def client(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=own_server.START_S)
        headers = {"Content-Type": "application/json", "Accept": "application/msgpack"}
        try:
            for number in itertools.count(first, clients):
                began = time.monotonic()
                connection.request("POST", path, bodies[number % len(bodies)], headers)
                answer = connection.getresponse()
                content = answer.read()
                if answer.status != 200:
                    refused.append(f"the server answered {answer.status}: {content[:300]!r}")
                    return
                taken.append(time.monotonic() - began)
                if time.monotonic() > until or refused:
                    return
        except (OSError, http.client.HTTPException) as error:
            refused.append(f"the server did not answer: {error!r}")
        finally:
            connection.close()

    threads = [threading.Thread(target=client, args=(first,), daemon=True) for first in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if refused:
        raise TrialFailed(refused[0])
    return taken


@contextlib.contextmanager
def _serving(environment: Mapping[str, str], workers: int) -> Iterator[Server]:
    """A server whose workers have all loaded the model; stopped on exit. Raises `TrialFailed`."""
    command = starting.command("frontend.arbiter.program", "-c", str(asset("gunicorn.conf.py")))
    with own_server.started(PREFIX, command, environment) as server:
        _await(server, workers)
        yield server


def _await(server: Server, workers: int) -> None:
    try:
        own_server.wait(server, lambda: _is_ready(server, workers))
    except NotStarted as error:
        raise TrialFailed(f"{error.message}: " + " | ".join(server.last_lines(3))) from None


def _is_ready(server: Server, workers: int) -> bool:
    """Whether every worker has told the frontend of the loaded model. Raises `NotStarted` for a failed load."""
    metrics = server.get("/metrics")
    if any(
        line.startswith("penstock_model_state{") and 'state="failed"' in line and line.endswith(" 1.0")
        for line in metrics
    ):
        raise NotStarted("the model did not load")
    joined = sum(line.startswith("penstock_worker_up{") and line.endswith(" 1.0") for line in metrics)
    loaded = sum(
        line.startswith("penstock_model_state{") and 'state="loaded"' in line and line.endswith(" 1.0")
        for line in metrics
    )
    return min(joined, loaded) >= workers and bool(server.get("/readyz"))


def _workers(pid: int) -> list[int]:
    """The workers of a server, which are the children of its supervisor: the arbiter's grandchildren."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [grandchild for child in children for grandchild in own_server.descendants(child)]


def _pss_nbytes(pid: int) -> int:
    """Memory of a process; a page that several processes share counts in equal parts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
