"""Spares: processes that have imported the model libraries and wait for the slot of a worker that dies.

1. A spare is started while no worker is starting, so that both do not compete for processors.
2. `take` gives a slot to a spare. A spare that still imports takes the slot as well; it is ahead of a new process.
3. A spare that dies is replaced after a back-off. A spare holds no slot, lock, arena or model.
"""

from __future__ import annotations

import logging
import signal
import time

from ipc.processes import starting as processes
from ipc.settings import Settings
from workers.spare import Assignment
from workers.supervisor.backoff import Backoff
from workers.supervisor.child import Child

log = logging.getLogger(__name__)


class Spares:
    """The spares of one supervisor. Used by the supervisor's loop only."""

    def __init__(self, settings: Settings) -> None:
        self._count = settings.spare_count
        self._retry_s = settings.worker.restart_backoff_s
        self._backoff = Backoff(settings.worker.restart_backoff_s, settings.worker.healthy_after_s)
        self._children: dict[int, tuple[Child, float]] = {}
        """By pidfd, with the instant of the start."""
        self._start_at = 0.0

    def start_if_due(self) -> int | None:
        """Start a spare if one is missing; the pidfd of the new process, else None."""
        now = time.monotonic()
        if len(self._children) >= self._count or now < self._start_at:
            return None
        try:
            child = self._start()
        except OSError as error:
            log.error("a spare could not be started: %s", error)
            self._start_at = now + self._retry_s
            return None
        self._children[child.pidfd] = child, now
        log.info("spare started (pid %d)", child.pid)
        return child.pidfd

    def _start(self) -> Child:
        return Child.start("--spare", environment=processes.environment())

    def take(self, assignment: Assignment) -> Child | None:
        """Make the oldest spare the worker of a slot; None when no spare lives."""
        for pidfd, (child, _) in list(self._children.items()):
            try:
                child.assign(assignment)
            except OSError:
                # The spare has died; its pidfd will tell.
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
        """End all spares, which have nothing to finish; returns their pidfds, which are closed now."""
        pidfds = list(self._children)
        for child, _ in self._children.values():
            child.signal(signal.SIGKILL)
            child.wait()
        self._children.clear()
        return pidfds
