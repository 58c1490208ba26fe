"""A server under test: start it, wait until it answers, account for all its processes, end all of them.

Every process that belongs to a server carries a mark in its environment, so detached children are found as well, and
nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "BENCHMARK_SERVER"
_SCHED_CLOCK = 2
_POLL_S = 0.02


class ServerFailed(RuntimeError):
    """A server ended or did not become ready in time; carries the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds that these processes have used so far; ended processes count 0."""
    used = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            # NOTE: the number of the clock of another process, as clock_getcpuclockid gives it.
            used += time.clock_gettime(~pid << 3 | _SCHED_CLOCK)
    return used


def command_line(pid: int) -> str:
    """Command line or title of a process; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live; empty when the process is gone."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def memory_nbytes(pid: int) -> dict[str, int]:
    """`rss`, `pss` (shared pages divided by their users) and `uss` (private pages) of one process, in bytes."""
    values = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    return {
        "rss": values["Rss"],
        "pss": values["Pss"],
        "uss": values["Private_Clean"] + values["Private_Dirty"],
    }


def anonymous_nbytes(pid: int) -> int:
    """Resident memory of one process without files and shared memory, in bytes; cheap enough to sample often."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@dataclass
class Server:
    """One server with its processes. Use it as a context manager: entering waits until `is_ready` is true."""

    name: str
    command: Sequence[str]
    address: tuple[str, int]
    is_ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: Path = Path(__file__).resolve().parents[1]
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 20.0
    started_s: float = 0.0
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with tempfile.NamedTemporaryFile(prefix=f"{self.name}-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            since = time.perf_counter()
            self._process = subprocess.Popen(
                self.command,
                cwd=self.directory,
                env=os.environ | dict(self.environment) | {_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_ready(since + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.perf_counter() - since
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    def _wait_ready(self, deadline: float) -> None:
        while not self.is_ready():
            assert self._process is not None
            if self._process.poll() is not None or time.perf_counter() > deadline:
                state = "ended" if self._process.returncode is not None else "is not ready"
                raise ServerFailed(f"{self.name} {state}; its log ends:\n{self.log[-2000:]}")
            time.sleep(_POLL_S)

    @property
    def pid(self) -> int:
        """Process id of the command that was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that the processes of this server have logged."""
        return self._log.read_text(errors="replace")

    def pids(self) -> list[int]:
        """All living processes of this server, detached ones included.

        A process that writes its title over its environment, as gunicorn's do, is known as the child of another.
        """
        assert self._process is not None
        mark = f"{_MARK}={self._mark}".encode()
        found = [self.pid] if self._process.poll() is None else []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (directory / "environ").read_bytes().split(b"\0"):
                        found.append(int(directory.name))
        found = list(dict.fromkeys(found))
        for pid in found:
            found += [child for child in children(pid) if child not in found]
        return [pid for pid in found if command_line(pid)]

    def pids_running(self, *words: str) -> list[int]:
        """Processes of this server whose command line holds one of `words`."""
        return [pid for pid in self.pids() if any(word in command_line(pid) for word in words)]

    def stop(self) -> None:
        """SIGTERM to the command; after `stop_timeout_s` SIGKILL to every process of this server that is left."""
        assert self._process is not None
        deadline = time.perf_counter() + self.stop_timeout_s
        if self._process.poll() is None:
            self._process.terminate()
        while (self._process.poll() is None or self.pids()) and time.perf_counter() < deadline:
            time.sleep(_POLL_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._log.unlink(missing_ok=True)
