"""Gunicorn's arbiter with frontends that may take long to end: those that a reload replaces finish their streams.

1. Gunicorn counts frontends that drain among those that serve, and so replaces none that dies meanwhile, and a reload
   waits for their end. Here a frontend that was told to end is set apart: the others are kept at their number.
2. Frontends of `server.max_draining` reloads may drain. Beyond, the oldest are told once more, and end at once.
3. SIGHUPs that come while the arbiter is busy are one reload.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

from gunicorn.arbiter import Arbiter

from frontend.server.succession import SUCCESSION

SET_APART = math.inf
"""The age of a frontend that was told to end. A reload of Gunicorn waits for frontends of a lower age than its own."""


class PatientArbiter(Arbiter):  # type: ignore[misc]
    """The arbiter of a server."""

    max_draining: Callable[[], int]
    penstock_draining: list[list[int]]
    """Processes that were told to end, by the reload that replaced them, the oldest first."""

    def wait_for_signals(self, timeout: float = 1.0) -> list[int]:
        """Signals in their order."""
        found: list[int] = super().wait_for_signals(timeout)
        return [sig for at, sig in enumerate(found) if sig != signal.SIGHUP or sig not in found[:at]]

    def manage_workers(self) -> None:
        """Keep the number of frontends that serve: start missing ones, and tell the oldest of too many to end."""
        serving = sorted((each for each in self.WORKERS.values() if each.age != SET_APART), key=_age)
        for _ in range(self.num_workers - len(serving)):
            self.spawn_worker()
        ending = serving[: max(0, len(serving) - self.num_workers)]
        for each in ending:
            each.age = SET_APART
            self.kill_worker(each.pid, signal.SIGTERM)
        draining = [*self.penstock_draining, [each.pid for each in ending]]
        alive = [[pid for pid in pids if pid in self.WORKERS] for pids in draining]
        self.penstock_draining = [pids for pids in alive if pids]
        self._end_oldest()

    def _end_oldest(self) -> None:
        """Tell the frontends of reloads beyond the bound to end at once."""
        while len(self.penstock_draining) > self.max_draining():
            for pid in self.penstock_draining.pop(0):
                self.kill_worker(pid, signal.SIGTERM)

    def stop(self, graceful: bool = True) -> None:
        """Stop the server: frontends learn that no other follows them."""
        SUCCESSION.stopping()
        super().stop(graceful)


def _age(worker: Any) -> float:
    return float(worker.age)


def take_over(server: Any, max_draining: Callable[[], int]) -> None:
    """Make the arbiter that Gunicorn has built a `PatientArbiter`. Gunicorn has no setting for its class.

    `max_draining` gives the present bound on reloads whose old frontends drain.
    """
    server.__class__ = PatientArbiter
    server.max_draining, server.penstock_draining = max_draining, []
