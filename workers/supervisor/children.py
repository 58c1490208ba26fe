"""The child processes of the supervisor: workers, and spares for the slots of workers that die.

1. A spare has imported the model libraries and waits. A spare is started while no worker is starting, so that both do
   not compete for processors. A spare holds no slot, lock, arena or model.
2. `Spares.take` gives a slot to a spare: one line on its life pipe names the slot and its environment. From then on the
   process is a worker like any other, and the end of the pipe says that the supervisor has died. A spare that still
   imports takes the slot as well, being ahead of a new process.
3. `Backoff` says when a slot, or a spare, may start again: at once after a healthy life, then after doubling delays,
   and rarely if it keeps failing.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ipc.processes import starting as processes
from ipc.settings import Settings
from workers.spare import Assignment

log = logging.getLogger(__name__)

HEALTHY_S = 300.0
MAX_DELAY_S = 60.0
FAILURES = 5
WINDOW_S = 60.0
QUARANTINE_S = 300.0


@dataclass(slots=True)
class Backoff:
    """Failure history of one slot; all instants are seconds of one monotonic clock."""

    base_s: float = 1.0
    healthy_s: float = HEALTHY_S
    _failures: deque[float] = field(default_factory=deque)
    _run: int = 0

    def failed(self, now: float, lived_s: float) -> float:
        """Record an unplanned end after `lived_s` seconds; returns the delay until the next start."""
        if lived_s >= self.healthy_s:
            self._run = 0
            self._failures.clear()
        self._failures.append(now)
        while now - self._failures[0] > WINDOW_S:
            self._failures.popleft()
        delay = 0.0 if self._run == 0 else min(MAX_DELAY_S, self.base_s * 2 ** (self._run - 1))
        self._run += 1
        return delay

    def exhausted(self, now: float) -> bool:
        """Whether the slot failed `FAILURES` times within the window."""
        return len([at for at in self._failures if now - at <= WINDOW_S]) >= FAILURES


class Child:
    """One started process, its pidfd, and the write end of its life pipe."""

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int, life_write: int) -> None:
        self._process, self.pidfd, self._life_write = process, pidfd, life_write

    @classmethod
    def start(cls, *arguments: str, environment: Mapping[str, str]) -> Child:
        """Run `python -m workers` with `arguments` and a life pipe. Raises `OSError`."""
        life_read, life_write = os.pipe()
        command = processes.command("workers", *arguments, "--life-fd", str(life_read))
        try:
            process = subprocess.Popen(
                command, env=environment, pass_fds=(life_read,), stdin=subprocess.DEVNULL
            )
            return cls(process, os.pidfd_open(process.pid), life_write)
        except OSError:
            # A process without its life pipe ends by itself.
            os.close(life_write)
            raise
        finally:
            os.close(life_read)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def assign(self, assignment: Assignment) -> None:
        """Give a spare its slot. Raises `OSError` when the spare has died."""
        os.write(self._life_write, msgspec.json.encode(assignment) + b"\n")

    def signal(self, number: int) -> None:
        """Send a signal. After `wait` nothing is sent."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> int:
        """Wait for the end and close both descriptors. Returns the exit code, negative for a signal."""
        code = self._process.wait()
        os.close(self.pidfd)
        os.close(self._life_write)
        return code


class Spares:
    """The spares of one supervisor. Used by the supervisor's loop only."""

    def __init__(self, settings: Settings) -> None:
        self._count = settings.spare_count
        self._retry_s = settings.worker.restart_backoff_s
        self._backoff = Backoff(settings.worker.restart_backoff_s, settings.worker.healthy_after_s)
        self._children: dict[int, tuple[Child, float]] = {}
        """Each child with the instant of its start, by pidfd."""
        self._start_at = 0.0

    def start_if_due(self) -> int | None:
        """Start a spare if one is missing; the pidfd of the new process, else None."""
        now = time.monotonic()
        if len(self._children) >= self._count or now < self._start_at:
            return None
        try:
            child = Child.start("--spare", environment=processes.environment())
        except OSError as error:
            log.error("a spare could not be started: %s", error)
            self._start_at = now + self._retry_s
            return None
        self._children[child.pidfd] = child, now
        log.info("spare started (pid %d)", child.pid)
        return child.pidfd

    def take(self, assignment: Assignment) -> Child | None:
        """Make the oldest spare the worker of a slot; None when no spare lives."""
        for pidfd, (child, _) in list(self._children.items()):
            try:
                child.assign(assignment)
            except OSError:
                # The spare has died. `reap` follows when the pidfd becomes readable.
                continue
            del self._children[pidfd]
            return child
        return None

    def reap(self, pidfd: int) -> bool:
        """Note that the process behind `pidfd` has died; False when the process is no spare."""
        child, started = self._children.pop(pidfd, (None, 0.0))
        if child is None:
            return False
        code, now = child.wait(), time.monotonic()
        delay = self._backoff.failed(now, now - started)
        self._start_at = now + delay
        log.warning("a spare ended with %d; the next starts in %.1f s", code, delay)
        return True

    def close(self) -> list[int]:
        """Kill all spares; a spare has nothing to finish. Returns their pidfds, which are closed now."""
        pidfds = list(self._children)
        for child, _ in self._children.values():
            child.signal(signal.SIGKILL)
            child.wait()
        self._children.clear()
        return pidfds
