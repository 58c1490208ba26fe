"""A server that belongs to one command: on a free port of this machine, with files of its own, ended with the command.

1. `started` makes a temporary directory, which has the run directory and the log, and starts the server there.
2. `wait` waits until the server does what the command needs.
3. On exit the server is stopped, and the directory and the arenas are deleted. SIGTERM and SIGHUP end the command in
   order, so a closed terminal stops the server too.

The kernel ends the server when the command dies otherwise. The next command of the same kind and user deletes the
leftover directory and arenas.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from ipc import settings, sweep
from ipc.errors import PenstockError
from ipc.processes import starting
from ipc.processes.paths import RunPaths, temp_root

START_S = 600.0
STOP_S = 40.0
_RUN = "run"
"""The run directory in the directory of a server."""
_LOOK_EVERY_S = 0.1
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a process gets when its parent dies."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_ALONE = {
    "grpc.enabled": "false",
    "run.state_dir": "",
    "server.health_bind": "",
    "server.mcp_port": "0",
    "server.metrics_bind": "",
    "server.metrics_on_bind": "true",
}
"""Settings of every such server, which has one address, and keeps its state in its run directory."""


class NotStarted(PenstockError):
    """A server ended, did not load its model, or took too long; the message is the reason."""


class Server(msgspec.Struct, frozen=True):
    """A running server. `log` is the file of its output."""

    process: subprocess.Popen[bytes]
    port: int
    paths: RunPaths
    log: Path

    def get(self, path: str) -> list[str]:
        """Lines of the answer to a GET; none unless the answer is 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read().decode().splitlines() if answer.status == 200 else []
        except (OSError, ValueError, http.client.HTTPException):
            return []
        finally:
            connection.close()

    def last_lines(self, count: int) -> list[str]:
        """The end of the log."""
        return self.log.read_text(errors="replace").strip().splitlines()[-count:]


@contextlib.contextmanager
def started(prefix: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """A server that `command` starts with the settings of `environment`; stopped on exit.

    `prefix` begins the names of the directories of all servers of this kind, and the names of their arenas.
    """
    port = _free_port()
    shm = Path(settings.load(environ=environment).run.shm_dir)
    with _ended_in_order(), place(prefix, shm) as paths:
        own = _ALONE | {
            "server.bind": f"127.0.0.1:{port}",
            "run.dir": str(paths.root),
            "run.instance": paths.instance,
        }
        # The server supervises its own workers, even if the environment says that systemd runs those of another.
        environment = {**environment, "PENSTOCK_SUPERVISE": "1"} | settings.to_environ(own)
        log = paths.root.parent / "log"
        with log.open("wb") as written:
            # A session of its own: Ctrl-C ends an answer, not the server.
            process = subprocess.Popen(
                command,
                env=starting.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                start_new_session=True,
                # NOTE: the child calls only prctl(2) and getppid(2), for which no lock of another thread is needed.
                preexec_fn=_ends_with(os.getpid()),
            )
        try:
            yield Server(process, port, paths, log)
        finally:
            _stop(process)


def wait(server: Server, condition: Callable[[], bool], limit_s: float = START_S) -> None:
    """Wait until `condition` holds, which may raise `NotStarted`. Raises `NotStarted`."""
    until = time.monotonic() + limit_s
    while not condition():
        if server.process.poll() is not None:
            raise NotStarted("the server did not start")
        if time.monotonic() > until:
            raise NotStarted(f"the server was not ready within {limit_s:g} s")
        time.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise `SystemExit`, unless the caller of the command has them ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # NOTE: systemd sends SIGHUP right behind SIGTERM, and the second signal must not break off the end of the server.
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _ends_with(parent: int) -> Callable[[], None]:
    """A function for `preexec_fn`: the new process gets SIGTERM when its parent dies, however the parent dies."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def follow() -> None:
        prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return follow


@contextlib.contextmanager
def place(prefix: str, shm: Path) -> Iterator[RunPaths]:
    """Paths of a server in a new directory. On exit the directory and the arenas of killed processes are deleted."""
    _sweep(prefix, shm)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=_root(prefix)))
        held = _lock(directory)
        if held is not None:
            break
    try:
        yield _paths(directory, shm)
    finally:
        _delete(directory, shm)
        os.close(held)


def _root(prefix: str) -> Path:
    """Where the directories of all servers of a kind lie."""
    # The random letters of `mkdtemp` are eight.
    return temp_root(Path(f"{prefix}{8 * 'x'}") / _RUN)


def _paths(directory: Path, shm: Path) -> RunPaths:
    return RunPaths(directory / _RUN, directory.name, shm)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock on the directory of a server; None while another process has the lock."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.exists():
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sweep(prefix: str, shm: Path) -> None:
    """Delete the directories of servers whose command was killed."""
    for directory in _root(prefix).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            held = _lock(directory) if directory.stat().st_uid == os.geteuid() else None
            if held is not None:
                _delete(directory, shm)
                os.close(held)


def _delete(directory: Path, shm: Path) -> None:
    """Delete the directory of a server, and arenas without an owner."""
    with contextlib.suppress(OSError):
        sweep.sweep(_paths(directory, shm))
    shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to a server; after `STOP_S` SIGKILL to all its processes."""
    pids = (process.pid, *descendants(process.pid))
    process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_S
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    while any(_lives(pid) for pid in pids):
        if time.monotonic() > until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(_LOOK_EVERY_S)
    process.wait()


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False
