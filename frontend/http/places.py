"""A bound that callers share: no caller holds more places than are free.

One caller alone holds half of the places at most, two a third each, n callers 1/(n + 1) each: the next caller finds
free places. A single request may take all free places at once.
"""

from __future__ import annotations

from collections import Counter


class Places:
    """`limit` places of one frontend."""

    def __init__(self, limit: int) -> None:
        self.limit = self.free = limit
        self._held: Counter[str] = Counter()

    def take(self, caller: str, count: int = 1) -> bool:
        """Give `caller` more places; False when `caller` would hold more than are free now."""
        if self._held[caller] + count > self.free:
            return False
        self._held[caller] += count
        self.free -= count
        return True

    def give(self, caller: str, count: int = 1) -> None:
        """`caller` gives places back."""
        self._held[caller] -= count
        self.free += count
        if not self._held[caller]:
            del self._held[caller]
