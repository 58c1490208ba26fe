"""What one frontend has outstanding at one worker: the cost of its requests, by lane.

A stream whose client has enough parts rests at the worker, in no queue: meanwhile it costs nothing here either, so that
clients who do not read use up nobody's credits. What the worker does with its own bound is `JobTable.rest`.
"""

from __future__ import annotations

from ipc.shares import Shares
from ipc.wire.messages import LANES, Submit
from ipc.wire.streams import PartFlow


class Outstanding:
    """Requests that were sent and not answered. One event loop."""

    def __init__(self) -> None:
        self._lanes = {lane: Shares() for lane in LANES}
        self._streams: dict[int, tuple[Submit, PartFlow]] = {}

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
        if request.work.parts:
            self._streams[request.id] = request, PartFlow(request.work.parts)
        self._add(request)

    def received(self, number: int, in_block: bool) -> None:
        """A part of the answer to a request has come."""
        if number in self._streams:
            request, flow = self._streams[number]
            went_on = flow.open
            flow.sent(in_block)
            if went_on and not flow.open:
                self._remove(request)

    def taken(self, number: int, count: int) -> None:
        """The worker was told that parts of the answer to a request are taken."""
        if number in self._streams:
            request, flow = self._streams[number]
            rested = not flow.open
            flow.taken(count)
            if rested and flow.open:
                self._add(request)

    def end(self, request: Submit) -> None:
        """It is answered, or nobody waits for it any more."""
        stream = self._streams.pop(request.id, None)
        if stream is None or stream[1].open:
            self._remove(request)

    def _add(self, request: Submit) -> None:
        work = request.work
        self._lanes[work.lane].add(work.cost, work.caller, work.share)

    def _remove(self, request: Submit) -> None:
        work = request.work
        self._lanes[work.lane].remove(work.cost, work.caller)
