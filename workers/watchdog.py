"""Notices a device thread that hangs: a batch that runs far longer than predicted."""

from __future__ import annotations

import time
from typing import Protocol

from workers.queue import DrainRate

PREDICTION_FACTOR = 5.0
UNKNOWN_S = 10.0


class Busy(Protocol):
    """What is watched: since when it is busy (0 = idle), and with how many tokens."""

    busy_since_ns: int
    busy_tokens: int


class Watchdog:
    """Limit = the larger of `floor_s` and five times the predicted batch time."""

    def __init__(self, floor_s: float, watched: Busy, rate: DrainRate) -> None:
        self._floor_s, self._watched, self._rate = floor_s, watched, rate

    def hung(self) -> bool:
        """Whether the present batch is past its limit."""
        since = self._watched.busy_since_ns
        if not since:
            return False
        predicted_s = self._rate.seconds_for(self._watched.busy_tokens) or UNKNOWN_S
        limit_s = max(self._floor_s, PREDICTION_FACTOR * predicted_s)
        return (time.monotonic_ns() - since) / 1e9 > limit_s
