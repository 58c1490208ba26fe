"""How long another process was not heard of, counted only while this one ran.

A process that stood still itself finds old answers when it goes on, from others that are well.
"""

from __future__ import annotations

import time

LONG_S = 2.0
"""After so long the other process is no longer taken to be well."""
STEP_S = 0.25
"""The most that counts between two looks."""


class Silence:
    """One process that ought to answer; `look` is called several times a second."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked = time.monotonic()

    @property
    def is_long(self) -> bool:
        """Whether nothing was heard for `LONG_S`."""
        return self._seconds >= LONG_S

    def look(self) -> None:
        """Some time has passed."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, STEP_S)
        self._looked = now

    def end(self) -> None:
        """The other process was heard."""
        self._seconds = 0.0
