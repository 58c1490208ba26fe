"""The queue lane: one-replica streams in memory, from which bridges pull what they have room for.

1. `made` makes stream and consumer, or brings those that exist to these settings. Gateways and bridges each have a
   `Maker`, which calls `made` whenever stream or consumer may be gone.
2. A gateway publishes an item and goes on. The broker confirms, which `confirmed` takes in.
3. Trouble is an item that is not confirmed within `confirm_s`, no stream, a full stream, a lost broker. Then the queue
   counts as down, for `DOWN_S` at first and longer each time up to `max_down_s`, and every item that no box has claimed
   goes directly to a box.
4. An item that was delivered `MOST_DELIVERIES` times in vain is given up by the broker, which tells all gateways. Each
   puts a letter into the stream of dead letters under one id, and the stream keeps the first (`GivenUp`).
5. An item that waits while a box with its model has room goes directly, too (`dispatch`).
6. Each pool has a stream. A gateway has a lane for each pool whose boxes it uses (`Queues`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, NotFoundError

from frontend.cluster.broker import Broker, lasting
from frontend.cluster.bucket import LOST, TIMEOUT_S, making
from ipc.errors import QueueUnavailable
from ipc.logs import Seldom
from ipc.metrics.cluster import Trouble
from ipc.settings import Cluster
from ipc.wire.cluster import Letter
from ipc.wire.cluster_names import UNKNOWN, Names

log = logging.getLogger(__name__)

MAX_AGE_S = 120
MOST_ITEMS = 100_000
MOST_PENDING = 10_000
MOST_DELIVERIES = 20
MOST_WAITING = 512
DOWN_S = 1.0
STREAM_EXISTS = 10058
MOST_QUEUES = 1024
"""Queues and consumers that are told apart in counts."""
ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.*.*"
_UNMADE = "the queue cannot be made"


async def made(client: Client, names: Names, cluster: Cluster) -> None:
    """Have stream and consumer of the pool with our settings. Raises one of `LOST`."""
    manager = client.jetstream(timeout=TIMEOUT_S)
    stream_name, consumer_name = names.stream(cluster.pool), names.consumer(cluster.bundle, cluster.pool)
    stream = StreamConfig(
        name=stream_name,
        subjects=[names.works(cluster.pool)],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.MEMORY,
        num_replicas=1,
        max_age=MAX_AGE_S,
        max_msgs=MOST_ITEMS,
        discard=DiscardPolicy.NEW,
        duplicate_window=MAX_AGE_S,
    )
    try:
        await manager.add_stream(stream)
    except APIError as error:
        if error.err_code != STREAM_EXISTS:
            raise
        try:
            await manager.update_stream(stream)
        except APIError:
            # Storage and retention cannot be changed. What waits in there is held by its gateways.
            log.warning("stream %s has other settings and is made anew", stream_name)
            await manager.delete_stream(stream_name)
            await manager.add_stream(stream)
    consumer = ConsumerConfig(
        durable_name=consumer_name,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=cluster.ack_wait_s,
        max_ack_pending=MOST_PENDING,
        max_deliver=MOST_DELIVERIES,
        max_waiting=MOST_WAITING,
    )
    try:
        await manager.add_consumer(stream_name, consumer)
    except APIError:
        try:
            await manager.delete_consumer(stream_name, consumer_name)
        except NotFoundError:
            pass
        await manager.add_consumer(stream_name, consumer)


class Maker:
    """Makes stream and consumer again after each call of `again`, one attempt at a time, until an attempt succeeds."""

    def __init__(self, broker: Broker, names: Names, cluster: Cluster) -> None:
        self._broker, self._names, self._cluster = broker, names, cluster
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        self.there = False
        """Whether the last attempt made stream and consumer, and nobody has missed either since."""
        self.on_there: Callable[[], None] = lambda: None

    def again(self) -> None:
        """Stream or consumer may be gone."""
        self.there = False
        self._wanted.set()

    def aim(self, pool: str) -> None:
        """Make stream and consumer of this pool from now on."""
        self._cluster = msgspec.structs.replace(self._cluster, pool=pool)
        self.again()

    async def run(self) -> None:
        """Wait for `again` and make stream and consumer, for ever."""
        await making(self._broker, self._wanted, self._make, self._seldom, _UNMADE, DOWN_S)

    async def _make(self) -> None:
        await made(self._broker.client, self._names, self._cluster)
        self.there = True
        self.on_there()


class Lane:
    """The queue as one gateway sees it."""

    def __init__(self, cluster: Cluster, maker: Maker, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._maker, self._now_ns = maker, now_ns
        self._off, self._forced = cluster.lane == "direct", cluster.lane == "queue"
        self._confirm_ns, self._most_down_s = int(cluster.confirm_s * 1e9), cluster.max_down_s
        self._unconfirmed: dict[str, int] = {}
        self._down_until_ns, self._down_s = 0, DOWN_S
        self.on_trouble: Callable[[Trouble], None] = lambda reason: None
        """Called with the name of each trouble: items that no box has claimed should go directly to boxes."""
        self.troubles = self.unconfirmed = 0
        """Times in trouble; items that no broker has confirmed."""

    @property
    def usable(self) -> bool:
        """Whether a new item goes into the queue."""
        if self._off:
            return False
        return self._forced or (self._maker.there and self._now_ns() >= self._down_until_ns)

    def published(self, item: str) -> None:
        """An item is on its way to the broker."""
        self._unconfirmed[item] = self._now_ns()

    def confirmed(self, item: str, message: Msg) -> int | None:
        """The broker has answered to an item; returns after how many nanoseconds it confirmed the item, else None."""
        published_ns = self._unconfirmed.pop(item, None)
        if published_ns is None:
            return None
        if (message.headers or {}).get("Status") == "503":
            self._maker.again()
            self.unconfirmed += 1
            self.trouble("no stream")
        elif b'"error"' in message.data:
            self.unconfirmed += 1
            self.trouble("refused")
        else:
            self._down_s = DOWN_S
            return self._now_ns() - published_ns
        return None

    def lost(self) -> None:
        """The broker is away, and its streams in memory may be gone."""
        self._maker.there = False
        self.trouble("lost")

    def trouble(self, reason: Trouble) -> None:
        """Leave the queue alone for a while."""
        self.unconfirmed += len(self._unconfirmed)
        self._unconfirmed.clear()
        if self._now_ns() >= self._down_until_ns:
            log.warning("the queue has trouble (%s): work goes directly for %g s", reason, self._down_s)
            self.troubles += 1
            self._down_until_ns = self._now_ns() + int(self._down_s * 1e9)
            self._down_s = min(2 * self._down_s, self._most_down_s)
        self.on_trouble(reason)

    def tick(self) -> None:
        """Find out whether the oldest item without a confirmation is too old; call this often."""
        oldest_ns = next(iter(self._unconfirmed.values()), 0)
        if oldest_ns and self._now_ns() - oldest_ns > self._confirm_ns:
            self.trouble("unconfirmed")


class _Advisory(msgspec.Struct, frozen=True):
    """The broker has delivered a message as often as its consumer may."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int = 0


