"""What the device thread does now, and whether it takes far longer than predicted.

The limit of a batch is the larger of `worker.hang_timeout_s` and five times the time predicted for its model; a model
that has not run yet gets ten seconds as its prediction.
"""

from __future__ import annotations

import time

PREDICTION_FACTOR = 5.0
UNKNOWN_S = 10.0


def batch_limit_s(floor_s: float, predicted_s: float) -> float:
    """Seconds that a batch may take; `predicted_s` is 0 when nothing is known."""
    return max(floor_s, PREDICTION_FACTOR * (predicted_s or UNKNOWN_S))


class Activity:
    """Set by the device thread, read by the endpoint's thread."""

    def __init__(self) -> None:
        self._since = 0.0
        self._limit_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        return bool(self._since)

    @property
    def limit_s(self) -> float:
        """What was allowed to what runs, or ran last."""
        return self._limit_s

    def begin(self, limit_s: float) -> None:
        """Something begins that may take `limit_s` seconds."""
        self._limit_s, self._since = limit_s, time.monotonic()

    def renew(self) -> None:
        """A step of what runs is done: its limit counts from now."""
        if self._since:
            self._since = time.monotonic()

    def end(self) -> None:
        """It is over."""
        self._since = 0.0

    def overdue(self) -> bool:
        """Whether what runs now is past its limit."""
        since = self._since
        return bool(since) and time.monotonic() - since > self._limit_s
