"""A bounded number of places, of which no caller holds more than are free.

One caller alone holds half of them at most, two a third each, n callers 1/(n + 1) each: whoever comes next finds some.
"""

from __future__ import annotations

from collections import Counter


class Places:
    """`limit` places of one frontend."""

    def __init__(self, limit: int) -> None:
        self.limit = self._free = limit
        self._held: Counter[str] = Counter()

    def take(self, caller: str) -> bool:
        """Give `caller` one more place; False when `caller` holds as many as are free, or none is free."""
        if self._held[caller] >= self._free:
            return False
        self._held[caller] += 1
        self._free -= 1
        return True

    def give(self, caller: str) -> None:
        """`caller` gives one place back."""
        self._held[caller] -= 1
        self._free += 1
        if not self._held[caller]:
            del self._held[caller]
