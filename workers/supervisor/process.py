"""Starts one worker per slot and keeps them alive, in embedded mode.

1. Take the supervisor lock, or stand by until its holder dies (a binary upgrade starts a second one).
2. Start every slot. Poll the processes' pidfds, their notify sockets, and the life pipe of the server.
3. A dead worker is started again after its back-off, by a spare where there is one; a silent one is killed first.
4. SIGTERM, or EOF on the life pipe (arbiter and all frontends are gone): drain the workers, sweep, exit 0.

A spare (`Spares`) has imported the model libraries and waits. A spare is started while no worker is starting, so that
both do not compete for processors. A spare holds no slot, lock, arena or model. `Spares.take` gives a slot to a spare:
one line on its life pipe names the slot and its environment. From then on the process is a worker like any other, and
the end of the pipe says that the supervisor has died. A spare that still imports takes the slot as well, being ahead of
a new process. `Backoff` says when a slot, or a spare, may start again: at once after a healthy life, then after
doubling delays, and rarely if the process keeps failing.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ipc import logs, settings, sweep
from ipc.errors import ConfigError
from ipc.machine import count_gpus
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotLock, SlotTaken, processor_ticks
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.processes.starting import Listener
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
POLL_S = 0.2


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


class WorkerSlot:
    """Starts, watches and ends the process of one slot, which is waiting, starting, ready, stopping or ended."""

    def __init__(self, slot: int, settings: Settings, paths: RunPaths, spares: Spares) -> None:
        self.slot, self._settings, self._spares = slot, settings, spares
        self.listener = Listener(paths.notify_socket(slot))
        self.state = "waiting"
        self.quarantined = False
        self.misconfigured = False
        self._child: Child | None = None
        self._backoff = Backoff(settings.worker.restart_backoff_s, settings.worker.healthy_after_s)
        self._started = self._heard = self._start_at = self._stopping_since = self._ran = 0.0
        self._ticks = 0
        self._killed_for = self._last_end = ""
        self.proven = False

    def start_if_due(self) -> bool:
        """Start the process if the slot waits and its delay is over. Returns whether a process was started."""
        if self.state != "waiting" or time.monotonic() < self._start_at:
            return False
        try:
            self._child = self._spares.take(Assignment(self.slot, self._environment()))
            by = ", a spare" if self._child is not None else ""
            self._child = self._child or self._start()
        except OSError as error:
            log.error("worker %d could not be started: %s", self.slot, error)
            self._start_at = time.monotonic() + self._settings.worker.restart_backoff_s
            return False
        log.info("worker %d started (pid %d%s)", self.slot, self._child.pid, by)
        self.state = "starting"
        self._started = self._heard = time.monotonic()
        self._killed_for = ""
        return True

    @property
    def pidfd(self) -> int:
        """Descriptor that becomes readable when the process dies; -1 without a process."""
        return -1 if self._child is None else self._child.pidfd

    def _start(self) -> Child:
        environment = processes.environment() | self._environment()
        return Child.start("--slot", str(self.slot), environment=environment)

    def _environment(self) -> dict[str, str]:
        """Variables that the slot adds: the notify socket, how the life before ended, and the one GPU."""
        environment = {"NOTIFY_SOCKET": str(self.listener.path), processes.ENDED_BY: self._last_end}
        if self._settings.worker.device != "cpu" and count_gpus():
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
            log.info("worker %d is ready: %s", self.slot, fields.get("STATUS", ""))
        if fields.get("STOPPING") == "1":
            self.state, self._stopping_since = "stopping", time.monotonic()

    def kill_if_silent(self) -> None:
        """Kill a process that has been silent, or stopping, for too long: `reap` then sees its death."""
        worker, now = self._settings.worker, time.monotonic()
        limit, since = worker.load_stall_s, self._heard
        if self.state == "ready":
            limit = worker.heartbeat_timeout_s
            if self._is_running(now, limit):
                limit = max(limit, worker.hang_timeout_s)
        elif self.state == "stopping":
            limit, since = worker.drain_timeout_s + STOP_GRACE_S, self._stopping_since
        if self.pidfd >= 0 and now - since > limit and not self._killed_for:
            log.error("worker %d (%s) is killed after %.1f s", self.slot, self.state, now - since)
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
            log.info("worker %d has ended in order", self.slot)
        else:
            log.warning("worker %d ended (%s); next start in %.1f s", self.slot, cause, delay)
        return cause

    def close(self) -> None:
        """Remove the notify socket."""
        self.listener.close()


class Supervisor:
    """All slots of one server."""

    def __init__(self, config: settings.Settings, life_fd: int) -> None:
        self._config, self._life_fd = config, life_fd
        self._spares = Spares(config)
        self._slots = [
            WorkerSlot(slot, config, config.paths, self._spares) for slot in range(config.worker_count)
        ]
        self._metrics = metrics.SupervisorMetrics()
        self._poll = select.poll()
        self._stopping = False
        self.exit_code = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for fd in (life_fd, self._wake_read):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)
        for slot in self._slots:
            self._poll.register(slot.listener.fileno(), select.POLLIN)
            self._metrics.quarantined.labels(f"worker-{slot.slot}").set(0)
            for cause in ("signal-9", "hang"):
                self._metrics.restarts.labels(f"worker-{slot.slot}", cause)

    def stop(self, *_: object) -> None:
        """End `run`. Safe as a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Keep the workers alive until `stop`, then drain them."""
        while not self._stopping:
            for slot in self._slots:
                if slot.start_if_due():
                    self._poll.register(slot.pidfd, select.POLLIN)
            if not any(slot.state == "starting" for slot in self._slots):
                spare = self._spares.start_if_due()
                if spare is not None:
                    self._poll.register(spare, select.POLLIN)
            self._turn()
            for slot in self._slots:
                slot.kill_if_silent()
        self._drain()

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(POLL_S * 1000):
            if fd == self._life_fd:
                log.info("the server is gone")
                self._poll.unregister(fd)
                self._stopping = True
            elif fd == self._wake_read:
                os.read(fd, 64)
            elif self._spares.reap(fd):
                self._poll.unregister(fd)
            else:
                self._slot_event(fd)

    def _slot_event(self, fd: int) -> None:
        for slot in self._slots:
            if fd == slot.listener.fileno():
                slot.heard()
            elif fd == slot.pidfd:
                self._poll.unregister(fd)
                healthy = any(other.state == "ready" for other in self._slots if other is not slot)
                cause = slot.reap(healthy)
                self._metrics.restarts.labels(f"worker-{slot.slot}", cause).inc()
                self._metrics.quarantined.labels(f"worker-{slot.slot}").set(slot.quarantined)
                if slot.misconfigured and not any(other.proven for other in self._slots):
                    log.critical(
                        "worker %d cannot start with this configuration; the server stops", slot.slot
                    )
                    self._stopping, self.exit_code = True, EXIT_CONFIG

    def _drain(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to workers that do not end in time."""
        limit = time.monotonic() + self._config.worker.drain_timeout_s + 5.0
        for pidfd in self._spares.close():
            self._poll.unregister(pidfd)
        for slot in self._slots:
            slot.state = "stopping" if slot.pidfd >= 0 else "ended"
            slot.signal(signal.SIGTERM)
        while any(slot.pidfd >= 0 for slot in self._slots):
            if time.monotonic() > limit:
                for slot in self._slots:
                    slot.signal(signal.SIGKILL)
            self._turn()
        for slot in self._slots:
            slot.close()


