"""The moment at which this frontend begins to drain, and the functions to call then.

The server calls `begin` on SIGTERM; the application registers with `on_begin` (to fail readiness, end streams, say
goodbye to workers) or asks `draining`. The same object is in the lifespan and request scopes as
`scope["state"]["drain"]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Drain:
    """A switch that is thrown at most once in the life of a process."""

    def __init__(self) -> None:
        self.draining = False
        self.since = 0.0
        self._callbacks: list[Callable[[], None]] = []

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the event loop when the drain begins; at once if it has begun already."""
        if self.draining:
            callback()
        else:
            self._callbacks.append(callback)

    def begin(self) -> None:
        """Throw the switch. A callback that raises is logged and does not keep the others from being called."""
        if self.draining:
            return
        self.draining = True
        self.since = time.monotonic()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                _log.exception("a drain callback failed")


DRAIN = Drain()
"""The drain of this process. Frontends are forked before the application is loaded, so each has its own."""
