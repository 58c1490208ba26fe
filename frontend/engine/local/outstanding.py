"""One frontend's requests at one worker: their cost, whether there is credit for more, and who takes what arrives.

The worker says how much this frontend may add (`Credits`). From then on what is sent fills that room, and what ends
gives it back.

Requests for generated text need no credit: each engine bounds its sequences itself
(`workers.strategies.generation`), and the room of a worker is without them.

A stream whose client has enough rests at the worker, in no queue, and costs nothing here: clients that do not read use
no credits of other clients. `JobTable.rest` does the same for the bound of the worker.

`Streams` take parts of answers and text:

1. A part, or an entry of `Deltas`, goes to the taker of its request. What arrives for a request that has ended is
   given back.
2. Texts that clients have taken are told in one message for each turn of the event loop.
3. Every tick asks the streams of text whether they have waited too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from frontend.engine.interface import Payload, bytes_of
from frontend.engine.streams.incoming import TEXT_KINDS, Delivery, TextTaker
from ipc.memory.input_arena import InputBlock
from ipc.shares import Shares
from ipc.wire.codec import ToWorker
from ipc.wire.messages import LANES, Credits, GenerateCall, Result, Submit, Work
from ipc.wire.streams import Deltas, DeltasTaken, Part, PartsConsumed


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


class Streams:
    """All streams of one channel."""

    def __init__(
        self,
        deliver: Callable[[Result, bytes], Delivery],
        give_back: Callable[[Delivery], None],
        put: Callable[[ToWorker], None],
    ) -> None:
        """The arguments are the channel's: join a result and its bytes, end its lease, and send a message."""
        self._deliver, self._give_back, self._put = deliver, give_back, put
        self.parts: dict[int, Callable[[Delivery], None]] = {}
        """Who takes the parts of a request, by its id."""
        self.texts: dict[int, TextTaker] = {}
        """Who takes the text of a request, by its id."""
        self._taken: dict[int, int] = {}
        self.handlers: dict[type, Callable[[Any, bytes], None]] = {
            Part: self._on_part,
            Deltas: self._on_deltas,
        }

    def __len__(self) -> int:
        return len(self.parts) + len(self.texts)

    def parts_taken(self, request: int, count: int) -> None:
        """The oldest parts of a stream were taken, so as many more may come."""
        self._put(PartsConsumed(request, count))

    def text_taken(self, request: int, nbytes: int) -> None:
        """So many bytes of the text of a stream were taken."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._tell_taken)
        self._taken[request] = self._taken.get(request, 0) + nbytes

    def _tell_taken(self) -> None:
        taken, self._taken = self._taken, {}
        self._put(DeltasTaken(list(taken), list(taken.values())))

    def look(self) -> None:
        """Some time has passed."""
        if self.texts:
            now_ns = time.monotonic_ns()
            for taker in list(self.texts.values()):
                taker.look(now_ns)

    def _on_part(self, part: Part, inline: bytes) -> None:
        delivery = self._deliver(part.result, inline)
        take = self.parts.get(part.result.id, self._give_back)
        take(delivery)

    def _on_deltas(self, deltas: Deltas, _: bytes) -> None:
        now_ns, texts, logprobs = time.monotonic_ns(), self.texts, deltas.logprobs
        columns = deltas.ids, deltas.kinds, deltas.choices, deltas.texts, deltas.tokens
        written = deltas.written or [b""] * len(deltas.ids)
        # PERF: a step of many streams is one message, and nearly all of its entries are plain text.
        for at, (request, kind, choice, text, tokens, ids) in enumerate(zip(*columns, written, strict=True)):
            taker = texts.get(request)
            if taker is None:
                continue
            if kind in TEXT_KINDS and at not in logprobs:
                taker.take_text(kind, choice, text, tokens, ids, now_ns)
            else:
                taker.take(deltas, at, now_ns)
