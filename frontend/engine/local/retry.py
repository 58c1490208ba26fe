"""The one retry rule: pure work, nothing sent, time left, few attempts, and a budget.

A request that was on the device when the worker died is a suspect and may run once more, alone, within the budget. A
bystander was only queued there: its losses do not count as attempts and take nothing from the budget, since nothing ran
for it and one death makes bystanders of all that waited. They are bounded by `MAX_LOSSES` and the deadline.
"""

from __future__ import annotations

import time
from collections import deque

from ipc.errors import PenstockError, WorkerCrashed, WorkerLost

MAX_ATTEMPTS = 2
MAX_LOSSES = 5
BUDGET_RATIO = 0.2
BUDGET_FLOOR = 512
BUDGET_WINDOW_S = 10.0


class RetryBudget:
    """Second runs may be at most a fifth of recent traffic (and always `BUDGET_FLOOR` per window)."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._retries: deque[float] = deque()
        self._since = time.monotonic()

    def count_request(self) -> None:
        """One request came in."""
        now = time.monotonic()
        if now - self._since > BUDGET_WINDOW_S:
            self._requests, self._since = self._requests / 2, now
        self._requests += 1

    def take(self) -> bool:
        """Take one retry out of the budget, or say that it is used up."""
        now = time.monotonic()
        while self._retries and now - self._retries[0] > BUDGET_WINDOW_S:
            self._retries.popleft()
        if len(self._retries) >= max(BUDGET_FLOOR, self._requests * BUDGET_RATIO):
            return False
        self._retries.append(now)
        return True


class Attempts:
    """History of one request: how often it ran on a device that died, and how often it was merely lost."""

    def __init__(self) -> None:
        self.runs = 0
        self.losses = 0
        self.avoid: set[int] = set()

    @property
    def solo(self) -> bool:
        """Whether the next attempt must run in a batch of its own."""
        return self.runs > 0

    def next_error(
        self, error: WorkerLost, slot: int, deadline_ns: int, budget: RetryBudget
    ) -> PenstockError | None:
        """Record a loss on `slot`; None means try again, otherwise the error to give to the caller."""
        self.losses += 1
        if error.suspect:
            self.runs += 1
        if self.runs >= MAX_ATTEMPTS:
            return WorkerCrashed("the worker process died twice on this input; it is refused for a while")
        self.avoid = {slot}
        over = self.losses > MAX_LOSSES or time.monotonic_ns() >= deadline_ns
        if over or (error.suspect and not budget.take()):
            return WorkerLost(
                "the worker was lost and the request could not be tried again",
                retry_after_s=error.retry_after_s,
            )
        return None