class _Stored(msgspec.Struct, frozen=True):
    """The answer of a stream to a message."""

    error: dict[str, Any] | None = None
    duplicate: bool = False


_advisory, _stored = msgspec.json.Decoder(_Advisory), msgspec.json.Decoder(_Stored)


class GivenUp:
    """Letters of one gateway about items that queues have given up."""

    def __init__(self, broker: Broker, names: Names, replies: str) -> None:
        """The broker answers to letters below `replies`, which ends with a dot."""
        self._broker, self._names, self._replies = broker, names, replies
        self._seldom = Seldom(log)
        self.counts: Counter[tuple[str, str]] = Counter()
        """By what, and stream and consumer: letters that were the first, and those that could not be written."""
        broker.listen(ADVISORY, self._heard)

    def _count(self, what: str, queue: str) -> None:
        if (what, queue) in self.counts or len(self.counts) < MOST_QUEUES:
            self.counts[what, queue] += 1

    def _heard(self, message: Msg) -> None:
        try:
            told = _advisory.decode(message.data)
        except (msgspec.DecodeError, ValueError):
            return
        if not self._names.is_queue(told.stream, told.consumer):
            # Another cluster has its queues at these brokers, too.
            return
        queue = f"{told.stream} {told.consumer}"
        log.warning("queue %s gave up item %d after %d deliveries", queue, told.stream_seq, told.deliveries)
        error = f"{told.stream} {told.stream_seq}: {told.deliveries} deliveries to {told.consumer}"
        letter = msgspec.json.encode(Letter("deliveries", "", time.time(), 0, error=error))
        subject, reply = self._names.dead(UNKNOWN), f"{self._replies}{told.stream}.{told.consumer}"
        headers = {"Nats-Msg-Id": f"{told.stream}.{told.consumer}.{told.stream_seq}"}
        try:
            self._broker.send(subject, letter, reply, headers)
        except QueueUnavailable:
            self._count("dead_failures", queue)

    def answered(self, place: str, message: Msg) -> None:
        """The broker has answered to a letter about the queue at `place`, STREAM.CONSUMER."""
        stream, _, consumer = place.partition(".")
        if not self._names.is_queue(stream, consumer):
            return
        try:
            stored = _stored.decode(message.data) if message.data else _Stored({})
        except (msgspec.DecodeError, ValueError):
            stored = _Stored({})
        if stored.error is not None:
            self._count("dead_failures", f"{stream} {consumer}")
            self._seldom.warning("a dead letter could not be written", f"{stored.error}"[:200])
        elif not stored.duplicate:
            self._count("dead", f"{stream} {consumer}")


