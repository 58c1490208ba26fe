"""Figures that are counted for every request, added up in memory and written to the metric files a little later.

PERF: an increment of prometheus_client's multi-process mode takes a lock and packs two numbers into a mapped file. A
request needs about 24 increments. Here an increment is an addition, and one turn of the event loop writes the sums of
the last 20 ms. A killed process loses the counts of that time.

A tally belongs to one thread, the thread of the event loop, unless its owner holds a lock around every call.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from bisect import bisect_left
from typing import Any

FLUSH_S = 0.02
_PAIR = struct.Struct("dd")


class Tally:
    """Counts that are not written yet. Until `follow` is called, every count is written at once."""

    def __init__(self) -> None:
        self._fresh: list[Amount | Observations] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held = False

    def hold(self) -> None:
        """Write from now on only when `flush` is called."""
        self._held = True

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write on turns of `loop` from now on."""
        self._loop = loop

    def amount(self, *children: Any) -> Amount:
        """Count with counters or gauges of prometheus_client that always change together."""
        return Amount(self, children)

    def observations(self, *children: Any) -> Observations:
        """Observe with histograms of prometheus_client that have the same bounds and always change together."""
        return Observations(self, children)

    def note(self, changed: Amount | Observations) -> None:
        """`changed` has something to write."""
        self._fresh.append(changed)
        if self._held:
            return
        if self._loop is None:
            self.flush()
        elif len(self._fresh) == 1:
            self._loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write the counts now, for a reader of the metric files."""
        fresh, self._fresh = self._fresh, []
        for changed in fresh:
            changed.write()


class Amount:
    """Counters or gauges that change together."""

    __slots__ = ("_children", "_noted", "_tally", "_waiting")

    def __init__(self, tally: Tally, children: tuple[Any, ...]) -> None:
        self._tally, self._children = tally, children
        self._waiting, self._noted = 0.0, False

    def inc(self, amount: float = 1.0) -> None:
        """Add; a gauge may go down by a negative amount."""
        self._waiting += amount
        if not self._noted:
            self._noted = True
            self._tally.note(self)

    def write(self) -> None:
        """Write the waiting amounts."""
        waiting, self._waiting, self._noted = self._waiting, 0.0, False
        if waiting:
            for child in self._children:
                child.inc(waiting)


class WrittenAmount:
    """A counter of one thread that is written at once, without the checks and the lock of the library."""

    __slots__ = ("_child", "_value")

    def __init__(self, child: Any) -> None:
        self._child = child
        self._value: Any = None
        # NOTE: without a directory for metric files the library keeps a plain value, which has no file. A later library
        # may keep the value in another way.
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            value = child._value
            file, written = value._file, _PAIR.pack(value._value, value._timestamp)
            at = file._positions[value._key]
            if file._m[at : at + _PAIR.size] == written:
                self._value = value

    def inc(self, amount: float = 1.0) -> None:
        """Add, and write the sum into the metric file."""
        value = self._value
        if value is None:
            self._child.inc(amount)
            return
        value._value += amount
        # NOTE: another thread may have grown the file and mapped the file anew. Both mappings are the same memory.
        file = value._file
        at = file._positions[value._key]
        file._m[at : at + _PAIR.size] = _PAIR.pack(value._value, value._timestamp)


class Observations:
    """Histograms with the same bounds that change together."""

    __slots__ = ("_bounds", "_children", "_counts", "_noted", "_tally", "_total")

    def __init__(self, tally: Tally, children: tuple[Any, ...]) -> None:
        self._tally, self._children = tally, children
        self._bounds: list[float] = children[0]._upper_bounds
        self._counts = [0] * len(self._bounds)
        self._total, self._noted = 0.0, False

    def observe(self, value: float) -> None:
        """One more value, not NaN."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        if not self._noted:
            self._noted = True
            self._tally.note(self)

    def write(self) -> None:
        """Write the waiting amounts."""
        # NOTE: the library observes single values only; these are the three fields that `Histogram.observe` changes.
        for place, count in enumerate(self._counts):
            if count:
                for child in self._children:
                    child._buckets[place].inc(count)
                self._counts[place] = 0
        for child in self._children:
            child._sum.inc(self._total)
        self._total, self._noted = 0.0, False
