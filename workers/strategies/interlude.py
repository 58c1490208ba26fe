"""The pause between two steps of a long batch in which a short batch of queries runs.

The device thread alone enters and leaves it. Meanwhile the flight record names the requests of both batches, and the
time of the short one is kept, so that it does not count as time of the long one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 0.1
"""Predicted time of a batch that may run in a pause."""
Flight = list[tuple[int, int]]


class Interlude:
    """`playing` while a short batch runs in a pause; `flight` are then the requests of the long one."""

    def __init__(self) -> None:
        self.playing = False
        self.flight: Flight = []
        self.total_ns = 0
        """Time of all pauses that have ended."""

    @contextmanager
    def of(self, flight: Flight) -> Iterator[None]:
        """A pause of the batch with these (session tag, request id) pairs."""
        self.playing, self.flight, began = True, flight, time.monotonic_ns()
        try:
            yield
        finally:
            self.playing, self.flight = False, []
            self.total_ns += time.monotonic_ns() - began
