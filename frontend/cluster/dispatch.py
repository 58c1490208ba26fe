"""What a gateway does with an item until its answer is there: send, follow, ask, send again. Without I/O of its own.

1. `begin` gives an item to the queue, or directly to a box that has the model. The gateway holds the item.
2. A box claims what came to it, unless the answer comes as soon. From then on the box has the item, and its death gives
   the item to another box.
3. The gateway asks a box that is silent about an item for `ask_after_s`, and every box after a reconnect, since a
   result that passes a dying broker is lost without a word. If a box says that it lacks an item, another box gets it.
4. The first answer counts. Later ones are counted and dropped. Boxes whose answer nobody needs are told so.
5. What is answered in pieces goes directly, and never to two boxes under one id: each box gets it under another. Once
   pieces have come, the loss of the box is the end of the item (`BoxLost`). Who reads a text has the rest written.

6. A request of a sequence goes directly to its home, which answers it or nobody. What the box had when it died is lost
   with the state (`SequenceLost`). If the box is heard again it learns which requests their clients believe lost, until
   it confirms (`LostRequests`).
7. What has no answer at its deadline ends (`Deadlines`).

An item that lost two boxes is not given to a third: the input may be what kills them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.items import BoxLost, Deadlines, Held, LostRequests
from ipc.errors import (
    Draining,
    PenstockError,
    QueueUnavailable,
    SequenceLost,
    SequenceUnknown,
    Unsupported,
    WorkerCrashed,
)
from ipc.metrics.cluster import Resent, Trouble
from ipc.settings import Cluster
from ipc.wire.cluster import (
    IDS_EACH,
    VERSION,
    Ask,
    Claims,
    Drop,
    Got,
    ItemResult,
    Outcome,
    ToBox,
    error_of,
)

MOST_LOSSES = 2
LOOK_AGAIN_NS = 200_000_000
DIED: Resent = "box died"
"""Why an item is sent again."""
ASK_SOON_NS = 50_000_000
GOT_AFTER_S = 0.02
"""Boxes hear so much later that their answers have come, of all answers of that time at once."""
OLD_NS = 200_000_000
"""An item that waits in the queue for so long while a box with its model has room goes directly."""
BUSY = frozenset(
    ("DRAINING", "MODEL_LOADING", "MODEL_NOT_LOADED", "NO_REPLICA", "QUEUE_FULL", "SHM_EXHAUSTED")
)
"""Errors of a box, not of an item: another box may do better."""


class Sender(Protocol):
    """The way out, as `Dispatch` needs it. All raise `QueueUnavailable` without a broker."""

    def to_box(self, held: Held, box: Box) -> None:
        """Send an item to a box."""

    def to_queue(self, held: Held) -> bool:
        """Give an item to the queue; False while the queue is not used."""

    def word(self, box: Box, word: ToBox) -> None:
        """Tell a box."""

    def give_back(self, ack: str) -> None:
        """Return a delivery to the queue at once."""


class Dispatch:
    """All items of one gateway that have no answer yet."""

    def __init__(
        self,
        cluster: Cluster,
        router: str,
        boxes: Boxes,
        sender: Sender,
        choose: Callable[[Held], Box | None],
        why_not: Callable[[Held], PenstockError],
        wait_s: float,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """An item that lost its box waits for another one for `wait_s`.

        `choose` gives the best open box for an item outside of the lives that it tried, `why_not` why there is none."""
        self._router, self._boxes, self._sender = router, boxes, sender
        self._choose, self._why_not, self._now_ns = choose, why_not, now_ns
        self._ask_ns, self._wait_ns = int(cluster.ask_after_s * 1e9), int(wait_s * 1e9)
        self.items: dict[str, Held] = {}
        self.deadlines = Deadlines(self.items, now_ns)
        self.unclaimed: set[str] = set()
        """Items in the queue that no box has said to have."""
        self._got: dict[str, list[str]] = {}
        self._dropped: dict[str, list[str]] = {}
        self._lost = LostRequests(self._ask_ns)
        self.counts: Counter[tuple[str, str]] = Counter()
        """(what, label): lane by `queue` or `direct`, resent by reason, duplicate, dropped and claims without."""
        self.on_ask: list[Callable[[Iterable[Held]], None]] = []
        """Told of items that are answered in pieces before their boxes are asked."""
        boxes.on_death = self._died

    def begin(self, held: Held) -> None:
        """Send a new item. Raises the reason where no box is known at all, and `QueueUnavailable`."""
        self.items[held.id] = held
        held.heard_ns = self._now_ns()
        self.deadlines.watch(held)
        try:
            if self._sender.to_queue(held):
                held.queued = True
                self.unclaimed.add(held.id)
                self.counts["lane", "queue"] += 1
            else:
                self.counts["lane", "direct"] += 1
                self._direct(held)
        except QueueUnavailable:
            del self.items[held.id]
            raise
        except PenstockError as error:
            if not self._boxes.by_name:
                del self.items[held.id]
                raise
            self._wait_or_fail(held, error)

    def end(self, held: Held) -> None:
        """The request no longer waits for the item: tell boxes that still have the item to drop it."""
        if self.items.pop(held.id, None) is None:
            return
        self.unclaimed.discard(held.id)
        lives = set(held.boxes)
        if held.queued and not held.delivered:
            # Any box may still pull the item from the queue.
            lives |= {box.life for box in self._boxes if box.alive}
        for life in lives:
            self._forget(life, held)
            self.drop(life, held.id)

    def _direct(self, held: Held) -> None:
        box = self._choose(held)
        if box is None:
            raise held.refusal or self._why_not(held)
        self._say_lost(box.life)
        held.attempt += 1
        held.stranded_ns = 0
        self._sender.to_box(held, box)
        held.boxes.add(box.life)
        held.heard_ns = self._now_ns()
        box.items.add(held.id)

    def leave_queue(self, reason: Trouble) -> None:
        """The queue has trouble: send items that no box has claimed directly to boxes."""
        for held in list(self.items.values()):
            if held.queued and not held.boxes and not held.future.done():
                self._again(held, reason)

    def leave_pool(self, pool: str) -> None:
        """A pool is gone, and nobody pulls from its queue: what no box has claimed there waits for a box no longer."""
        for held in list(self.items.values()):
            if held.choice.pool == pool and not held.boxes and not held.future.done():
                held.refusal = held.refusal or self._why_not(held)
                self._again(held, "pool")

    def _again(self, held: Held, reason: Resent) -> None:
        if held.in_pieces and held.attempt:
            if held.pieces:
                lost = f"the box of this answer is lost: {reason}"
                self._fail(held, BoxLost(lost, suspect=reason == DIED, retry_after_s=1))
                return
            self._rename(held)
        self.counts["resent", reason] += 1
        self.unclaimed.discard(held.id)
        held.claimed.clear()
        try:
            self._direct(held)
        except QueueUnavailable:
            # NOTE: an item in flight waits for a broker until its deadline; `resume` sends it.
            held.heard_ns = 0
        except PenstockError as error:
            self._wait_or_fail(held, error)

    def _rename(self, held: Held) -> None:
        """What the boxes before still say about the item is about none."""
        del self.items[held.id]
        router, number, *_ = held.id.split(".")
        held.id = f"{router}.{number}.{held.attempt}"
        self.items[held.id] = held

    def _wait_or_fail(self, held: Held, error: PenstockError) -> None:
        """No box takes the item: wait for a box that may begin. Fail after `wait_s`, or at once after a refusal."""
        now_ns = self._now_ns()
        held.stranded_ns = held.stranded_ns or now_ns
        may_come = held.refusal is None and not isinstance(error, (SequenceUnknown, Unsupported))
        if may_come and now_ns - held.stranded_ns < self._wait_ns:
            held.heard_ns = now_ns - self._ask_ns + LOOK_AGAIN_NS
        else:
            self._fail(held, error)

    def _fail(self, held: Held, error: PenstockError) -> None:
        if not held.future.done():
            held.future.set_exception(error)

    def claims(self, claims: Claims) -> None:
        """A box has these items."""
        box = self._boxes.by_life.get(claims.life)
        if box is None or box.name != claims.box:
            self.counts["dropped", "unknown box"] += 1
            return
        now_ns = self._now_ns()
        for item, ack in zip(claims.ids, claims.acks, strict=True):
            held = self.items.get(item)
            if held is None or not held.may_come_from(claims.life):
                self.drop(claims.life, item)
                continue
            self.counts["claims", ""] += 1
            self.unclaimed.discard(item)
            held.boxes.add(claims.life)
            held.claimed.add(claims.life)
            held.heard_ns = now_ns
            box.items.add(item)
            if ack:
                held.acks[claims.life], held.delivered = ack, True

    def answered(self, result: ItemResult, outcome: Outcome) -> None:
        """A box has answered."""
        box = self._boxes.by_life.get(outcome.life)
        if box is None or box.name != outcome.box:
            self.counts["dropped", "unknown box"] += 1
            return
        held = self.items.get(result.work_item_id)
        if held is not None and not held.may_come_from(outcome.life):
            held = None
        if held is not None and outcome.pieces > held.pieces and not held.future.done():
            # Pieces of the text were lost on the way. The box sends them again, and this answer behind them.
            self.ask_soon(held)
            return
        if outcome.large is None or held is None or held.future.done():
            # Bytes beside the answer are still to come from the box that keeps them.
            is_step = held is not None and held.step is not None
            self.got(outcome.life, result.work_item_id, soon=is_step)
        box.items.discard(result.work_item_id)
        if held is None or held.future.done():
            self.counts["duplicate", ""] += 1
            return
        if held.queued and outcome.life not in held.boxes:
            # Short work is answered without a claim: the box has pulled the item from the queue.
            held.delivered = True
            self.unclaimed.discard(held.id)
        self._forget(outcome.life, held)
        if not result.success:
            error = error_of(result, outcome)
            stays = held.step is not None or (held.in_pieces and held.pieces)
            if result.error_code in BUSY and (not stays or isinstance(error, Draining)):
                held.tried.add(box.life)
                if not isinstance(error, Draining):
                    held.refusal = error
                if not held.boxes:
                    self._again(held, "busy")
                return
            self._fail(held, error)
            return
        held.future.set_result((result, outcome))

    def refused(self, item: str) -> None:
        """A box of another version took an item from the queue, and does not speak the version of the item."""
        held = self.items.get(item)
        if held is not None and held.queued and not held.boxes and not held.future.done():
            held.delivered = True
            self._again(held, "version")

    def got(self, life: str, item: str, *, soon: bool = False) -> None:
        """Tell a life that this gateway has the whole answer to an item, so that the box forgets the answer.

        `soon`: the word leaves with this turn of the event loop. Large answers take memory of the box, and the next
        request of a sequence may come by another gateway.
        """
        if self._lost.has(life, item):
            # The box shall hear that the item is lost, and not forget before what has run of the item.
            return
        loop = asyncio.get_running_loop()
        if not self._got:
            loop.call_later(GOT_AFTER_S, self.say_got)
        self._got.setdefault(life, []).append(item)
        if soon:
            loop.call_soon(self.say_got)

    def retake(self, held: Held, life: str, error: PenstockError) -> None:
        """The bytes of an answer did not come: the item runs again, and ends with `error` after two such answers."""
        held.future = asyncio.get_running_loop().create_future()
        held.losses += 1
        self.deadlines.watch(held)
        if held.step is not None:
            self._lose(held, life)
        elif held.losses >= MOST_LOSSES:
            self._fail(held, error)
        else:
            self._again(held, "transfer")

    def leave(self, held: Held, life: str, error: PenstockError) -> None:
        """A piece did not come from a box: the item runs elsewhere, or ends with `error` if it has lost two boxes."""
        if life not in held.boxes or held.future.done():
            return
        self._forget(life, held)
        self.drop(life, held.id)
        held.tried.add(life)
        held.losses += 1
        if held.losses >= MOST_LOSSES:
            self._fail(held, error)
        else:
            self._again(held, "transfer")

    def has_other(self, held: Held) -> bool:
        """Whether a box outside of those that have the item would take the item."""
        box = self._choose(held)
        return box is not None and box.life not in held.boxes

    def ask_soon(self, held: Held) -> bool:
        """Something of the box did not come: ask the box a moment later, unless a lost piece comes before.

        False where the box is asked soon anyway.
        """
        heard_ns = self._now_ns() - self._ask_ns + ASK_SOON_NS
        is_later = held.heard_ns > heard_ns
        held.heard_ns = min(held.heard_ns, heard_ns)
        return is_later

    def missing(self, life: str, items: Iterable[str], *, lost: bool = False) -> None:
        """A box was asked and does not have these items; `lost`: it knows what clients believe lost."""
        if lost:
            self._lost.confirmed(life, set(items))
            return
        for item in items:
            held = self.items.get(item)
            if held is not None and life in held.boxes:
                was_claimed = life in held.claimed
                self._forget(life, held)
                if held.step is not None and was_claimed:
                    self._lose(held, life)
                elif not held.boxes and not held.future.done():
                    self._again(held, "missing")

    def gone(self, life: str, item: str) -> None:
        """Nobody listens for items of this life of a box: the life gets nothing new before its next sign of life."""
        box = self._boxes.by_life.get(life)
        if box is not None:
            self._boxes.unheard(box)
        held = self.items.get(item)
        if held is None or life not in held.boxes or life in held.claimed:
            return
        self._forget(life, held)
        if not held.boxes and not held.future.done():
            self._again(held, "nobody")

    def _died(self, box: Box) -> None:
        there = [item for item in box.items if item in self.items]
        for item in list(box.items):
            held = self.items.get(item)
            if held is None:
                continue
            was_claimed = box.life in held.claimed
            self._forget(box.life, held)
            ack = held.acks.pop(box.life, "")
            held.losses += was_claimed
            held.deaths += was_claimed
            held.deaths_alone += was_claimed and there == [item]
            if held.future.done() or held.boxes:
                continue
            if held.step is not None:
                self._lose(held, box.life)
            elif held.losses >= MOST_LOSSES:
                self._fail(held, WorkerCrashed("two boxes died while they had this request"))
            elif ack and self._given_back(ack):
                held.delivered = False
                self.unclaimed.add(item)
                held.heard_ns = self._now_ns()
                self.counts["resent", DIED] += 1
            else:
                self._again(held, DIED)

    def _lose(self, held: Held, life: str) -> None:
        """A request of a sequence has no answer, and the box may have run it."""
        assert held.step is not None
        if not held.future.done():
            self._lost.add(life, held.id)
            self._fail(held, SequenceLost.of(held.step.id))

    def _say_lost(self, life: str) -> None:
        """Tell a life, if it is alive, which requests are lost."""
        lost = self._lost.by_life.get(life)
        if lost and self._tell(life, Drop, lost, lost=True):
            self._lost.said(life, self._now_ns())

    def _given_back(self, ack: str) -> bool:
        try:
            self._sender.give_back(ack)
        except QueueUnavailable:
            return False
        return True

    def _forget(self, life: str, held: Held) -> None:
        held.boxes.discard(life)
        held.claimed.discard(life)
        box = self._boxes.by_life.get(life)
        if box is not None:
            box.items.discard(held.id)

    def resume(self) -> None:
        """A broker is there again: what was sent or answered meanwhile may be lost."""
        self._boxes.pardon()
        for held in list(self.items.values()):
            if not held.boxes and not held.future.done():
                self._again(held, "reconnect")
            else:
                held.heard_ns = 0
        self.tick()

    def tick(self) -> None:
        """Ask boxes that have been silent about an item for too long; call this often."""
        for life in self._lost.due(self._now_ns()):
            self._say_lost(life)
        now_ns, asked, texts = self._now_ns(), dict[str, list[str]](), list[Held]()
        for held in list(self.items.values()):
            silent_ns = now_ns - held.heard_ns
            if held.queued and not held.boxes and not held.future.done() and silent_ns > OLD_NS:
                self._look_at_old(held)
            if held.future.done() or silent_ns < self._ask_ns:
                continue
            if not held.boxes:
                if not held.queued:
                    self._again(held, "silence")
                continue
            held.heard_ns = now_ns
            if held.in_pieces:
                texts.append(held)
            for life in held.boxes:
                asked.setdefault(life, []).append(held.id)
        for tell in self.on_ask:
            tell(texts)
        for life, items in asked.items():
            self._tell(life, Ask, items)

    def _look_at_old(self, held: Held) -> None:
        """Send an old item of the queue directly to a box that has room: boxes that pull may not have its model.

        Without a box the item waits as one that has lost its box: nobody may pull from the queue any more, as where all
        boxes of a pool were given to another one.
        """
        box = self._choose(held)
        if box is None:
            self._wait_or_fail(held, held.refusal or self._why_not(held))
            return
        held.stranded_ns = 0
        if box.room_s > 0:
            self._again(held, "old")

    def _tell(self, life: str, word: type[Ask | Drop | Got], items: list[str], **more: bool) -> bool:
        """Say a word to a life; whether there was a broker, and signs of the life."""
        box = self._boxes.by_life.get(life)
        if box is None or not box.alive:
            return False
        try:
            for at in range(0, len(items), IDS_EACH):
                self._sender.word(box, word(VERSION, self._router, items[at : at + IDS_EACH], **more))
        except QueueUnavailable:
            return False
        return True

    def drop(self, life: str, item: str) -> None:
        """Tell a life that nobody waits for an item. The words of one turn of the event loop leave in one message."""
        if self._lost.has(life, item):
            return
        if not self._dropped:
            asyncio.get_running_loop().call_soon(self._say_dropped)
        self._dropped.setdefault(life, []).append(item)

    def _say_dropped(self) -> None:
        dropped, self._dropped = self._dropped, {}
        for life, items in dropped.items():
            self._tell(life, Drop, items)

    def say_got(self) -> None:
        """Tell all boxes now which of their answers have come."""
        got, self._got = self._got, {}
        for life, items in got.items():
            self._tell(life, Got, items)
