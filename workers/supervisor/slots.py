"""One supervised worker slot: its process, its notify socket, its back-off.

Used by the supervisor's loop only. A slot is waiting, starting, ready, or stopping.
"""

from __future__ import annotations

import logging
import os
import signal
import time

from ipc.machine import count_gpus
from ipc.processes import starting as processes
from ipc.processes.notify import Listener
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from workers.spare import Assignment
from workers.supervisor.backoff import QUARANTINE_S, Backoff
from workers.supervisor.child import Child
from workers.supervisor.spares import Spares

log = logging.getLogger(__name__)

EXIT_CONFIG = 3
EXIT_DEVICE_LOST = 4
STOP_GRACE_S = 5.0
CONFIG_RETRY_S = 2.0
"""A slot that once served looks again this often whether its files have been mended."""


class WorkerSlot:
    """Starts, watches and ends the process of one slot."""

    def __init__(self, slot: int, settings: Settings, paths: RunPaths, spares: Spares) -> None:
        self.slot, self._settings, self._spares = slot, settings, spares
        self.listener = Listener(paths.notify_socket(slot))
        self.state = "waiting"
        self.quarantined = False
        self.misconfigured = False
        self._child: Child | None = None
        self._backoff = Backoff(settings.worker.restart_backoff_s, settings.worker.healthy_after_s)
        self._started = self._heard = self._start_at = self._stopping_since = 0.0
        self._killed_for = ""
        self.proven = False

    def start_if_due(self) -> bool:
        """Start the process when its time has come; True when it was started."""
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
        """What the environment of this slot's process has besides ours: its notify socket, and its one GPU."""
        environment = {"NOTIFY_SOCKET": str(self.listener.path)}
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

    def check(self) -> None:
        """Kill a process that has been silent, or stopping, for too long."""
        worker, now = self._settings.worker, time.monotonic()
        limit, since = worker.load_stall_s, self._heard
        if self.state == "ready":
            limit = worker.heartbeat_timeout_s
        elif self.state == "stopping":
            limit, since = worker.drain_timeout_s + STOP_GRACE_S, self._stopping_since
        if self.pidfd >= 0 and now - since > limit and not self._killed_for:
            log.error("worker %d (%s) is killed after %.1f s", self.slot, self.state, now - since)
            self._killed_for = "hang"
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self._child is not None:
            self._child.signal(number)

    def reap(self, others_healthy: bool) -> str:
        """The process has died: plan the next start. Returns the cause."""
        assert self._child is not None
        # Its last words may not have been read yet.
        self.heard()
        code = self._child.wait()
        now = time.monotonic()
        self._child = None
        cause = self._killed_for or (f"signal-{-code}" if code < 0 else f"exit-{code}")
        if code == 0 and self.state == "stopping":
            cause = "drained"
        delay = 0.0 if cause == "drained" else self._backoff.failed(now, now - self._started)
        self.misconfigured = code == EXIT_CONFIG and not self.proven
        failing = self._backoff.exhausted(now) and others_healthy and code != EXIT_CONFIG
        self.quarantined = failing or code == EXIT_DEVICE_LOST
        if self.quarantined:
            delay = QUARANTINE_S
        elif code == EXIT_CONFIG:
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
