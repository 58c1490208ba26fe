"""A gateway: items go to boxes, boxes tell their models, all over one connection to the brokers.

1. `begin` connects to the brokers and follows beats, rows and the inbox. Nothing waits for a broker or a box.
2. `item` makes an item of planned work, and `post` has `dispatch` hold the item until its answer is there.
3. Each `TICK_S` silent boxes are ended and silent items asked for; each `beat_s` the gateway says that it lives.

The engine over a gateway is `frontend.cluster.engine`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence

from nats.aio.msg import Msg

from frontend.cluster.answers import Parts
from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.broker import Broker, ended, lasting, readable
from frontend.cluster.directory import ClusterModels
from frontend.cluster.dispatch import MOST_LOSSES, Dispatch
from frontend.cluster.items import Held, Sent
from frontend.cluster.queue import GivenUp, Queues
from frontend.cluster.state import GatewayState
from frontend.cluster.texts import Texts
from frontend.cluster.transfers import Transfers
from frontend.scope import ANY_BOX, Choice
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import PenstockError
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster import (
    ENSURE,
    PARTS,
    RUN,
    TEXT,
    VERSION,
    BoxBeat,
    Carried,
    Claims,
    GatewayBeat,
    Item,
    ItemResult,
    Outcome,
    RefusedVersion,
    ToBox,
    encode,
    read_beat,
    read_from_box,
    read_health,
    read_result,
)
from ipc.wire.cluster_names import Names, inbox, results
from ipc.wire.codec import UNSENDABLE, unsendable
from ipc.wire.messages import Work

log = logging.getLogger(__name__)

TICK_S = 0.05
MOST_TIMES = 50_000
"""Times that wait for the metrics, which are written twice a second."""
MOST_UNCLAIMED = 512
"""While no box has room for other work, no more items of this gateway wait in the queue."""
SLACK_NBYTES = 2048
"""Room for the fields of an item around its work."""


class Gateway:
    """Items and directory of one gateway process, and its connection."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        on_carried: Callable[[str], None] = lambda outcome: None,
        on_kept: Callable[[int], None] = lambda change: None,
        slot: int = 0,
    ) -> None:
        """`on_carried` and `on_kept` as those of `Client`, for texts of boxes; `slot` is the number of this frontend.

        Raises `ConfigError` for files of `settings.cluster` that cannot be read.
        """
        cluster = settings.cluster
        self.router, self.names = secrets.token_hex(12), Names(cluster.name)
        self._beat_s, self._balances = cluster.beat_s, cluster.lane == "auto"
        self.broker = Broker(cluster, f"gateway {self.router}")
        self.boxes = Boxes(cluster)
        self.models = ClusterModels(
            catalog, self.boxes, settings.limits.restart_wait_s, lambda: self.broker.up, cluster.pool
        )
        self.dispatch = Dispatch(
            cluster,
            self.router,
            self.boxes,
            self,
            self._choose,
            self._why_not,
            settings.limits.restart_wait_s,
        )
        self.transfers = Transfers(
            cluster, self.router, f"gateway {self.router}", settings.arena.copy_out_bytes
        )
        self.parts = Parts(self, self.transfers)
        self.texts = Texts(self, settings.generation, on_carried, on_kept)
        self._numbers = itertools.count(1)
        self._state = GatewayState(settings, self.broker, self.names, self.models, self.router, slot)
        self.pools, self.configs, self.poison = self._state.pools, self._state.configs, self._state.poison
        self.place = self._state.place
        self.broker.listen(inbox(self.router), self._answered)
        self.broker.listen(self.names.box_beat("*"), self._beat)
        self.broker.listen(self.names.box_health("*"), self._health)
        self.broker.listen(self.names.gateway_beat(self.router), lambda message: self.boxes.echo())
        self.broker.on_up += [self.texts.resume, self.parts.resume, self.dispatch.resume]
        self.queues = Queues(self.broker, self.names, cluster)
        self._given_up = GivenUp(self.broker, self.names, f"{inbox(self.router)[:-1]}dead.")
        self.queues.on_trouble = self.dispatch.leave_queue
        self.pools.on_removed, self.pools.on_left = self.dispatch.leave_pool, self._pool_left
        self._seldom = Seldom(log)
        self._unreadable = self.offloads = 0
        self._times: list[tuple[str, str, float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def counts(self) -> dict[tuple[str, str], float]:
        """How often things have happened so far, by what and a label; `connected` is 1 while there is a broker."""
        counts = self.dispatch.counts
        return {
            **counts,
            **self._state.counts(),
            **self._given_up.counts,
            ("connected", ""): self.broker.up,
            ("beats_missed", "box"): self.boxes.beats_missed,
            ("skips", ""): counts["duplicate", ""] + counts["dropped", "unknown box"] + self._unreadable,
            ("unconfirmed", ""): self.queues.unconfirmed,
            ("offloads", ""): self.offloads,
            ("transferred", "in"): self.transfers.got_nbytes,
            ("transferred", "out"): self.transfers.sent_nbytes,
        }

    def took(self, what: str, label: str, seconds: float) -> None:
        """Note how long something has taken; `what` is an attribute of `GatewayMetrics`."""
        if len(self._times) < MOST_TIMES:
            self._times.append((what, label, seconds))

    def times(self) -> Sequence[tuple[str, str, float]]:
        """What has been noted since the last call."""
        times, self._times = self._times, []
        return times

    def begin(self) -> None:
        """Connect."""
        self.broker.start()
        loop = asyncio.get_running_loop()
        loops = (self._tick, self._live, *self._state.loops)
        self._tasks = [loop.create_task(self.transfers.start())]
        self._tasks += [loop.create_task(lasting(run)) for run in loops]

    async def leave(self) -> None:
        """Disconnect."""
        await ended(self._tasks)
        self.queues.close()
        self.dispatch.say_got()
        await self.transfers.close()
        await self.broker.close()
        self.place.close()

    def _pool_left(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self.queues.drop(name))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _tick(self) -> None:
        while True:
            self.texts.tick()
            if self.broker.up:
                self.boxes.tick()
                self.queues.tick()
                self.dispatch.tick()
            await asyncio.sleep(TICK_S)

    async def _live(self) -> None:
        for number in itertools.count(1):
            beat = encode(GatewayBeat(VERSION, self.router, number, self.transfers.address))
            self.broker.say(self.names.gateway_beat(self.router), beat)
            await asyncio.sleep(self._beat_s)

    def _beat(self, message: Msg) -> None:
        beat = readable(read_beat, message.data, self._seldom, "a sign of life was dropped")
        if isinstance(beat, BoxBeat) and message.subject == self.names.box_beat(beat.box):
            self.boxes.take(beat)

    def _health(self, message: Msg) -> None:
        health = readable(read_health, message.data, self._seldom, "figures of a box were dropped")
        if health is not None and message.subject == self.names.box_health(health.box):
            self.models.told(health)

    def _answered(self, message: Msg) -> None:
        _, _, kind = message.subject.split(".", 2)
        if kind == "results":
            answer = readable(self._result, message.data, self._seldom, "a result was dropped")
            if answer is not None:
                self.dispatch.answered(*answer)
            else:
                self._unreadable += 1
        elif kind == "words":
            word = readable(read_from_box, message.data, self._seldom, "a word of a box was dropped")
            if isinstance(word, Claims):
                self.dispatch.claims(word)
            elif word is not None:
                self.dispatch.missing(word.life, word.ids, lost=word.lost)
        elif kind == "texts":
            self._unreadable += not self.texts.hear(message.data)
        elif kind == "parts":
            self._unreadable += not self.parts.hear(message.data)
        elif kind.startswith("queued."):
            _, _, place = kind.partition(".")
            pool, _, item = place.partition(".")
            waited_ns = self.queues.confirmed(pool, item, message)
            if waited_ns is not None:
                self.took("publish", "", waited_ns / 1e9)
        elif kind.startswith("dead."):
            self._given_up.answered(kind.partition(".")[2], message)
        elif kind.startswith("sent.") and (message.headers or {}).get("Status") == "503":
            _, _, place = kind.partition(".")
            life, _, item = place.partition(".")
            self.dispatch.gone(life, item)

    def _result(self, data: bytes) -> tuple[ItemResult, Outcome]:
        """See `read_result`; what a box of another version took from the queue goes to another box at once."""
        try:
            return read_result(data)
        except RefusedVersion as refused:
            self.dispatch.refused(refused.item)
            raise

    def _item(self, sent: Sent) -> bytes:
        plan = sent.plan
        carried = Carried(
            VERSION,
            self.router,
            sent.kind,
            sent.attempt,
            _left_ms(sent.deadline_ns),
            _left_ms(sent.start_by_ns),
            sent.work,
            sent.payload,
            work_nbytes=sent.work_nbytes,
            large=sent.large,
            others=sent.others,
            stays_ms=sent.stays_ms,
        )
        return encode(
            Item(
                sent.id,
                plan.request_id,
                operation_of(plan),
                plan.model,
                self.models.pool_of(sent.choice),
                self.router,
                results(self.router),
                machine_profile=sent.choice.profile,
                timestamp=time.time(),
                penstock=carried,
            )
        )

    def _choose(self, held: Held) -> Box | None:
        """The best open box for an item outside of the lives that it tried."""
        assert isinstance(held, Sent)
        if held.step is not None:
            box, held.stays_ms = self.models.keeper(held.plan, held.tried, held.choice)
            return box
        if held.kind != TEXT:
            kind = PARTS if held.kind == PARTS else RUN
            return self.models.takers.choose(held.model, held.tried, held.choice, kind)
        texts = self.texts.at_boxes
        return self.models.takers.home(
            held.model, held.tried, held.choice, held.beginning, texts, held.identity
        )

    def _why_not(self, held: Held) -> PenstockError:
        assert isinstance(held, Sent)
        if held.step is not None:
            return self.models.why_no_keeper(held.plan, held.choice)
        return self.models.why_unavailable(held.model, held.choice, held.kind if held.in_pieces else RUN)

    def item(
        self,
        kind: str,
        work: Work,
        payload: bytes,
        deadline_ns: int,
        start_by_ns: int,
        others: Collection[str] = (),
        choice: Choice = ANY_BOX,
    ) -> Sent:
        """A new item.

        Raises `DeadlineExceeded` for a request that is late already, `InvalidInput` for work with a value that no
        message can hold, and `InputRefused` for poison.
        """
        deadline.check(deadline_ns, "before a worker could be found")
        try:
            encoded = encode(work)
            if kind != ENSURE and self.poison:
                self.poison.check(work.model, work.call, payload if kind != TEXT else b"")
        except UNSENDABLE as error:
            raise unsendable(work.call, error) from error
        return Sent(
            f"{self.router}.{next(self._numbers)}",
            work.model,
            deadline_ns,
            asyncio.get_running_loop().create_future(),
            kind=kind,
            plan=work,
            work=encoded,
            work_nbytes=len(encoded),
            payload=payload,
            others=list(others),
            start_by_ns=start_by_ns,
            choice=choice,
            step=work.step,
        )

    async def offer(self, sent: Sent) -> None:
        """Keep the inputs of an item that are too large for a message; any box that has the item may get them.

        Raises `DeadlineExceeded`.
        """
        if len(sent.work) + len(sent.payload) + SLACK_NBYTES > self.broker.inline_nbytes:
            self.offloads += 1
            try:
                async with asyncio.timeout(deadline.remaining_s(sent.deadline_ns)):
                    sent.large = await self.transfers.offer([sent.work, sent.payload], "")
            except TimeoutError:
                raise sent.late() from None
            sent.work = sent.payload = b""

    async def post(self, sent: Sent) -> None:
        """Give an item to `dispatch`, once a broker is there. Raises as `offer` and `Dispatch.begin` do."""
        await self.offer(sent)
        if not self.broker.up:
            await self.broker.found(deadline.remaining_s(sent.deadline_ns))
        self.dispatch.begin(sent)

    def close(self, sent: Sent) -> None:
        """Nobody waits for an item any more. Safe to call twice."""
        self.dispatch.end(sent)
        self.transfers.withdraw(sent.large)

    def judge(self, sent: Sent, payload: bytes = b"") -> None:
        """Note the input of an item on which boxes have died, if they have.

        An input that was alone at two boxes when they died is poison; one of several is a suspect, which boxes run
        alone.
        """
        if sent.deaths_alone >= MOST_LOSSES:
            self.poison.add(sent.model, sent.plan.call, payload)
        elif sent.deaths:
            self.poison.suspect(sent.model, sent.plan.call, payload, alone=False)

    def to_box(self, held: Held, box: Box) -> None:
        """Send an item to a box; see `Sender`."""
        assert isinstance(held, Sent)
        reply = f"{inbox(self.router)[:-1]}sent.{box.life}.{held.id}"
        self.broker.send(self.names.box_work(box.name, box.life), self._item(held), reply)

    def to_queue(self, held: Held) -> bool:
        """Publish an item in the queue; see `Sender`.

        Not while the queue has trouble, a box is starved beside others, or no box would take the item.
        """
        assert isinstance(held, Sent)
        if held.kind != RUN or (box := self.models.takers.choose(held.model, (), held.choice)) is None:
            return False
        if self._balances and self.models.takers.is_starved(box, held.model, held.choice):
            return False
        bundle, pool = self.models.takers.queue_of(held.model, held.choice), self.models.pool_of(held.choice)
        if len(self.dispatch.unclaimed) >= MOST_UNCLAIMED and not self.models.takers.has_room(
            held.model, held.choice
        ):
            # A box refuses what its workers have no room for, and knows after which time to come again.
            return False
        if not bundle or not (lane := self.queues.lane(pool, bundle)).usable:
            return False
        held.attempt += 1
        subject = self.names.work(held.model, pool)
        reply = f"{inbox(self.router)[:-1]}queued.{pool}.{held.id}"
        self.broker.send(subject, self._item(held), reply, {"Nats-Msg-Id": held.id})
        lane.published(held.id)
        return True

    def word(self, box: Box, word: ToBox) -> None:
        """Tell a box; see `Sender`."""
        self.broker.send(self.names.box_word(box.name, box.life), encode(word))

    def give_back(self, ack: str) -> None:
        """Return a delivery; see `Sender`."""
        self.broker.send(ack, b"-NAK")


def operation_of(work: Work) -> str:
    """The operation of work, as SIE's fields and metrics name it."""
    return type(work.call).__name__.removesuffix("Call").lower()


def _left_ms(deadline_ns: int) -> int:
    return min(86_400_000, max(0, int(deadline.remaining_s(deadline_ns) * 1e3)))
