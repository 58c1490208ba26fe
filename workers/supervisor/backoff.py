"""When a slot may start again: at once after a healthy life, then after doubling delays, rarely if it keeps failing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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
