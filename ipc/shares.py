"""How much of a bound each caller may fill: the whole bound while there is room, then a part by its share.

Both sides of the socket use shares: frontends for their credits at a worker, workers for the bound of their queue.
Without shares, a caller that floods the server would fill the bound, and the other callers would be refused before
they can take turns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """Cost and number of a caller's requests in flight."""

    cost: int = 0
    requests: int = 0
    share: float = 1.0


class Shares:
    """Cost in flight under one bound, in total and by caller. The caller "" is anonymous and has no part of its own."""

    def __init__(self) -> None:
        self.cost = 0
        self._callers: dict[str, _Held] = {}

    def allows(self, limit: int, caller: str, share: float) -> bool:
        """Whether `caller` may have more in flight: there is room, or the caller is below its part of `limit`.

        The parts follow the shares of callers with requests in flight. The sum may exceed `limit`: by a half for the
        second caller, by a third for the third, and so on.
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