class _Open(NamedTuple):
    """The lane to a pool whose boxes have this bundle, and the task that makes its queue."""

    bundle: str
    lane: Lane
    maker: Maker
    making: asyncio.Task[None]


class Queues:
    """The queues of all pools that one gateway uses, by pool."""

    def __init__(self, broker: Broker, names: Names, cluster: Cluster) -> None:
        self._broker, self._names, self._cluster = broker, names, cluster
        self._open: dict[str, _Open] = {}
        self._former = 0
        self.on_trouble: Callable[[Trouble], None] = lambda reason: None
        """Told of the trouble of any lane; see `Lane`."""
        if cluster.lane != "direct":
            broker.on_up.append(self._again)
            broker.on_down.append(self._lost)

    def lane(self, pool: str, bundle: str) -> Lane:
        """The lane to a pool whose boxes all have one bundle; the first call begins to make the queue."""
        known = self._open.get(pool)
        if known is not None and known.bundle == bundle:
            return known.lane
        self._end(pool)
        mine = msgspec.structs.replace(self._cluster, pool=pool, bundle=bundle)
        maker = Maker(self._broker, self._names, mine)
        lane = Lane(mine, maker)
        lane.on_trouble = self.on_trouble
        task = asyncio.get_running_loop().create_task(lasting(maker.run))
        self._open[pool] = _Open(bundle, lane, maker, task)
        if mine.lane != "direct":
            maker.again()
        return lane

    def confirmed(self, pool: str, item: str, message: Msg) -> int | None:
        """The broker has answered to an item of a pool; see `Lane.confirmed`."""
        return self._open[pool].lane.confirmed(item, message) if pool in self._open else None

    @property
    def unconfirmed(self) -> int:
        """Items of all pools that no broker has confirmed."""
        return self._former + sum(each.lane.unconfirmed for each in self._open.values())

    def tick(self) -> None:
        """Look for items without a confirmation; call this often."""
        for each in self._open.values():
            each.lane.tick()

    def _again(self) -> None:
        for each in self._open.values():
            each.maker.again()

    def _lost(self) -> None:
        for each in self._open.values():
            each.lane.lost()

    def _end(self, pool: str) -> None:
        known = self._open.pop(pool, None)
        if known is not None:
            self._former += known.lane.unconfirmed
            known.making.cancel()

    async def drop(self, pool: str) -> None:
        """A pool is gone: forget its lane, and remove its stream if the broker can."""
        self._end(pool)
        try:
            manager = self._broker.client.jetstream(timeout=TIMEOUT_S)
            await manager.delete_stream(self._names.stream(pool))
        except NotFoundError:
            return
        except LOST as error:
            log.warning("stream %s of a pool that is gone stays: %r", self._names.stream(pool), error)

    def close(self) -> None:
        """Make nothing any more."""
        for pool in list(self._open):
            self._end(pool)
