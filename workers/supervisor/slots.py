"""Slots of the supervisor: the process of each, its back-off, its silence, its end; and spares.

A spare (`Spares`) has imported the model libraries and waits. A spare is started while no worker is starting, so that
both do not compete for processors. A spare holds no slot, lock, arena or model. `Spares.take` gives a slot to a spare:
one line on its life pipe names the slot and its environment. From then on the process is a worker like any other, and
the end of the pipe says that the supervisor has died. A spare that still imports takes the slot as well, being ahead of
a new process. `Backoff` says when a slot, or a spare, may start again: at once after a healthy life, then after
doubling delays, and rarely if the process keeps failing.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from ipc import settings
from ipc.machine import count_gpus
from ipc.processes import starting as processes
from ipc.processes.liveness import processor_ticks, waits_for_machine
from ipc.processes.starting import Listener
from ipc.setting_sources import PREFIX
from ipc.settings import Settings
from workers.spare import Assignment

log = logging.getLogger(__name__)

HEALTHY_S = 300.0
MAX_DELAY_S = 60.0
FAILURES = 5
WINDOW_S = 60.0
QUARANTINE_S = 300.0
EXIT_CONFIG = 3
EXIT_DEVICE_LOST = 4
EXIT_UNFIT = 5
REFUSALS = (EXIT_CONFIG, EXIT_UNFIT)
"""Exit codes of a worker that does not start with these settings on this machine."""
STOP_GRACE_S = 5.0
CONFIG_RETRY_S = 2.0
"""Delay after a refusal of a slot that has served before: what was wrong may have been mended."""
TOOLS_STALL_S = 120.0
"""Longest silence of a tool host that starts; trying the layers of the sandbox takes seconds at most."""


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
    def start(cls, module: str, *arguments: str, environment: Mapping[str, str]) -> Child:
        """Run one of our modules with `arguments` and a life pipe. Raises `OSError`."""
        life_read, life_write = os.pipe()
        command = processes.command(module, *arguments, "--life-fd", str(life_read))
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
            child = Child.start("workers", "--spare", environment=processes.environment())
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


class Kind(NamedTuple):
    """What differs between slots: the process of a slot, and how the supervisor treats the process."""

    name: str
    """In logs, metrics and lock files, with the number of the slot."""
    module: str
    numbered: bool
    """Whether the process is told its slot, and may be a spare with a GPU."""
    stall_s: float
    """Longest silence while the process starts."""


class Slot:
    """Starts, watches and ends the process of one slot, which is waiting, starting, ready, stopping or ended."""

    def __init__(self, kind: Kind, slot: int, settings: Settings, notify: Path, spares: Spares) -> None:
        """`notify` is the socket on which the process reports."""
        self.kind, self.slot, self._settings, self._spares = kind, slot, settings, spares
        self.listener = Listener(notify)
        self.state = "waiting"
        self.quarantined = False
        self.misconfigured = False
        self._child: Child | None = None
        self._backoff = Backoff(settings.worker.restart_backoff_s, settings.worker.healthy_after_s)
        self._started = self._heard = self._start_at = self._stopping_since = self._ran = self._looked = 0.0
        self._ticks = 0
        self._killed_for = self._last_end = ""
        self.proven = False

    @property
    def label(self) -> str:
        """The name of the process in metrics."""
        return f"{self.kind.name}-{self.slot}"

    @property
    def _named(self) -> str:
        return f"{self.kind.name} {self.slot}"

    def start_if_due(self) -> bool:
        """Start the process if the slot waits and its delay is over. Returns whether a process was started."""
        if self.state != "waiting" or time.monotonic() < self._start_at:
            return False
        by = ""
        try:
            if self.kind.numbered:
                self._child = self._spares.take(Assignment(self.slot, self._environment()))
                by = ", a spare" if self._child is not None else ""
            self._child = self._child or self._start()
        except OSError as error:
            log.error("%s could not be started: %s", self._named, error)
            self._start_at = time.monotonic() + self._settings.worker.restart_backoff_s
            return False
        log.info("%s started (pid %d%s)", self._named, self._child.pid, by)
        self.state = "starting"
        self._started = self._heard = time.monotonic()
        self._killed_for = ""
        return True

    @property
    def pidfd(self) -> int:
        """Descriptor that becomes readable when the process dies; -1 without a process."""
        return -1 if self._child is None else self._child.pidfd

    def _start(self) -> Child:
        if not self.kind.numbered:
            return Child.start(self.kind.module, environment=self._environment() | _scrubbed())
        environment = processes.environment() | self._environment()
        return Child.start(self.kind.module, "--slot", str(self.slot), environment=environment)

    def _environment(self) -> dict[str, str]:
        """Variables that the slot adds: the notify socket, how the life before ended, and the one GPU of a worker."""
        environment = {"NOTIFY_SOCKET": str(self.listener.path), processes.ENDED_BY: self._last_end}
        if self.kind.numbered and self._settings.worker.device != "cpu" and count_gpus():
            visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible[self.slot % len(visible)] if visible else str(self.slot)
            )
        return environment

    def heard(self) -> None:
        """Read the notify socket."""
        fields = self.listener.receive()
        if fields:
            self._heard = time.monotonic()
        if fields.get("READY") == "1" and self.state == "starting":
            self.state, self.proven = "ready", True
            log.info("%s is ready: %s", self._named, fields.get("STATUS", ""))
        if fields.get("STOPPING") == "1":
            self.state, self._stopping_since = "stopping", time.monotonic()

    def kill_if_silent(self) -> None:
        """Kill a process that has been silent, or stopping, for too long: `reap` then sees its death.

        NOTE: while this process itself stands still, since the machine is busy or asleep, the other one does so too. So
        the time between two looks counts for half of the limit at most.
        """
        worker, now = self._settings.worker, time.monotonic()
        limit, since = self.kind.stall_s, self._heard
        if self.state == "ready":
            limit = worker.heartbeat_timeout_s
            self._heard = since = min(now, since + max(0.0, now - self._looked - limit / 2))
            self._looked = now
            if self._is_running(now, limit) or (now - since > limit and self._waits_for_machine()):
                limit = max(limit, worker.hang_timeout_s)
        elif self.state == "stopping":
            limit, since = worker.drain_timeout_s + STOP_GRACE_S, self._stopping_since
        if self.pidfd >= 0 and now - since > limit and not self._killed_for:
            log.error("%s (%s) is killed after %.1f s", self._named, self.state, now - since)
            self._killed_for = "hang"
            self.signal(signal.SIGKILL)

    def _is_running(self, now: float, limit: float) -> bool:
        """Whether the process has used processor time within the last half of `limit`, as far as looks tell.

        NOTE: one long call of C code, such as the tokenizer of a grammar, may hold the lock of the interpreter for
        seconds. A process that is stopped or waits for itself uses none.
        """
        ticks = 0 if self._child is None else processor_ticks(self._child.pid)
        if ticks != self._ticks:
            self._ticks, self._ran = ticks, now
        return now - self._ran <= limit / 2

    def _waits_for_machine(self) -> bool:
        return self._child is not None and waits_for_machine(self._child.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self._child is not None:
            self._child.signal(number)

    def reap(self, others_healthy: bool) -> str:
        """Take note of the death of the process and plan the next start. Returns the cause of the death."""
        assert self._child is not None
        # The last message of the process may not have been read yet.
        self.heard()
        code = self._child.wait()
        now = time.monotonic()
        self._child = None
        cause = self._killed_for or (f"signal-{-code}" if code < 0 else f"exit-{code}")
        if code == 0 and self.state == "stopping":
            cause = "drained"
        self._last_end = cause
        delay = 0.0 if cause == "drained" else self._backoff.failed(now, now - self._started)
        self.misconfigured = code in REFUSALS and not self.proven
        failing = self._backoff.exhausted(now) and others_healthy and code not in REFUSALS
        self.quarantined = failing or code == EXIT_DEVICE_LOST
        if self.quarantined:
            delay = QUARANTINE_S
        elif code in REFUSALS:
            delay = CONFIG_RETRY_S
        self.state, self._start_at = "waiting", now + delay
        if cause == "drained":
            log.info("%s has ended in order", self._named)
        else:
            log.warning("%s ended (%s); next start in %.1f s", self._named, cause, delay)
        return cause

    def close(self) -> None:
        """Remove the notify socket."""
        self.listener.close()


def slots_of(config: Settings, spares: Spares) -> Iterator[Slot]:
    """A slot for each worker, and one for the tool host if a tool is enabled."""
    worker = Kind("worker", "workers", True, config.worker.load_stall_s)
    for slot in range(config.worker_count):
        yield Slot(worker, slot, config, config.paths.notify_socket(slot), spares)
    if config.agent.has_tools:
        tools = Kind("tools", "workers.tools", False, TOOLS_STALL_S)
        yield Slot(tools, 0, config, config.paths.tools_notify_socket(), spares)


_PASSED = ("HOME", "LANG", "PATH", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "LD_LIBRARY_PATH")
"""Variables that the tool host gets beside our own. Tokens of hubs and clouds stay outside."""
_TOOLCHAIN = ("GOROOT", "JAVA_HOME", "RUSTUP_HOME", settings.SANDBOX)


def _scrubbed() -> dict[str, str]:
    """The environment of the tool host without the variables of the slot."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in (*_PASSED, *_TOOLCHAIN)
        or (name.startswith(PREFIX) and name not in ("PENSTOCK_KEY", "PENSTOCK_NOTIFY_SOCKET"))
    }
    return processes.environment(variables | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