def _stand_by(config: settings.Settings, life_fd: int) -> SlotLock | None:
    """Wait for the supervisor lock. Returns None if our own server ends first."""
    logged = False
    while True:
        try:
            return SlotLock(config.paths.lock("supervisor"))
        except SlotTaken:
            if not logged:
                log.info("another supervisor is at work; standing by")
                logged = True
        if life_fd < 0:
            time.sleep(POLL_S)
        elif select.select([life_fd], [], [], POLL_S)[0]:
            return None


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.supervisor.process", description="Keeps the worker processes alive."
    )
    parser.add_argument(
        "--life-fd", type=int, default=-1, help="descriptor that ends when the server is gone"
    )
    options = parser.parse_args(argv)
    try:
        config = settings.load()
        logs.configure(config.log, "supervisor")
        processes.title("supervisor")
        prepare_run_dir(config.paths)
        lock = _stand_by(config, options.life_fd)
        if lock is None:
            return 0
        sweep.sweep(config.paths)
        metrics.configure(config.paths, "supervisor")
        supervisor = Supervisor(config, options.life_fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, supervisor.stop)
        supervisor.run()
        lock.release()
        sweep.sweep(config.paths)
        return supervisor.exit_code
    except ConfigError as error:
        if logging.getLogger().handlers:
            log.critical("%s", error.message)
        else:
            sys.stderr.write(f"supervisor: {error.message}\n")
        return EXIT_CONFIG
    finally:
        logs.flush()


if __name__ == "__main__":
    sys.exit(main())
