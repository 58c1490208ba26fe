"""How much of a bound each caller may fill: all of it while it is free, else a part by its share.

Used on both sides of the socket: for a frontend's credits at a worker, and for the bound of a worker's queue. Without
shares, the first caller that floods the server would fill the bound, and the other callers would be refused before they
can take turns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """What one caller has in flight."""

    cost: int = 0
    requests: int = 0
    share: float = 1.0


class Shares:
    """Cost in flight under one bound, in total and by caller. The caller "" is anonymous and has no part of its own."""

    def __init__(self) -> None:
        self.cost = 0
        self._callers: dict[str, _Held] = {}

    def allows(self, limit: int, caller: str, share: float) -> bool:
        """Whether `caller` may have more in flight: there is room, or it is below its part of `limit`.

        The parts are by the shares of those who have something in flight, so the sum may exceed `limit` by its half for
        the second caller, by a third for the third, and so on.
        """
        if self.cost < limit:
            return True
        if not caller:
            return False
        mine = self._callers.get(caller)
        others = sum(held.share for held in self._callers.values() if held is not mine)
        return (mine.cost if mine else 0) < limit * share / (share + others)

    def add(self, cost: int, caller: str, share: float) -> None:
        """A request begins."""
        self.cost += cost
        if caller:
            held = self._callers.setdefault(caller, _Held())
            held.cost += cost
            held.requests += 1
            held.share = share

    def correct(self, change: int, caller: str) -> None:
        """The cost of a request in flight turned out to differ by `change`."""
        self.cost += change
        if caller:
            self._callers[caller].cost += change

    def remove(self, cost: int, caller: str) -> None:
        """A request ends."""
        self.cost -= cost
        if caller:
            held = self._callers[caller]
            held.cost -= cost
            held.requests -= 1
            if not held.requests:
                del self._callers[caller]
