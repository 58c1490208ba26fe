"""One item of a gateway until its answer is there: what `dispatch` notes of it, and what its message is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from frontend.scope import ANY_BOX, Choice
from ipc.errors import PenstockError, WorkerLost
from ipc.wire.cluster import ItemResult, Offer, Outcome
from ipc.wire.messages import Step, Work

MOST_LIVES, MOST_LOST = 1024, 4096
"""Lives of boxes whose lost requests are remembered, and requests of each; the oldest are forgotten first."""


class BoxLost(WorkerLost):
    """A box that has told a part of an answer is gone, or gave the rest back. `suspect`: the box died."""


@dataclass(slots=True, eq=False)
class Held:
    """One item of this gateway.

    `queued`: the item was published in the queue; `delivered`: some box has pulled the item from there. `boxes` are
    lives that the item was sent to or that claimed it, `claimed` the lives that claimed it, `tried` the lives that
    refused it. `acks`: by life, the subject that returns the delivery of a claimed item to the queue. `heard_ns`: time
    of the last message about the item. `deaths` are boxes that died with the claimed item, in `deaths_alone` of them
    this gateway had no other item there. `stranded_ns`: since when no box takes the item, 0 while a box has it.
    `in_pieces`: the item is answered in pieces, of which `pieces` have come in their order. `step`: its place in a
    sequence.
    """

    id: str
    model: str
    deadline_ns: int
    future: asyncio.Future[tuple[ItemResult, Outcome]]
    attempt: int = 0
    queued: bool = False
    delivered: bool = False
    boxes: set[str] = field(default_factory=set)
    claimed: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    acks: dict[str, str] = field(default_factory=dict)
    losses: int = 0
    deaths: int = 0
    deaths_alone: int = 0
    heard_ns: int = 0
    stranded_ns: int = 0
    refusal: PenstockError | None = None
    choice: Choice = ANY_BOX
    in_pieces: bool = False
    pieces: int = 0
    step: Step | None = None

    def may_come_from(self, life: str) -> bool:
        """Whether a life of a box may claim and answer the item.

        Any box may have pulled pure work from the queue. Other work is of the box that the item was sent to.
        """
        return life in self.boxes or not (self.in_pieces or self.step is not None)


@dataclass(slots=True, eq=False, kw_only=True)
class Sent(Held):
    """An item with what its message is made of.

    `work` is the plan as msgpack, of `work_nbytes`. With `large` neither `work` nor `payload` is in the message. Of a
    text: the `beginning` of its prompt, and the `identity` of the model that has begun to write. Of a sequence: for how
    long its home `stays_ms`, None for always.
    """

    kind: str
    plan: Work
    work: bytes
    work_nbytes: int
    payload: bytes
    others: list[str]
    start_by_ns: int
    large: Offer | None = None
    beginning: str = ""
    identity: str = ""
    stays_ms: int | None = None


class LostRequests:
    """Requests of sequences that boxes may have run although clients were told otherwise, until their boxes know.

    `by_life`: ids of the requests by the life of their box.
    """

    def __init__(self) -> None:
        self.by_life: dict[str, list[str]] = {}
        self._said_ns: dict[str, int] = {}

    def add(self, life: str, item: str) -> None:
        """A request is lost."""
        lost = self.by_life.setdefault(life, [])
        lost.append(item)
        del lost[:-MOST_LOST]
        self._said_ns.pop(life, None)
        if len(self.by_life) > MOST_LIVES:
            self._forget(next(iter(self.by_life)))

    def has(self, life: str, item: str) -> bool:
        """Whether a box has yet to confirm that it knows of a request."""
        return item in self.by_life.get(life, ())

    def said(self, life: str, now_ns: int) -> None:
        """A box was told, and may have heard."""
        self._said_ns[life] = now_ns

    def due(self, before_ns: int) -> list[str]:
        """The lives that were not told since `before_ns`."""
        return [life for life in self.by_life if self._said_ns.get(life, 0) <= before_ns]

    def confirmed(self, life: str, items: Collection[str]) -> None:
        """A box knows of these requests."""
        self.by_life[life] = [item for item in self.by_life.get(life, ()) if item not in items]
        if not self.by_life[life]:
            self._forget(life)

    def _forget(self, life: str) -> None:
        del self.by_life[life]
        self._said_ns.pop(life, None)
