"""One trial: a server with the settings under test, under load of several clients, then of a single client.

1. Start the server as `penstock serve` does, on a free port, with a run directory of its own.
2. Warm up, then let `CLIENTS` connections ask for `seconds`; count the items answered.
3. Let one connection ask for one item at a time. Read the memory of the workers. Stop the server.

The kernel ends the server of a trial when `penstock tune` dies. The next trial of the same user deletes the leftover
run directory and arenas.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from ipc import settings, sweep
from ipc.errors import PenstockError
from ipc.processes import starting as processes
from ipc.processes.paths import RunPaths, asset
from penstock.verification.samples import PASSAGES

CLIENTS = 16
ITEMS = 16
"""Items of a request."""
START_S = 600.0
STOP_S = 40.0
_LOOK_EVERY_S = 0.1
_PREFIX = "penstock-tune-"
"""Beginning of the names of directories of trials, below the directory for temporary files."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a process gets when its parent dies."""
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
    with _server(environment, workers) as (port, pid):
        _ask(port, load.path, load.bodies, CLIENTS, seconds / 3)
        began = time.monotonic()
        under_load = _ask(port, load.path, load.bodies, CLIENTS, seconds)
        took = time.monotonic() - began
        alone = _ask(port, load.path, load.single, 1, seconds / 3)
        return Measured(
            rate=len(under_load) * ITEMS / took,
            p50_ms=median(under_load) * 1e3,
            alone_ms=median(alone) * 1e3,
            memory_nbytes=sum(map(_pss_nbytes, _workers(pid))),
        )


def _ask(port: int, path: str, bodies: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds of each request. Every client sends at least one request. Raises `TrialFailed` for a refused request."""
    taken: list[float] = []
    refused: list[str] = []
    until = time.monotonic() + seconds

    def client(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
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
def _server(environment: Mapping[str, str], workers: int) -> Iterator[tuple[int, int]]:
    """Port and pid of a server whose workers have all loaded the model; stopped on exit."""
    port = _free_port()
    with _place(Path(settings.load(environ=environment).run.shm_dir)) as paths:
        place = paths.root.parent
        own = {
            "server.bind": f"127.0.0.1:{port}",
            "run.dir": str(paths.root),
            "run.instance": paths.instance,
        }
        command = processes.command("frontend.arbiter.program", "-c", str(asset("gunicorn.conf.py")))
        log = place / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(
                command,
                env=processes.environment(environment) | settings.to_environ(own),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                # NOTE: no other thread of `penstock tune` runs here, so a lock held elsewhere cannot stop the child.
                preexec_fn=_ends_with(os.getpid()),
            )
        try:
            _wait(lambda: _is_ready(port, workers), process, log)
            yield port, process.pid
        finally:
            _stop(process)


def _ends_with(parent: int) -> Callable[[], None]:
    """A function for `preexec_fn`: the new process gets SIGTERM when its parent dies, however the parent dies."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def follow() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return follow


@contextlib.contextmanager
def _place(shm: Path) -> Iterator[RunPaths]:
    """Paths of a server in a new directory. On exit the directory and the arenas of killed processes are deleted."""
    _sweep(shm)
    while True:
        place = Path(tempfile.mkdtemp(prefix=_PREFIX))
        held = _lock(place)
        if held is not None:
            break
    try:
        yield _paths(place, shm)
    finally:
        _delete(place, shm)
        os.close(held)


def _paths(place: Path, shm: Path) -> RunPaths:
    return RunPaths(place / "run", place.name, shm)


def _lock(place: Path) -> int | None:
    """A descriptor that holds the lock on the directory of a trial; None while another process has the lock."""
    try:
        found = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if place.exists():
            return found
    except OSError:
        pass
    os.close(found)
    return None


def _sweep(shm: Path) -> None:
    """Delete the directories of trials whose `penstock tune` was killed."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = _lock(place) if place.stat().st_uid == os.geteuid() else None
            if held is not None:
                _delete(place, shm)
                os.close(held)


def _delete(place: Path, shm: Path) -> None:
    """Delete the directory of a trial, and arenas without an owner."""
    with contextlib.suppress(OSError):
        sweep.sweep(_paths(place, shm))
    shutil.rmtree(place, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _is_ready(port: int, workers: int) -> bool:
    """Whether every worker has told the frontend of the loaded model. Raises `TrialFailed` for a failed load."""
    metrics = _get(port, "/metrics")
    if any(
        line.startswith("penstock_model_state{") and 'state="failed"' in line and line.endswith(" 1.0")
        for line in metrics
    ):
        raise TrialFailed("the model did not load")
    joined = sum(line.startswith("penstock_worker_up{") and line.endswith(" 1.0") for line in metrics)
    loaded = sum(
        line.startswith("penstock_model_state{") and 'state="loaded"' in line and line.endswith(" 1.0")
        for line in metrics
    )
    return min(joined, loaded) >= workers and bool(_get(port, "/readyz"))


def _get(port: int, path: str) -> list[str]:
    """Lines of the answer to a GET; none unless the answer is 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read().decode().splitlines() if answer.status == 200 else []
    except (OSError, http.client.HTTPException):
        return []
    finally:
        connection.close()


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    try:
        while not condition():
            if process.poll() is not None or time.monotonic() > until:
                raise TrialFailed("the server did not start")
            time.sleep(_LOOK_EVERY_S)
    except TrialFailed as error:
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise TrialFailed(f"{error.message}: " + " | ".join(said)) from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to a server; after `STOP_S` SIGKILL to all its processes."""
    below = _below(process.pid)
    process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    while any(_lives(pid) for pid in below):
        if time.monotonic() > until:
            for pid in (process.pid, *below):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(_LOOK_EVERY_S)
    process.wait()


def _below(pid: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_below(child)]
    return found


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def _workers(pid: int) -> list[int]:
    """The workers of a server, which are the children of its supervisor: the arbiter's grandchildren."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [grandchild for child in children for grandchild in _below(child)]


def _pss_nbytes(pid: int) -> int:
    """Memory of a process; a page that several processes share counts in equal parts."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
