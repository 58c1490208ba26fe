"""How this frontend ends: the moment at which its drain begins, the moment at which the drain is over, and who is told.

1. The server calls `begin` on SIGTERM. The application registers with `on_begin` (to fail readiness, say goodbye to
   clients that only wait), or asks `draining`.
2. What is in work goes on until `until`, an instant that can only come nearer: a reload leaves streams much time, a
   stop little.
3. The server calls `end` when that instant has come. Streams that are in `streams` are told then and say so to their
   clients; others ask `is_over`.

The same object is in the lifespan and request scopes as `scope["state"]["drain"]`.

`Succession` tells which frontends a reload replaces.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable

import numpy as np

_log = logging.getLogger(__name__)
ROWS = 64
"""Frontends with a place of their own. More frontends share places; the last instant written to a place counts."""
LOOK_EVERY_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
"""Signals that end a frontend."""


def end_by_default() -> None:
    """Have signals end this process at once, until a server listens to them.

    SIGQUIT ends the process as SIGTERM: by itself SIGQUIT would also write the memory, with keys, into a core file.
    """
    for sig in ENDING:
        signal.signal(sig, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


class Drain:
    """Two switches that are thrown at most once in the life of a process."""

    def __init__(self) -> None:
        self.draining = self.is_over = False
        self.since = 0.0
        self.until = math.inf
        """When what is in work must have ended (`time.monotonic`)."""
        self.streams: set[Callable[[], None]] = set()
        """Called on the event loop when the drain is over. Streams add themselves when they begin."""
        self._callbacks: list[Callable[[], None]] = []

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the event loop when the drain begins; at once if it has begun already."""
        if self.draining:
            callback()
        else:
            self._callbacks.append(callback)

    def begin(self) -> None:
        """Throw the first switch. A callback that raises is logged and does not keep the others from being called."""
        if not self.draining:
            self.draining = True
            self.since = time.monotonic()
            _call(self._callbacks)

    def shorten(self, until: float) -> None:
        """What is in work must have ended at `until`, or before if that was said already."""
        self.until = min(self.until, until)

    def end(self) -> None:
        """Throw the second switch, as `begin`."""
        if not self.is_over:
            self.is_over = True
            _call(list(self.streams))


def _call(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("a drain callback failed")


DRAIN = Drain()
"""The drain of this process. Frontends are forked before the application is loaded, so each has its own."""


class Succession:
    """Tells who follows whom, by instants in CLOCK_MONOTONIC nanoseconds (0: never) in memory that all processes map.

    1. A frontend that is told to end asks whether a reload replaces the frontend, whose streams then go on, or the
       whole server stops.
    2. HTTP's listening sockets are the arbiter's and outlive every frontend; those of gRPC are each frontend's own. New
       frontends take seconds to boot while the old ones are told to drain at once, so an old frontend goes on listening
       until a new one listens.

    The arbiter maps the memory before it forks. The arbiter notes the instants of the last reload and of the stop, each
    frontend, in a place of its own, the instant at which it began to listen for gRPC.
    """

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
