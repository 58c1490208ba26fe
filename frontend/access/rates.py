"""How often each key may call, over all frontends of a server.

Each key has a clock: the instant until which its requests so far are paid for at its rate. A request is let in while
that instant is at most a burst ahead of now, and moves it on by one request (the generic cell rate algorithm, ITU-T
I.371). The clocks lie in memory that the arbiter maps before it forks. There each frontend writes a place of its own
and reads all; the latest instant counts. Two frontends that decide within microseconds may let in one request more.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable

import numpy as np

from ipc.errors import RateLimited

ROWS = 64
"""Frontends with a row of their own, counting those of a reload; more share rows, which costs accuracy only."""


class RateMeter:
    """Clocks of `keys` keys. `clock` gives CLOCK_MONOTONIC nanoseconds, the same in all processes of a host."""

    def __init__(self, keys: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._memory = mmap.mmap(-1, max(1, keys) * ROWS * 8)
        self._paid_until = np.frombuffer(self._memory, np.int64).reshape(-1, ROWS)
        self._clock, self._row = clock, 0

    def use_row(self, slot: int) -> None:
        """This process is the frontend of that slot."""
        self._row = slot % ROWS

    def spend(self, key: int, requests_per_s: float, burst: int) -> None:
        """One request of key number `key`. Raises `RateLimited` with the time until the next one is let in."""
        now, step_ns = self._clock(), math.ceil(1e9 / requests_per_s)
        clocks = self._paid_until[key]
        start_ns = max(int(clocks.max()), now)
        early_ns = start_ns - now - step_ns * (burst - 1)
        if early_ns > 0:
            raise RateLimited(
                f"this key may send {requests_per_s:g} requests per second, {burst} at once",
                retry_after_s=max(1, math.ceil(early_ns / 1e9)),
            )
        clocks[self._row] = start_ns + step_ns
