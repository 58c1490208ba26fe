"""The engine of a gateway: plans become items, items go to boxes, results become answers.

1. `begin` connects to the brokers and follows beats, rows and the inbox. Nothing waits for a broker or a box.
2. `run` makes an item of the planned work and holds it (`dispatch`) until its answer is there or its deadline passed.
3. Each `TICK_S` silent boxes are ended and silent items asked for; each `beat_s` the gateway says that it lives.

A request is one item; a large one has been cut before (`pieces`). Generated text, answers in parts and sequences need a
home, which this engine does not give yet: they are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from nats.aio.msg import Msg

from frontend.cluster.boxes import Box, Boxes
from frontend.cluster.broker import Broker, lasting, readable
from frontend.cluster.directory import ClusterModels
from frontend.cluster.dispatch import MOST_LOSSES, Dispatch, Held
from frontend.cluster.queue import Queues
from frontend.cluster.state import GatewayState
from frontend.cluster.transfers import TransferFailed, Transfers
from frontend.engine.answer import Answer, AnswerStream, shifted
from frontend.engine.events import Generation, Pace, Past
from frontend.engine.interface import Engine, NoBlocks, Payload, bytes_of
from frontend.scope import ANY_BOX, Choice, RequestScope
from frontend.server.drain import Drain
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import DeadlineExceeded, InvalidInput, NoReplica, Unsupported, WorkerCrashed
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster import (
    ENSURE,
    MOST_NBYTES,
    RUN,
    VERSION,
    BoxBeat,
    Carried,
    Claims,
    GatewayBeat,
    Item,
    ItemResult,
    Offer,
    Outcome,
    ToBox,
    encode,
    read_answer,
    read_beat,
    read_from_box,
    read_health,
    read_result,
)
from ipc.wire.cluster_names import Names, inbox, results
from ipc.wire.messages import EncodeCall, Work

log = logging.getLogger(__name__)

TICK_S = 0.05
MOST_TIMES = 50_000
"""Times that wait for the metrics, which are written twice a second."""
GRACE_S = 0.2
"""A box tells of a passed deadline before the gateway gives up."""
SLACK_NBYTES = 2048
"""Room for the fields of an item around its work."""
_UNSAYABLE = (OverflowError, RecursionError, TypeError, ValueError)
NO_HOME = "is not built yet for a cluster of several hosts; ask a box for it directly"


@dataclass(slots=True, eq=False, kw_only=True)
class _Sent(Held):
    """An item with what its message is made of.

    `work` is the plan as msgpack, of `work_nbytes`. With `large` neither `work` nor `payload` is in the message.
    """

    kind: str
    plan: Work
    work: bytes
    work_nbytes: int
    payload: bytes
    others: list[str]
    start_by_ns: int
    large: Offer | None = None


class Gateway:
    """Engine and directory of one gateway process, and its connection."""

    def __init__(self, settings: Settings, catalog: Catalog, drain: Drain) -> None:
        """Raises `ConfigError` for files of `settings.cluster` that cannot be read."""
        cluster = settings.cluster
        self.router, self.names = secrets.token_hex(12), Names(cluster.name)
        self._beat_s = cluster.beat_s
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
            lambda held: self.models.choose(held.model, held.tried, held.choice),
            lambda held: self.models.why_unavailable(held.model, held.choice),
            settings.limits.restart_wait_s,
        )
        self.engine = ClusterEngine(self, drain)
        self.models.ensure = self.engine.ensure
        self._state = GatewayState(settings, self.broker, self.names, self.models, self.router)
        self.pools, self.configs, self.poison = self._state.pools, self._state.configs, self._state.poison
        self.broker.listen(inbox(self.router), self._answered)
        self.broker.listen(self.names.box_beat("*"), self._beat)
        self.broker.listen(self.names.box_health("*"), self._health)
        self.broker.on_up.append(self.dispatch.resume)
        self.queues = Queues(self.broker, self.names, cluster)
        self.queues.on_trouble = self.dispatch.leave_queue
        self.pools.on_removed, self.pools.on_left = self.dispatch.leave_pool, self._pool_left
        self.transfers = Transfers(cluster, self.router, f"gateway {self.router}")
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
        for task in self._tasks:
            task.cancel()
        self.queues.close()
        self.dispatch.say_got()
        await self.transfers.close()
        await self.broker.close()

    def _pool_left(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self.queues.drop(name))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _tick(self) -> None:
        while True:
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
            answer = readable(read_result, message.data, self._seldom, "a result was dropped")
            if answer is not None:
                self.dispatch.answered(*answer)
            else:
                self._unreadable += 1
        elif kind == "words":
            word = readable(read_from_box, message.data, self._seldom, "a word of a box was dropped")
            if isinstance(word, Claims):
                self.dispatch.claims(word)
            elif word is not None:
                self.dispatch.missing(word.life, word.ids)
        elif kind.startswith("queued."):
            _, _, place = kind.partition(".")
            pool, _, item = place.partition(".")
            waited_ns = self.queues.confirmed(pool, item, message)
            if waited_ns is not None:
                self.took("publish", "", waited_ns / 1e9)
        elif kind.startswith("sent.") and (message.headers or {}).get("Status") == "503":
            _, _, place = kind.partition(".")
            life, _, item = place.partition(".")
            self.dispatch.gone(life, item)

    def _item(self, sent: _Sent) -> bytes:
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

    async def offer(self, sent: _Sent) -> None:
        """Keep the inputs of an item that are too large for a message; any box that has the item may get them."""
        if len(sent.work) + len(sent.payload) + SLACK_NBYTES > self.broker.inline_nbytes:
            self.offloads += 1
            sent.large = await self.transfers.offer([sent.work, sent.payload], "")
            sent.work = sent.payload = b""

    def to_box(self, held: Held, box: Box) -> None:
        """Send an item to a box; see `Sender`."""
        assert isinstance(held, _Sent)
        reply = f"{inbox(self.router)[:-1]}sent.{box.life}.{held.id}"
        self.broker.send(self.names.box_work(box.name, box.life), self._item(held), reply)

    def to_queue(self, held: Held) -> bool:
        """Publish an item in the queue, unless the queue has trouble or no box would take the item; see `Sender`."""
        assert isinstance(held, _Sent)
        if held.kind != RUN or self.models.choose(held.model, (), held.choice) is None:
            return False
        bundle, pool = self.models.queue_of(held.model, held.choice), self.models.pool_of(held.choice)
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


class ClusterEngine(Engine):
    """Runs work on the boxes."""

    def __init__(self, gateway: Gateway, drain: Drain) -> None:
        self._gateway, self._drain, self.blocks = gateway, drain, NoBlocks()
        self._numbers = itertools.count(1)

    async def _call(
        self,
        kind: str,
        work: Work,
        payload: bytes,
        deadline_ns: int,
        start_by_ns: int,
        others: Collection[str] = (),
        choice: Choice = ANY_BOX,
    ) -> tuple[ItemResult, Outcome, memoryview | None]:
        """The answer to an item, and the bytes that its outcome offers.

        Raises the error of the box, `DeadlineExceeded` soon after the deadline, and `InputRefused` for poison. An input
        that was alone at two boxes when they died is poison; one of several is a suspect, which boxes run alone.

        Raises `InvalidInput` for work with a value that no message can hold.
        """
        gateway = self._gateway
        try:
            encoded = encode(work)
            if kind == RUN and gateway.poison:
                gateway.poison.check(work.model, work.call, payload)
        except _UNSAYABLE as error:
            raise InvalidInput(f"the request has a value that no message can hold: {error}") from error
        sent = _Sent(
            f"{gateway.router}.{next(self._numbers)}",
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
        )
        try:
            async with asyncio.timeout(deadline.remaining_s(deadline_ns) + GRACE_S):
                await gateway.offer(sent)
                if not gateway.broker.up:
                    await gateway.broker.found()
                gateway.dispatch.begin(sent)
                while True:
                    result, outcome = await sent.future
                    if outcome.large is None:
                        return result, outcome, None
                    whole = await self._got(sent, outcome, outcome.large)
                    if whole is not None:
                        return result, outcome, whole
        except WorkerCrashed:
            self._judge(sent, payload)
            raise
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before a box answered", retry_after_s=1) from None
        finally:
            gateway.dispatch.end(sent)
            gateway.transfers.withdraw(sent.large)

    def _judge(self, sent: _Sent, payload: bytes) -> None:
        """Note an input on which boxes have died, if they have."""
        poison, call = self._gateway.poison, sent.plan.call
        if sent.deaths_alone >= MOST_LOSSES:
            poison.add(sent.model, call, payload)
        elif sent.deaths:
            poison.suspect(sent.model, call, payload, alone=False)

    async def _got(self, sent: _Sent, outcome: Outcome, large: Offer) -> memoryview | None:
        """The bytes that an outcome offers; None if the item has to run again, since they did not come."""
        gateway = self._gateway
        try:
            began_ns = time.monotonic_ns()
            whole = await gateway.transfers.get(large, outcome.life, MOST_NBYTES, gateway.boxes.is_alive)
            gateway.took("transfers", "", (time.monotonic_ns() - began_ns) / 1e9)
        except TransferFailed as error:
            log.warning("the answer to an item did not come: %s", error.message)
            gateway.dispatch.retake(
                sent, NoReplica(f"the answer did not come: {error.message}", retry_after_s=1)
            )
            return None
        except asyncio.CancelledError:
            gateway.dispatch.got(outcome.life, sent.id, large=True)
            raise
        gateway.dispatch.got(outcome.life, sent.id, large=True)
        return whole

    async def run(self, scope: RequestScope, work: Work, payload: Payload = None) -> Answer:
        """Run planned work on a box; see `Engine.run`. The answer lies in private memory."""
        if work.step is not None:
            raise Unsupported(f"a sequence {NO_HOME}")
        raw = bytes(bytes_of(payload))
        began_ns = time.monotonic_ns()
        result, outcome, whole = await self._call(
            RUN, work, raw, scope.deadline_ns, scope.waits_until_ns, choice=scope.choice
        )
        at, end = outcome.result_nbytes, outcome.result_nbytes + outcome.data_nbytes
        if whole is None:
            found, data, loose = (memoryview(part) for part in (outcome.result, outcome.data, outcome.loose))
        else:
            found, data, loose = whole[:at], whole[at:end], whole[end:]
        answer = Answer(read_answer(found), data, loose, worker=result.worker_id, uuid=outcome.uuid)
        self._gateway.took("result_wait", operation_of(work), (time.monotonic_ns() - began_ns) / 1e9)
        answer.tensors()  # Raises for an answer whose table of tensors and bytes disagree.
        trace = answer.trace
        if trace is not None and scope.span is not None:
            trace = shifted(trace, began_ns - scope.span.began_ns)
        scope.ran(answer.worker, answer.timing, trace)
        return answer

    async def ensure(self, model: str, deadline_ns: int, others: Collection[str], choice: Choice) -> None:
        """Have a box load a model, or one of `others`. Raises why the model cannot be had, or not in time."""
        plan = Work(model, EncodeCall([], []), 0, 0, "")
        await self._call(ENSURE, plan, b"", deadline_ns, deadline_ns, others, choice)

    @asynccontextmanager
    async def stream(
        self, scope: RequestScope, work: Work, payload: Payload = None
    ) -> AsyncIterator[AnswerStream]:
        """Refused; see the module. Raises `Unsupported`."""
        raise Unsupported(f"an answer in parts {NO_HOME}")
        yield

    @asynccontextmanager
    async def generate(
        self, scope: RequestScope, work: Work, pace: Pace, past: Past | None = None
    ) -> AsyncIterator[Generation]:
        """Refused; see the module. Raises `Unsupported`."""
        raise Unsupported(f"generated text {NO_HOME}")
        yield

    def ready(self) -> tuple[bool, str]:
        """Whether this process accepts requests: it waits neither for boxes nor for brokers."""
        return (False, "draining") if self._drain.draining else (True, "ok")


def operation_of(work: Work) -> str:
    """The operation of work, as SIE's fields and metrics name it."""
    return type(work.call).__name__.removesuffix("Call").lower()


def _left_ms(deadline_ns: int) -> int:
    return min(86_400_000, max(0, int(deadline.remaining_s(deadline_ns) * 1e3)))
