"""How this frontend ends: the moment at which its drain begins, the moment at which the drain is over, and who is told.

1. The server calls `begin` on SIGTERM. The application registers with `on_begin` (to fail readiness, say goodbye to
   clients that only wait), or asks `draining`.
2. What is in work goes on until `until`, an instant that can only come nearer: a reload leaves streams much time, a
   stop little.
3. The server calls `end` when that instant has come. Streams that are in `streams` are told then and say so to their
   clients; others ask `is_over`.

The same object is in the lifespan and request scopes as `scope["state"]["drain"]`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)


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
