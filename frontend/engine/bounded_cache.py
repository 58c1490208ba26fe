"""Values of bounded size by key, the least recently used given up first. For one thread, the event loop's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from frontend.records.finishing import CacheMeter

V = TypeVar("V")

ENTRY_NBYTES = 640
"""About what a key, its place in the order and the objects around a value take beside the value's own bytes."""
LARGEST_SHARE = 8
"""A value above this part of the bound is not kept, so that one value cannot push out all others."""


class _Entry(NamedTuple, Generic[V]):
    """A value, the bytes of the whole entry, and where they are counted."""

    value: V
    nbytes: int
    meter: CacheMeter


class BoundedCache(Generic[V]):
    """At most `limit_nbytes` of values together, as their owners count them."""

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._entries: OrderedDict[bytes, _Entry[V]] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """The value, which is now the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: bytes, value: V, nbytes: int, meter: CacheMeter) -> None:
        """Keep a value of `nbytes` in place of an earlier one with that key, and give up others for room."""
        if key in self._entries:
            self._let_go(self._entries.pop(key))
        nbytes += ENTRY_NBYTES
        if nbytes > self._limit_nbytes // LARGEST_SHARE:
            return
        self._entries[key] = _Entry(value, nbytes, meter)
        self.nbytes += nbytes
        meter.nbytes.inc(nbytes)
        while self.nbytes > self._limit_nbytes:
            _, oldest = self._entries.popitem(last=False)
            self._let_go(oldest)
            oldest.meter.evictions.inc()

    def _let_go(self, entry: _Entry[V]) -> None:
        self.nbytes -= entry.nbytes
        entry.meter.nbytes.inc(-entry.nbytes)
