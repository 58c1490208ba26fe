"""One frontend's requests at one worker, by lane, in tokens and in seconds, and whether there is credit for more.

The worker says how much this frontend may add (`Credits`). From then on what is sent fills that room, and what ends
gives it back.

Requests for generated text need no credit: each engine bounds its sequences itself
(`workers.strategies.generation`), and the room of a worker is without them.

A stream whose client has enough rests at the worker, in no queue, and costs nothing here: clients that do not read use
no credits of other clients. `JobTable.rest` does the same for the bound of the worker.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from frontend.engine.interface import Payload, bytes_of
from frontend.engine.streams.incoming import Delivery
from ipc.memory.input_arena import InputBlock
from ipc.shares import Shares
from ipc.wire.messages import LANES, Credits, GenerateCall, Submit, Work


class Sent(NamedTuple):
    """A request that was sent, and what waits for its answer."""

    future: asyncio.Future[Delivery]
    message: Submit
    payload: Payload

    @property
    def kept_nbytes(self) -> int:
        """Private bytes of the payload; a block of the arena stays until the worker has read the block."""
        return 0 if isinstance(self.payload, InputBlock) else len(bytes_of(self.payload))


class Outstanding:
    """Requests that were sent and not answered. One event loop."""

    def __init__(self) -> None:
        self._lanes = {lane: Shares() for lane in LANES}
        self._limits_s = dict.fromkeys(LANES, 0.0)
        self._prices: dict[str, float] = {}
        self._floor = 0
        self._resting: set[int] = set()

    @property
    def cost(self) -> int:
        """Tokens in all lanes."""
        return sum(lane.cost for lane in self._lanes.values())

    @property
    def seconds(self) -> float:
        """Predicted time of the device for all requests, as far as the worker knows the models."""
        return sum(lane.all.seconds(self._price) for lane in self._lanes.values())

    def before(self, lane: str) -> float:
        """Predicted seconds of the requests that go before a new request of a lane."""
        return self._lanes[lane].all.seconds(self._price) if lane == "interactive" else self.seconds

    def _price(self, model: str) -> float:
        return self._prices.get(model, 0.0)

    def credit(self, credits: Credits) -> None:
        """The worker says how much more it takes."""
        self._prices, self._floor = credits.prices, credits.floor
        rooms = {"interactive": credits.room_s, "bulk": credits.bulk_room_s}
        self._limits_s = {
            lane: max(0.0, room_s + self._lanes[lane].all.seconds(self._price))
            for lane, room_s in rooms.items()
        }

    def allows(self, work: Work) -> bool:
        """Whether the worker may take more of such work. One request of each model is always allowed, and more tokens.

        The worker has the last word. A request that the worker would refuse is not sent.
        """
        lane = self._lanes[work.lane]
        if not _name(work) or lane.all.tokens.get(work.model, 0) <= self._floor:
            return True
        limit_s = self._limits_s[work.lane]
        return lane.allows(limit_s, self._price, work.model, work.caller, work.share)

    def begin(self, request: Submit) -> None:
        """A request was sent."""
        work = request.work
        self._lanes[work.lane].begin(work.cost, _name(work), work.caller, work.share)

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
        self._lanes[work.lane].end(work.cost, _name(work), work.caller)


def _name(work: Work) -> str:
    """The model that prices a request; "" for generated text, which has no price."""
    return "" if isinstance(work.call, GenerateCall) else work.model
