"""The cost of one frontend's requests at one worker, by lane.

A stream whose client has enough rests at the worker, in no queue, and costs nothing here: clients that do not read use
no credits of other clients. Generated text that has started rests as well, since an engine bounds its sequences.
`JobTable.rest` does the same for the bound of the worker.
"""

from __future__ import annotations

from ipc.shares import Shares
from ipc.wire.messages import LANES, Submit


class Outstanding:
    """Requests that were sent and not answered. One event loop."""

    def __init__(self) -> None:
        self._lanes = {lane: Shares() for lane in LANES}
        self._resting: set[int] = set()

    @property
    def cost(self) -> int:
        """Cost in all lanes."""
        return sum(lane.cost for lane in self._lanes.values())

    def cost_in(self, lane: str) -> int:
        """Cost in one lane."""
        return self._lanes[lane].cost

    def allows(self, limit: int, lane: str, caller: str, share: float) -> bool:
        """Whether `caller` may have more in a lane that is bound to `limit` (`Shares.allows`)."""
        return self._lanes[lane].allows(limit, caller, share)

    def begin(self, request: Submit) -> None:
        """A request was sent."""
        work = request.work
        self._lanes[work.lane].add(work.cost, work.caller, work.share)

    def rest(self, request: Submit) -> None:
        """The worker's queue counts a stream no longer."""
        if request.id not in self._resting:
            self._resting.add(request.id)
            self._remove(request)

    def rests(self, request: Submit) -> bool:
        """Whether the worker's queue does not count a stream now."""
        return request.id in self._resting

    def resume(self, request: Submit) -> None:
        """The worker's queue counts a stream again that may have rested."""
        if request.id in self._resting:
            self._resting.remove(request.id)
            self.begin(request)

    def end(self, request: Submit) -> None:
        """The request is answered, or its caller has left."""
        if request.id in self._resting:
            self._resting.remove(request.id)
        else:
            self._remove(request)

    def _remove(self, request: Submit) -> None:
        work = request.work
        self._lanes[work.lane].remove(work.cost, work.caller)
