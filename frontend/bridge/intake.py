"""Items of a bridge, from their arrival until their gateway has the answer.

1. An item is claimed at once; claims of one turn of the event loop leave together, one message for each gateway. Pure
   work is claimed after `CLAIM_AFTER_S`, together with all work of that time. Work that is answered by then is not
   claimed: the answer tells the gateway as much.
2. A second copy of an item is claimed again while the first one runs, and answered with the kept result afterwards. The
   same life never runs an item twice.
3. The work runs (`answering`). The result leaves, and is kept until the gateway says that it has the result, at most
   `keep_results_s` and `keep_result_bytes`.
4. Work of a gateway that has been silent for `gateway_silence_s` is cancelled, and its late items are dropped.
5. A text leaves in pieces before its result (`texts`). A text that waits for its gateway is claimed again each
   `REST_S`, since the word that nobody waits for the text may be lost: then the gateway says so again.
6. The id of an item that its gateway dropped is remembered for `DROPPED_S`: a copy of the item may still arrive. The
   same holds for the id of an answered item, unless its work is pure: a late copy would run a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from frontend.bridge.answering import Answering, Running
from frontend.bridge.meter import Meter
from frontend.bridge.parts import Parts
from frontend.bridge.results import Results
from frontend.bridge.sequences import BegunSequences
from frontend.bridge.texts import Texts
from frontend.cluster.broker import readable
from frontend.cluster.transfers import Transfers
from frontend.engine.interface import Engine, Models
from ipc.errors import (
    DependencyConflict,
    Draining,
    ModelNotFound,
    ModelNotLoaded,
    PenstockError,
    ProtocolError,
)
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster import (
    FIRST_KINDS,
    IDS_EACH,
    PARTS,
    TEXT,
    VERSION,
    Ask,
    Carried,
    Claims,
    Drop,
    Got,
    Item,
    Missing,
    OtherVersion,
    Taken,
    encode,
    read_item,
    read_to_box,
)
from ipc.wire.cluster_names import results, words

log = logging.getLogger(__name__)

CLAIM_AFTER_S = 0.002
DROPPED_S = 60.0
REST_S = 5.0
ACK, NAK, TERM, WORKING = b"+ACK", b"-NAK", b"+TERM", b"+WPI"
"""Words for the queue about a delivery: done, give it to another box, never again, more time."""
LEAVING = Draining("this box is shutting down", retry_after_s=1)
Send = Callable[[str, bytes], bool]
"""Publish on a subject what may be lost; false without a broker."""
Dead = Callable[[str, bytes, Item | None, str], None]
"""Told of what was given up: reason, bytes, the item if the bytes are one, and the error."""
TOLD_KINDS = frozenset((TEXT, PARTS))
"""Kinds of items that are told in pieces before their result."""
POISON = "WORKER_CRASHED"
"""Code of an item that killed workers."""


@dataclass(slots=True)
class Silence:
    """When a gateway was last heard, in CLOCK_MONOTONIC nanoseconds, and the ids of its items at this box."""

    heard_ns: int
    items: set[str] = field(default_factory=set)


class Intake:
    """All items of one life of a bridge."""

    def __init__(
        self,
        settings: Settings,
        life: str,
        engine: Engine,
        models: Models,
        send: Send,
        most_inline: Callable[[], int],
        transfers: Transfers,
        meter: Meter,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`most_inline`: bytes that a result may take inside a message."""
        self._box, self._life = settings.cluster.box_name, life
        self.on_dead: Dead = lambda reason, data, item, error: None
        """An item, or bytes that are none, was given up."""
        self._results = Results(self._box, life)
        self._texts = Texts(self._box, life, engine, send, most_inline, settings)
        self._parts = Parts(life, engine, send, most_inline, transfers, settings)
        self._told: tuple[Texts | Parts, ...] = self._texts, self._parts
        """What is told in pieces, by the kinds of items."""
        self._sequences = BegunSequences(now_ns)
        self._answering = Answering(
            settings,
            engine,
            models,
            self._results,
            self._texts,
            self._parts,
            self._sequences,
            transfers,
            meter,
            most_inline,
        )
        self._send, self._now_ns = send, now_ns
        self._transfers, self._meter = transfers, meter
        self._cluster = settings.cluster
        self._running: dict[str, Running] = {}
        self._kept: OrderedDict[str, Running] = OrderedDict()
        self.kept_nbytes = 0
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self._rested_ns = now_ns()
        """When texts that wait for their gateways were claimed last."""
        self._gateways: dict[str, Silence] = {}
        self._claims: dict[str, dict[str, str]] = {}
        """Items to be claimed at each gateway, with the subjects of their deliveries."""
        self._confirmed = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        """An item has ended, so there may be room for another one."""
        self.on_foreign: Callable[[Item, bytes, str, float], None] = lambda item, data, ack, aged_s: None
        """An item of another producer, as it came, with the arguments of `take`."""
        self.draining = False
        self._seldom = Seldom(log)
        self.counts: Counter[str] = Counter()
        """Items by what became of them: taken, again, dropped, unreadable, orphaned, late."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def kept(self) -> int:
        """Answers that are kept until their gateway has them."""
        return len(self._kept)

    async def ended(self, running_s: float, confirmed_s: float) -> None:
        """Wait at most `running_s` seconds for work, then `confirmed_s` until gateways have all results."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=running_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(confirmed_s):
                while self._kept:
                    self._confirmed.clear()
                    await self._confirmed.wait()

    def heard(self, router: str) -> None:
        """A gateway lives."""
        gateway = self._gateways.setdefault(router, Silence(0))
        gateway.heard_ns = self._now_ns()

    def take(self, data: bytes, ack: str = "", aged_s: float = 0.0) -> None:
        """An item has arrived; `ack` is the subject of its delivery by the queue, where it has waited for `aged_s`."""
        try:
            item, carried = read_item(data)
        except OtherVersion as error:
            self.counts["unreadable"] += 1
            self._seldom.warning("an item was refused", error.message)
            if error.reply:
                refused = Item(error.item, "", "", "", "", "", error.reply)
                self._send(
                    error.reply, encode(self._results.failed(refused, 0, DependencyConflict(error.message)))
                )
            self._end(ack, ACK)
            return
        except ProtocolError as error:
            self.counts["unreadable"] += 1
            self._seldom.warning("an item was dropped", error.message)
            self.on_dead("unreadable", data, None, error.message)
            self._end(ack, TERM)
            return
        if ack:
            self._meter.delivered(item.model_id, aged_s)
        if carried is None:
            self.counts["foreign"] += 1
            self.on_foreign(item, data, ack, aged_s)
            return
        self._begin(item, carried, ack, aged_s)

    def _end(self, ack: str, word: bytes) -> None:
        """Tell the queue what became of a delivery."""
        if ack:
            self._send(ack, word)
            if word != WORKING:
                self._meter.settled(given_back=word == NAK)

    def _begin(self, item: Item, carried: Carried, ack: str, aged_s: float) -> None:
        name = item.work_item_id
        if name in self._running:
            self.counts["again"] += 1
            if ack:
                self._running[name].acks.append(ack)
            self._claim(carried.router, name, ack)
            return
        if name in self._kept:
            self.counts["again"] += 1
            self._send(results(carried.router), self._kept[name].result)
            self._end(ack, ACK)
            return
        gateway = self._gateways.setdefault(carried.router, Silence(self._now_ns()))
        if name in self._dropped or self._is_silent(gateway):
            self.counts["dropped" if name in self._dropped else "orphaned"] += 1
            self._end(ack, ACK)
            return
        if ack and self.draining:
            self._end(ack, NAK)
            return
        self.counts["taken"] += 1
        self._meter.inflight.inc()
        running = self._running[name] = Running(
            name, carried.router, is_pure=carried.kind in FIRST_KINDS, acks=[ack] if ack else []
        )
        gateway.items.add(name)
        self._claim(carried.router, name, ack, soon=not running.is_pure)
        running.task = asyncio.get_running_loop().create_task(self._run(running, item, carried, aged_s))
        running.task.add_done_callback(lambda task: self._over(name, task))

    def _is_silent(self, gateway: Silence) -> bool:
        return self._now_ns() - gateway.heard_ns > self._cluster.gateway_silence_s * 1e9

    def _claim(self, router: str, name: str, ack: str, *, soon: bool = True) -> None:
        loop = asyncio.get_running_loop()
        if soon:
            loop.call_soon(self._say_claims)
        elif not self._claims:
            # PERF: for short work a claim would cost broker and gateway about as much as the answer.
            loop.call_later(CLAIM_AFTER_S, self._say_claims)
        claims = self._claims.setdefault(router, {})
        claims[name] = ack or claims.get(name, "")

    def _say_claims(self) -> None:
        claims, self._claims = self._claims, {}
        for router, items in claims.items():
            names, acks = list(items), list(items.values())
            for at in range(0, len(items), IDS_EACH):
                end = at + IDS_EACH
                message = Claims(VERSION, self._box, self._life, names[at:end], acks[at:end])
                self._send(words(router), encode(message))

    def _claim_no_more(self, running: Running) -> None:
        """The item has ended."""
        if running.router in self._claims:
            self._claims[running.router].pop(running.name, None)

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        """The task of an item has ended. Forget the item of a cancelled task, which may never have begun."""
        if task.cancelled():
            self._forget(name)
        elif (error := task.exception()) is not None:
            log.error("item %s has no answer that can be sent", name, exc_info=error)
            self._forget(name)

    async def _run(self, running: Running, item: Item, carried: Carried, aged_s: float) -> None:
        began_ns = time.monotonic_ns()
        try:
            if self.draining:
                raise LEAVING
            result = await self._answering.answer(running, item, carried, aged_s)
        except PenstockError as error:
            result = self._results.failed(item, carried.attempt, error)
            if error.code == POISON:
                self.on_dead("poison", encode(item), item, error.message)
            if isinstance(error, (ModelNotFound, ModelNotLoaded)):
                self._meter.lacks(item.model_id)
        except Exception:
            log.exception("item %s failed", item.work_item_id)
            result = self._results.failed(item, carried.attempt, PenstockError("internal error"))
        if carried.kind in TOLD_KINDS and result.penstock is not None:
            pieces = sum(told.pieces_of(running.name) for told in self._told)
            outcome = msgspec.structs.replace(result.penstock, pieces=pieces)
            result = msgspec.structs.replace(result, penstock=outcome)
        self._meter.ended(item.model_id, item.operation, (time.monotonic_ns() - began_ns) / 1e9)
        self._finish(running, encode(result))

    def _finish(self, running: Running, result: bytes) -> None:
        name = running.name
        del self._running[name]
        self._claim_no_more(running)
        running.task, running.result, running.ended_ns = None, result, self._now_ns()
        self._kept[name] = running
        self._meter.inflight.inc(-1)
        self.kept_nbytes += running.nbytes
        self._send(results(running.router), result)
        self._settle(running, ACK)
        self.on_end()
        while self.kept_nbytes > self._cluster.keep_result_bytes:
            self._forget(next(iter(self._kept)))

    def _settle(self, running: Running, word: bytes) -> None:
        for ack in running.acks:
            self._end(ack, word)
        if word != WORKING:
            running.acks.clear()

    def extend(self) -> None:
        """Tell the queue that all that runs needs more time; call each `extend_every_s`."""
        for running in self._running.values():
            self._settle(running, WORKING)

    def _forget(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is None:
            running = self._kept.pop(name, None)
        else:
            self._meter.inflight.inc(-1)
            self._claim_no_more(running)
        if running is None:
            return
        for told in self._told:
            told.forget(name)
        self._settle(running, ACK)
        self.kept_nbytes -= running.nbytes if running.result else 0
        self._transfers.withdraw(running.large)
        gateway = self._gateways.get(running.router)
        if gateway is not None:
            gateway.items.discard(name)

    def word(self, data: bytes) -> None:
        """A word of a gateway. Unreadable words are counted; a gateway speaks of its own items alone."""
        word = readable(read_to_box, data, self._seldom, "a word of a gateway was dropped")
        if word is None:
            self.counts["unreadable"] += 1
            return
        if isinstance(word, Taken):
            for told in self._told:
                told.taken(word)
            return
        mine = [name for name in word.ids if name.startswith(f"{word.router}.")]
        if isinstance(word, Got):
            self._sequences.confirmed(mine)
            for name in mine:
                if (kept := self._kept.get(name)) is None:
                    continue
                if kept.is_pure:
                    self._forget(name)
                else:
                    self._drop(name)
            self._confirmed.set()
        elif isinstance(word, Drop):
            (self._sequences.lost if word.lost else self._sequences.confirmed)(mine)
            if word.lost and mine:
                self._send(
                    words(word.router), encode(Missing(VERSION, self._box, self._life, mine, lost=True))
                )
            for name in mine:
                self._drop(name)
            self._confirmed.set()
        elif isinstance(word, Ask):
            self._asked(word.router, mine)

    def _stop(self, name: str) -> None:
        running = self._running.get(name)
        if running is not None and running.task is not None:
            running.task.cancel()
        else:
            self._forget(name)

    def _drop(self, name: str) -> None:
        self._stop(name)
        self._dropped[name] = self._now_ns()
        self._dropped.move_to_end(name)

    def _asked(self, router: str, names: list[str]) -> None:
        missing = []
        for name in names:
            for told in self._told:
                told.say_again(name)
            if name in self._running:
                self._claim(router, name, "")
            elif name in self._kept:
                self._send(results(router), self._kept[name].result)
            else:
                missing.append(name)
        if missing:
            self._send(words(router), encode(Missing(VERSION, self._box, self._life, missing)))

    def tick(self, *, connected: bool) -> None:
        """Some time has passed. Without a broker nobody could be heard, so nobody is silent."""
        now_ns = self._now_ns()
        for router, gateway in list(self._gateways.items()):
            if not connected:
                gateway.heard_ns = now_ns
            elif self._is_silent(gateway):
                orphans = list(gateway.items)
                # Whoever waited at this gateway has no answer, and may ask for the same elsewhere.
                self._sequences.lost(self._sequences.of(router))
                if orphans:
                    log.warning("gateway %s is silent: gave up %d items of it", router, len(orphans))
                for name in orphans:
                    self.counts["orphaned"] += 1
                    # NOTE: a gateway that was cut off may come back and send the item again, so nothing is remembered.
                    self._stop(name)
                if now_ns - gateway.heard_ns > DROPPED_S * 1e9:
                    del self._gateways[router]
        if now_ns - self._rested_ns >= REST_S * 1e9:
            self._rested_ns = now_ns
            for told in self._told:
                for stream in told.resting:
                    self._claim(stream.router, stream.name, "")
        before_ns = now_ns - int(self._cluster.keep_results_s * 1e9)
        while self._kept and next(iter(self._kept.values())).ended_ns < before_ns:
            name = next(iter(self._kept))
            self._sequences.overdue(name)
            self._forget(name)
        while self._dropped and next(iter(self._dropped.values())) < now_ns - DROPPED_S * 1e9:
            self._dropped.popitem(last=False)
