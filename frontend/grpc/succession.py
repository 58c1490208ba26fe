"""How gRPC's port is handed over in a reload.

HTTP's listening sockets are the arbiter's and outlive every frontend; those of gRPC are each frontend's own. New
frontends take seconds to boot while the old ones are told to drain at once, so an old one goes on listening until a new
one does. Both learn of each other through memory that the arbiter maps before it forks: the arbiter notes the instant
of each reload, each frontend, in a place of its own, the instant at which it began to listen.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import time
from collections.abc import Callable

import numpy as np

ROWS = 64
"""Frontends with a place of their own; more share places, of which the last one written counts."""
LOOK_EVERY_S = 0.05


class Succession:
    """Instants in CLOCK_MONOTONIC nanoseconds, 0: never."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        memory = np.frombuffer(mmap.mmap(-1, (1 + ROWS) * 8), np.int64)
        self._reloaded, self._listening = memory[:1], memory[1:]
        self._clock = clock

    def reloading(self) -> None:
        """A reload begins: all frontends of now will be replaced. For the arbiter."""
        self._reloaded[0] = self._clock()

    def listens(self, slot: int) -> None:
        """The frontend of that slot has begun to listen."""
        self._listening[slot % ROWS] = self._clock()

    def is_replaced(self, since_ns: int) -> bool:
        """Whether a frontend of since then is being replaced by a reload."""
        return bool(since_ns < self._reloaded[0])

    def is_missed(self, since_ns: int) -> bool:
        """Whether a frontend that listens since then is being replaced and nobody listens in its place yet."""
        return self.is_replaced(since_ns) and bool(self._reloaded[0] > self._listening.max())

    async def replaced(self, since_ns: int, timeout_s: float) -> bool:
        """Wait while a frontend that listens since then is missed, at most so long; whether another has its place."""
        for _ in range(math.ceil(timeout_s / LOOK_EVERY_S)):
            if not self.is_missed(since_ns):
                return self.is_replaced(since_ns)
            await asyncio.sleep(LOOK_EVERY_S)
        return False


SUCCESSION = Succession()
"""That of this server. The arbiter imports this module before it forks, so that all its processes share the memory."""
