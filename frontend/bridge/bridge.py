"""One life of a bridge: the local engine on one side, the brokers on the other.

1. Items come on the subject of this life, and from the queue as far as the workers have room (`pulling`). Words of
   gateways come on another subject. `intake` does the rest.
2. Each `beat_s` the bridge says that it lives, and how much room its workers have.
3. The models of the workers are written to the bucket when they change, the row of the box each `WRITE_EVERY_S`, and
   all rows each `ALL_EVERY_S`, before the broker forgets them.
4. The pools of the cluster are followed. A box in a pool takes the work of that pool alone, and loads what the pool has
   pinned (`pooling`); else the box takes the work of the pool of its settings.
5. Configurations of the cluster become files that the workers serve (`configs`).
6. Inputs on which workers died are told to all hosts, and those of other hosts are heard (`cluster.poison`).
7. `drain` says so in the beat, refuses what still comes, waits for what runs, and until gateways have the answers.

A name of a box is of one life at a time. A bridge listens for another life of its name before its own first sign of
life, and refuses to be a second one (`Namesakes`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from frontend.bridge.configs import ConfiguredModels
from frontend.bridge.dead_letters import DeadLetters
from frontend.bridge.foreign import ForeignItems
from frontend.bridge.intake import Intake
from frontend.bridge.meter import Meter
from frontend.bridge.pooling import Membership
from frontend.bridge.pulling import Puller
from frontend.bridge.rows import rows_of, versions_of
from frontend.cluster.broker import LOST_ECHOES, Broker, ended, lasting, readable
from frontend.cluster.bucket import ROWS_S, Writer
from frontend.cluster.poison import SharedPoison
from frontend.cluster.queue import Maker
from frontend.cluster.transfers import Transfers
from frontend.engine.interface import Engine, Models
from frontend.engine.poison import PoisonList
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster import (
    VERSION,
    BoxBeat,
    BoxHealth,
    GatewayBeat,
    Item,
    encode,
    read_beat,
)
from ipc.wire.cluster_names import Names
from ipc.wire.cluster_rows import Row

log = logging.getLogger(__name__)

TICK_S = 0.1
FIGURES_EVERY_S = 1.0
WRITE_EVERY_S = 10.0
ALL_EVERY_S = ROWS_S / 3
TRY_AGAIN_S = 2.0
ITEMS_EACH = 64
"""Items of the queue that a box takes for each of its workers while they have room."""
MOST_AGE_S = 5.0
MOST_DIGITS = 19
"""Digits of an instant in nanoseconds since 1970."""
CLOCK_TURN_NS = 30 * 10**9
CONFIRMED_S = 1.0
"""How long an orderly stop waits for gateways to confirm what they have."""


class Ages:
    """How long items were in the queue, by the broker's clock alone.

    A delivery says when the broker had the item, by a clock that may differ from that of this host by minutes. The item
    that came fastest lately gives the difference of the clocks: others are as much older as they came slower.
    """

    def __init__(self) -> None:
        self._least = [0, 0]
        self._turn_ns = 0

    def forget(self) -> None:
        """The next items may be those of a broker with another clock."""
        self._turn_ns = 0

    def of(self, ack: str, now_ns: int) -> float:
        """Age of a delivery in seconds, 0 to `MOST_AGE_S`; `ack` is its subject, `now_ns` the time of this host."""
        tokens = ack.split(".")
        place = 7 if len(tokens) == 9 else 9
        if len(tokens) <= place or not tokens[place].isdecimal() or len(tokens[place]) > MOST_DIGITS:
            return 0.0
        since_ns = now_ns - int(tokens[place])
        if not 0 <= now_ns - self._turn_ns < CLOCK_TURN_NS:
            # Clocks drift, so an old difference is forgotten: the least of the turn before counts, too.
            fresh = self._turn_ns == 0
            self._least = [since_ns if fresh else self._least[1], since_ns]
            self._turn_ns = now_ns
        self._least[1] = min(self._least[1], since_ns)
        return min(MOST_AGE_S, max(0, since_ns - min(self._least)) / 1e9)


class Namesakes:
    """Other lives with the name of this box: a second host with the same `cluster.box`.

    `is_alone`: nobody else has used the name while this life listened, so this life may use it.
    """

    def __init__(self, box: str, life: str) -> None:
        self._box, self._life = box, life
        self._heard: dict[str, int] = {}
        self.is_alone = False
        self.refusal = ""
        """Why this life may not use the name."""

    def heard(self, beat: BoxBeat, mine: int) -> None:
        """A sign of life with the name of this box; `mine` is the number of the last one of this life.

        A life that leaves is none, and of two lives the one that has fewer signs of life is the second.
        """
        if beat.box != self._box or beat.life == self._life or beat.draining:
            return
        # A bridge that has just died may be heard once.
        again = beat.number > self._heard.get(beat.life, beat.number)
        self._heard[beat.life] = beat.number
        if again and (not self.is_alone or (beat.number, beat.life) > (mine, self._life)):
            self.refusal = (
                f"cluster.box: another host joined these brokers as {self._box!r} before (life {beat.life}); "
                "each box needs a name of its own"
            )


class Bridge:
    """One life of the bridge of a box; see the module. The life starts with `begin` and ends with `drain`."""

    def __init__(
        self, settings: Settings, engine: Engine, models: Models, meter: Meter, poison: PoisonList
    ) -> None:
        """`poison`: the inputs that this host knows, which learns those of others.

        Raises `ConfigError` for files of `settings.cluster` that cannot be read.
        """
        self._settings, self._cluster = settings, settings.cluster
        self._engine, self._meter = engine, meter
        self._models, self.versions = models, versions_of(settings, models)
        self.box, self.life = settings.cluster.box_name, secrets.token_hex(8)
        self._names = Names(settings.cluster.name)
        self.broker = Broker(settings.cluster, f"bridge {self.box}")
        self.transfers = Transfers(
            settings.cluster, self.life, f"bridge {self.box}", settings.limits.max_buffered_bytes
        )
        self.intake = Intake(
            settings,
            self.life,
            engine,
            models,
            self.broker.say,
            lambda: self.broker.inline_nbytes,
            self.transfers,
            meter,
        )
        self._foreign = ForeignItems(settings, engine, models, self.broker.say, meter)
        self.intake.on_foreign = self._take_foreign
        self._dead_letters = DeadLetters(self._cluster, self.broker, self._names)
        self.intake.on_dead = self._foreign.on_dead = self._dead_letters.keep
        self._writer = Writer(self.broker, self._names)
        self._writer.on_untold = meter.untold
        self._seldom, self._number, self._echo_s, self._pulls = Seldom(log), 0, 0.0, False
        self._ages, self._namesakes = Ages(), Namesakes(self.box, self.life)
        self.on_refusal: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self.broker.listen(self._names.box_work(self.box, self.life), lambda it: self.intake.take(it.data))
        self.broker.listen(self._names.box_word(self.box, self.life), lambda it: self.intake.word(it.data))
        self.broker.listen(self._names.gateway_beat("*"), self._beat)
        self.broker.listen(self._names.box_beat(self.box), self._namesake)
        self.broker.on_up.append(self._joined)
        self._maker = Maker(self.broker, self._names, self._cluster)
        self._membership = Membership(settings, self.broker, self._names, models)
        self._membership.on_change = self._aim
        self._configured = ConfiguredModels(settings, self.broker, self._names, models, meter.config_message)
        self._poison = SharedPoison(self.broker, self._names, poison)
        self._puller = Puller(
            self.life,
            self._next_of(self._cluster.pool),
            self.broker.send,
            self._wanted,
            self._pulled,
            self._maker.again,
        )
        self.broker.listen(self._puller.subject, self._puller.heard)
        self.intake.on_end = self._maker.on_there = self._pull_soon
        if self._cluster.lane != "direct":
            self.broker.on_up.append(self._maker.again)
        self.broker.on_down.append(self._puller.forget)
        self.broker.on_down.append(self._ages.forget)

    def begin(self) -> None:
        """Connect."""
        self.broker.start()
        loop = asyncio.get_running_loop()
        own = (self._tick, self._live, self._write, self._extend, self._tell_figures, self._maker.run)
        loops = (
            *own,
            self._dead_letters.run,
            *self._membership.loops,
            *self._configured.loops,
            *self._poison.loops,
        )
        self._tasks = [loop.create_task(self.transfers.start())]
        self._tasks += [loop.create_task(lasting(run)) for run in loops]

    def _next_of(self, pool: str) -> str:
        """Subject of requests for items of a pool."""
        consumer = self._names.consumer(self._cluster.bundle, pool)
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._names.stream(pool)}.{consumer}"

    def _aim(self) -> None:
        """The box belongs to another pool from now on."""
        self._puller.aim(self._next_of(self._membership.pool))
        if self._cluster.lane != "direct":
            self._maker.aim(self._membership.pool)
        self._live_now()

    async def drain(self) -> None:
        """Finish what runs, within `worker.drain_timeout_s`, and leave."""
        self.intake.draining = self._foreign.draining = True
        self._live_now()
        drain_s = self._settings.worker.drain_timeout_s
        await asyncio.gather(self.intake.ended(drain_s, CONFIRMED_S), self._foreign.ended(drain_s))
        await ended(self._tasks)
        await self.transfers.close()
        await self.broker.close()

    def _beat(self, message: Msg) -> None:
        beat = readable(read_beat, message.data, self._seldom, "a sign of life was dropped")
        if isinstance(beat, GatewayBeat) and message.subject == self._names.gateway_beat(beat.router):
            self.intake.heard(beat.router)

    @property
    def refusal(self) -> str:
        """Why this life may not go on; empty while it may."""
        return self._namesakes.refusal

    def _namesake(self, message: Msg) -> None:
        beat = readable(read_beat, message.data, self._seldom, "a sign of life was dropped")
        if isinstance(beat, BoxBeat):
            if beat.life == self.life:
                self._echo_s = time.monotonic()
            self._namesakes.heard(beat, self._number)
            if self.refusal:
                self.on_refusal()

    def _joined(self) -> None:
        if self._namesakes.is_alone:
            self._live_now()
        else:
            asyncio.get_running_loop().call_later(self._cluster.peer_silence_s, self._enter)

    def _enter(self) -> None:
        if self.broker.up and not self.refusal:
            self._namesakes.is_alone = True
            self._live_now()
            self._pull_soon()

    async def _tick(self) -> None:
        while True:
            self.intake.tick(connected=self.broker.up and self._hears)
            self._puller.tick()
            self._pull()
            await asyncio.sleep(TICK_S)

    @property
    def _hears(self) -> bool:
        """Whether the broker brings messages: the bridge hears its own signs of life, too."""
        return not self._echo_s or time.monotonic() - self._echo_s < LOST_ECHOES * self._cluster.beat_s

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(self._cluster.extend_every_s)
            self.intake.extend()
            self._foreign.extend()

    @property
    def items(self) -> int:
        """Items that run."""
        return len(self.intake) + len(self._foreign)

    def _take_foreign(self, item: Item, data: bytes, ack: str, aged_s: float) -> None:
        if item.bundle_config_hash not in ("", self._configured.told().digest):
            self._meter.disagrees(item.model_id)
        self._foreign.take(item, data, ack, aged_s, self.broker.inline_nbytes)

    def _wanted(self) -> int:
        """Items that this box could have beside those that run."""
        open_ = [worker for worker in self._models.workers() if worker.responsive]
        if self.intake.draining or not open_:
            return 0
        if not any(worker.credits.room_s > 0 for worker in open_):
            return 0
        return max(0, ITEMS_EACH * len(open_) - self.items)

    @property
    def _is_in(self) -> bool:
        """Whether this life may use the name of the box."""
        return self._namesakes.is_alone and not self.refusal

    def _pull_soon(self) -> None:
        # PERF: the room of all workers is looked at once for all items that come and end in a turn of the event loop.
        if self._maker.there and not self._pulls:
            self._pulls = True
            asyncio.get_running_loop().call_soon(self._pull)

    def _pull(self) -> None:
        self._pulls = False
        if self.broker.up and self._maker.there and self._is_in:
            self._puller.pull()

    def _pulled(self, message: Msg) -> None:
        self.intake.take(message.data, message.reply, self._ages.of(message.reply, time.time_ns()))
        self._pull_soon()

    async def _live(self) -> None:
        while True:
            self._live_now()
            await asyncio.sleep(self._cluster.beat_s)

    async def _tell_figures(self) -> None:
        while True:
            if self._is_in and self.broker.up:
                # A restarted worker forgets who asked.
                self._models.watch(True)
                stats = {worker.name: worker.stats for worker in self._models.workers()}
                figures = {
                    name: msgspec.structs.replace(each, batches=[])
                    for name, each in stats.items()
                    if each is not None
                }
                health = BoxHealth(VERSION, self.box, self.life, figures, self.transfers.address)
                self.broker.say(self._names.box_health(self.box), encode(health))
            await asyncio.sleep(FIGURES_EVERY_S)

    def _live_now(self) -> None:
        if not self._is_in:
            return
        self._number += 1
        open_ = [worker for worker in self._models.workers() if worker.responsive]
        beat = BoxBeat(
            VERSION,
            self.box,
            self.life,
            self._membership.pool,
            self._number,
            self.intake.draining,
            sum(max(0.0, worker.credits.room_s) for worker in open_),
            min((worker.credits.wait_s for worker in open_), default=0.0),
        )
        self.broker.say(self._names.box_beat(self.box), encode(beat))

    async def _write(self) -> None:
        written, due_s, all_due_s = (-1, -1), 0.0, 0.0
        while True:
            version, now_s = (self._models.version, self._configured.version), time.monotonic()
            if not self.broker.up:
                # The broker may forget rows, or lose them with its disk, while nobody writes.
                all_due_s = 0.0
            elif self._is_in and (version != written or now_s >= due_s):
                again = self.box if now_s >= due_s else ""
                written = version
                if now_s >= all_due_s:
                    self._writer.forget()
                    all_due_s = now_s + ALL_EVERY_S
                if not await self._writer.write(self._rows(), again=again):
                    due_s = now_s + TRY_AGAIN_S
                elif again:
                    due_s = now_s + WRITE_EVERY_S
            await asyncio.sleep(TICK_S)

    def _rows(self) -> dict[str, Row]:
        """All rows of this box by key."""
        return rows_of(self._settings, self.life, self._models, self._configured, self.versions)
