"""Bytes of named tensors that this process copied, by place, so that a test or a scrape can show how often.

Places: `receive` (from a body into a block of the input arena), `frame` (a payload sent in a message), `join` (requests
into one batch), `own` (into memory that is aligned or writable), `device` (from the host to the device), `place` (a
result into its block or frame), `region` (from or to a client's shared memory).
"""

from __future__ import annotations

import threading
from typing import Any

PLACES = ("receive", "frame", "join", "own", "device", "place", "region")

_lock = threading.Lock()
_copied = dict.fromkeys(PLACES, 0)


def count(place: str, nbytes: int) -> None:
    """So many bytes were copied there."""
    with _lock:
        _copied[place] += nbytes


def copied() -> dict[str, int]:
    """Bytes by place since the process started."""
    with _lock:
        return dict(_copied)


class Reported:
    """The bytes by place that have gone into a counter, so that each report adds only new bytes."""

    def __init__(self) -> None:
        self._told = dict.fromkeys(PLACES, 0)

    def report(self, counter: Any, process: str) -> None:
        """Add the new bytes to a counter with the labels process and place."""
        for place, nbytes in copied().items():
            counter.labels(process, place).inc(nbytes - self._told[place])
            self._told[place] = nbytes
