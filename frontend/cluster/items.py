"""Items of a gateway until their answers are there: what `dispatch` notes of each, its deadline, its message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from frontend.scope import ANY_BOX, Choice
from ipc.errors import DeadlineExceeded, PenstockError, WorkerLost
from ipc.wire.cluster import ItemResult, Offer, Outcome
from ipc.wire.messages import Step, Work

log = logging.getLogger(__name__)

MOST_LIVES, MOST_LOST = 1024, 4096
"""Lives of boxes whose lost requests are remembered, and requests of each; the oldest are forgotten first."""
MOST_SAID = 8


GRACE_NS = 20_000_000
"""A box that is quick tells of a passed deadline before the gateway gives up, and where the item was."""
EXPIRE_EVERY_NS = 10_000_000
"""Deadlines are looked at no more often, however many items end by theirs."""
NEVER_NS = 1 << 63


class BoxLost(WorkerLost):
    """A box that has told a part of an answer is gone, or gave the rest back. `suspect`: the box died."""


@dataclass(slots=True, eq=False)
class Held:
    """One item of this gateway.

    `queued`: the item was published in the queue; `delivered`: some box has pulled the item from there. `boxes` are
    lives that the item was sent to or that claimed it, `claimed` the lives that claimed it, `tried` the lives that
    refused it. `acks`: by life, the subject that returns the delivery of a claimed item to the queue. `heard_ns`: time
    of the last message about the item. `deaths` are boxes that died with the claimed item, in `deaths_alone` of them
    the box had and was sent no other item of this gateway. `stranded_ns`: since when no box takes the item, 0 while a
    box has it. `in_pieces`: the item is answered in pieces, of which `pieces` have come in their order. `step`: its
    place in a sequence.
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

    def late(self) -> DeadlineExceeded:
        """The error of the item once its deadline has passed."""
        awaited = "the answer had ended" if self.in_pieces else "a box answered"
        return DeadlineExceeded(f"the deadline passed before {awaited}", retry_after_s=1)


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


class Deadlines:
    """Ends items `GRACE_NS` after their deadlines, with or without a broker.

    PERF: one timer for all items, which an item moves whose deadline is the earliest. A timer for each item would cost
    as much as the item on the wire.
    """

    def __init__(self, items: Mapping[str, Held], now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`items` are those that have begun."""
        self._items, self._now_ns = items, now_ns
        self._timer: asyncio.TimerHandle | None = None
        self.next_ns = NEVER_NS
        """When the timer fires; `NEVER_NS` without a timer."""

    def watch(self, held: Held) -> None:
        """Look at the deadline of an item in time."""
        if held.deadline_ns + GRACE_NS < self.next_ns:
            self._set(held.deadline_ns + GRACE_NS)

    def _set(self, next_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.next_ns, delay_ns = next_ns, max(0, next_ns - self._now_ns())
        self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self.expire)

    def expire(self) -> None:
        """End items that are late. Called by the timer."""
        now_ns, next_ns, self.next_ns = self._now_ns(), NEVER_NS, NEVER_NS
        for held in list(self._items.values()):
            if held.future.done():
                continue
            if held.deadline_ns + GRACE_NS <= now_ns:
                held.future.set_exception(held.late())
            else:
                next_ns = min(next_ns, held.deadline_ns + GRACE_NS)
        if next_ns < NEVER_NS:
            self._set(max(next_ns, now_ns + EXPIRE_EVERY_NS))


class LostRequests:
    """Requests of sequences that boxes may have run although clients were told otherwise, until their boxes know.

    `by_life`: ids of the requests by the life of their box. A box that confirms nothing is told `MOST_SAID` times after
    the last loss, each time twice as late: bridges of an earlier version confirm nothing. A bridge that no word reaches
    hears no sign of life of the gateway either, and ends the sequences by itself.
    """

    def __init__(self, again_ns: int) -> None:
        """`again_ns` lie between the first word and the second one."""
        self._again_ns = again_ns
        self.by_life: dict[str, list[str]] = {}
        self._said: dict[str, tuple[int, int]] = {}
        """How often a life was told, and when it is told again."""

    def add(self, life: str, item: str) -> None:
        """A request is lost."""
        lost = self.by_life.setdefault(life, [])
        lost.append(item)
        del lost[:-MOST_LOST]
        self._said[life] = 0, 0
        if len(self.by_life) > MOST_LIVES:
            self._forget(next(iter(self.by_life)))

    def has(self, life: str, item: str) -> bool:
        """Whether a box has yet to confirm that it knows of a request."""
        return item in self.by_life.get(life, ())

    def said(self, life: str, now_ns: int) -> None:
        """A box was told, and may have heard. Words between those that are due do not count."""
        times, due_ns = self._said[life]
        if now_ns < due_ns:
            return
        self._said[life] = times + 1, now_ns + (self._again_ns << times)
        if times + 1 >= MOST_SAID:
            log.warning("box life %s does not confirm which requests are lost, and is told no more", life)
            self._forget(life)

    def due(self, now_ns: int) -> list[str]:
        """The lives that are to be told now."""
        return [life for life, (_, due_ns) in self._said.items() if now_ns >= due_ns]

    def confirmed(self, life: str, items: Collection[str]) -> None:
        """A box knows of these requests."""
        if life not in self.by_life:
            return
        self.by_life[life] = [item for item in self.by_life[life] if item not in items]
        if not self.by_life[life]:
            self._forget(life)
        else:
            self._said[life] = 1, self._said[life][1]

    def _forget(self, life: str) -> None:
        del self.by_life[life]
        del self._said[life]
