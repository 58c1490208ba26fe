"""Who follows whom: the arbiter notes the end of frontends, and frontends their beginning, in memory that all map.

1. A frontend that is told to end asks whether a reload replaces the frontend, whose streams then go on, or the whole
   server stops.
2. HTTP's listening sockets are the arbiter's and outlive every frontend; those of gRPC are each frontend's own. New
   frontends take seconds to boot while the old ones are told to drain at once, so an old frontend goes on listening
   until a new one listens.

The arbiter maps the memory before it forks. The arbiter notes the instants of the last reload and of the stop, each
frontend, in a place of its own, the instant at which it began to listen for gRPC.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import time
from collections.abc import Callable

import numpy as np

ROWS = 64
"""Frontends with a place of their own. More frontends share places; the last instant written to a place counts."""
LOOK_EVERY_S = 0.05


class Succession:
    """Instants in CLOCK_MONOTONIC nanoseconds, 0: never."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        memory = np.frombuffer(mmap.mmap(-1, (2 + ROWS) * 8), np.int64)
        self._reloaded, self._stopped, self._listening = memory[:1], memory[1:2], memory[2:]
        self._clock = clock

    def reloading(self) -> None:
        """A reload begins: all frontends of now will be replaced. For the arbiter."""
        self._reloaded[0] = self._clock()

    def stopping(self) -> None:
        """The whole server stops. For the arbiter."""
        self._stopped[0] = self._clock()

    @property
    def is_stopping(self) -> bool:
        """Whether the whole server stops."""
        return bool(self._stopped[0])

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
"""The instants of this server. The arbiter imports this module before it forks, so its processes share the memory."""
