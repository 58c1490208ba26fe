"""The bucket of the models of all boxes: how a bridge writes its rows, and how a gateway follows all of them.

1. Every write is a message on a subject of its own, which a gateway hears at once. So rows arrive within a
   millisecond, and also while no broker keeps the bucket.
2. After every connect, and each `READ_EVERY_S`, a gateway reads the whole bucket: messages about rows, also about
   removed ones, may have been lost meanwhile.
3. A bridge whose bucket is gone makes the bucket again and writes all rows.
4. The broker forgets a row that nobody has written for `ROWS_S`, so rows of a box that is gone for ever go, too.
5. A large row is cut into parts (`ipc.wire.cluster_parts`). A model whose row is over `MOST_MESSAGE_NBYTES` is not told
   to gateways, which the log and a metric of the box say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, Error
from nats.js.api import DeliverPolicy, KeyValueConfig, StorageType
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from frontend.cluster.broker import Broker, readable
from ipc.logs import Seldom
from ipc.wire import cluster_parts as parts
from ipc.wire.cluster import MOST_MESSAGE_NBYTES, encode
from ipc.wire.cluster_names import Names, row_key
from ipc.wire.cluster_rows import BoxRow, ModelRow, Row, read_row
from ipc.wire.messages import ModelStatus

log = logging.getLogger(__name__)

READ_EVERY_S = 60.0
ROWS_S = 600.0
TRY_AGAIN_S = 2.0
TIMEOUT_S = 2.0
VALUE_S = 20.0
"""Longest time between two values while a whole bucket is read."""
PAGE = 100_000
"""Subjects that brokers tell at a time."""
_UNREADABLE, _UNWRITABLE = "the bucket of models cannot be read", "the bucket of models cannot be written"
GONE = ("DEL", "PURGE")
"""Operations of the mark of a removed value."""
LOST = (Error, APIError, TimeoutError, OSError)
"""What the client library raises for a broker that is away, has no JetStream or no room."""


def subjects(names: Names) -> str:
    """Subjects of all writes."""
    return f"$KV.{names.models}.>"


async def reading(broker: Broker, wanted: asyncio.Event, read: Callable[[], Awaitable[bool]]) -> None:
    """Call `read` for ever while there is a broker: when it is `wanted`, and each `READ_EVERY_S`.

    `read` returns whether it succeeded; if not, it is called again after `TRY_AGAIN_S`.
    """
    wait_s = READ_EVERY_S
    while True:
        try:
            async with asyncio.timeout(wait_s):
                await wanted.wait()
        except TimeoutError:
            pass
        wanted.clear()
        if broker.up:
            wait_s = READ_EVERY_S if await read() else TRY_AGAIN_S


async def making(
    broker: Broker,
    wanted: asyncio.Event,
    make: Callable[[], Awaitable[None]],
    seldom: Seldom,
    failed: str,
    again_s: float,
) -> None:
    """Call `make` for ever while there is a broker: whenever it is `wanted`, and `again_s` after one of `LOST`.

    `failed` is what `seldom` warns of then.
    """
    while True:
        await wanted.wait()
        wanted.clear()
        if not broker.up:
            continue
        try:
            await make()
            seldom.over(failed)
        except LOST as error:
            seldom.warning(failed, repr(error))
            await asyncio.sleep(again_s)
            wanted.set()


class Value(NamedTuple):
    """A value of a bucket, or the mark of a removed value."""

    key: str
    data: bytes
    revision: int
    operation: str | None
    """One of `GONE` for a mark."""


async def all_values(broker: Broker, bucket: str) -> AsyncGenerator[Value]:
    """The last write of each key of a bucket, in the order of the writes; a key that is written meanwhile comes again.

    Raises `NotFoundError` for a bucket that is not there, and one of `LOST`, also when the next value does not come
    within `VALUE_S`.

    NOTE: the client library's watcher takes a bucket for empty where the brokers have sent all values and none has come
    yet. Its consumers stay for five minutes, and a stream has room for so many. With a callback the library lets the
    brokers send the whole bucket, however slowly the values are read.
    """
    stream, prefix = f"KV_{bucket}", f"$KV.{bucket}."
    context = broker.client.jetstream(timeout=TIMEOUT_S)
    if not (await context.stream_info(stream)).state.messages:
        return
    subscription = await context.subscribe(
        f"{prefix}>",
        stream=stream,
        ordered_consumer=True,
        deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
        inactive_threshold=VALUE_S,
        # The library drops without a word what is above its limits.
        pending_msgs_limit=0,
        pending_bytes_limit=0,
    )
    try:
        left = 1
        while left:
            async with asyncio.timeout(VALUE_S):
                message = await anext(subscription.messages, None)
            if message is None:
                raise ConnectionClosedError
            await _confirm(broker, subscription)
            metadata = message.metadata
            left = metadata.num_pending
            operation = (message.headers or {}).get("KV-Operation")
            key = message.subject.removeprefix(prefix)
            yield Value(key, message.data, metadata.sequence.stream, operation)
    finally:
        with contextlib.suppress(*LOST):
            await subscription.unsubscribe()


async def _confirm(broker: Broker, subscription: JetStreamContext.PushSubscription) -> None:
    """Tell a broker which waits for the reader that the values before are read.

    PERF: the library looks four times a second, and a broker that waits sends nothing meanwhile.
    """
    flow = subscription._sub._jsi
    if flow is None or not flow._fcr:
        return
    if flow._fciseq - subscription._pending_queue.qsize() >= flow._fcd:
        subject, flow._fcr, flow._fcd = flow._fcr, None, 0
        await broker.client.publish(subject)


async def values_of(broker: Broker, bucket: str) -> dict[str, Value]:
    """All values of a bucket by key, without removed ones. Raises as `all_values`."""
    values = dict[str, Value]()
    async for value in all_values(broker, bucket):
        values[value.key] = value
    return {key: value for key, value in values.items() if value.operation not in GONE}


def _turn(key: str) -> tuple[bool, bool]:
    """Parts come before what they are parts of, and the row of the box behind the models that it names."""
    box, _, _ = key.partition(parts.PART)
    return "." not in box, not parts.is_part(key)


async def create(broker: Broker, name: str, ttl_s: float | None) -> KeyValue:
    """Make a bucket whose values the brokers forget `ttl_s` seconds after the last write, or never.

    Raises one of `LOST`.
    """
    wanted = KeyValueConfig(
        bucket=name, history=1, ttl=ttl_s, storage=StorageType.FILE, replicas=broker.replicas
    )
    return await broker.client.jetstream(timeout=TIMEOUT_S).create_key_value(wanted)


async def subjects_of(broker: Broker, bucket: str, wanted: str) -> tuple[datetime | None, set[str] | None]:
    """When a bucket was made, and subjects of its values; None for subjects that changed while they were read.

    Raises `NotFoundError` for a bucket that is not there, and one of `LOST`.
    """
    info = await broker.client.jetstream(timeout=TIMEOUT_S).stream_info(
        f"KV_{bucket}", subjects_filter=wanted
    )
    page = info.state.subjects or {}
    found, state = set(page), (info.state.last_seq, info.state.messages)
    while len(page) >= PAGE:
        # NOTE: the client library asks for no further page.
        asked = json.dumps({"subjects_filter": wanted, "offset": len(found)}).encode()
        reply = await broker.client.request(f"$JS.API.STREAM.INFO.KV_{bucket}", asked, timeout=TIMEOUT_S)
        told = json.loads(reply.data).get("state", {})
        if (told.get("last_seq"), told.get("messages")) != state:
            return info.created, None
        page = told.get("subjects") or {}
        found.update(page)
    return info.created, found


class Rows:
    """What the bucket says of one box."""

    def __init__(self) -> None:
        self.box: BoxRow | None = None
        self.models: dict[str, ModelRow] = {}
        """By key."""
        self._states: dict[str, dict[str, ModelStatus]] | None = None

    def put(self, key: str, row: Row | None) -> None:
        """Take in a row that was written, or None for a row that was removed."""
        self._states = None
        if isinstance(row, BoxRow):
            self.box = row
        elif row is not None:
            self.models[key] = row
        elif "." in key:
            self.models.pop(key, None)
        else:
            self.box = None

    def of(self, model: str) -> ModelRow | None:
        """The row of an entry by its id, if the present life of the box has put it."""
        if self.box is None:
            return None
        row = self.models.get(row_key(self.box.box, model))
        return row if row is not None and row.life == self.box.life else None

    @property
    def states(self) -> dict[str, dict[str, ModelStatus]]:
        """States of each model, by its id and the names of the workers that are up."""
        # PERF: every request asks; rows change seldom.
        if self._states is None:
            self._states = {}
            workers = self.box.workers if self.box is not None else []
            up = {worker.name for worker in workers if worker.state == "ready"}
            for entry in self.box.models if self.box is not None else ():
                row = self.of(entry)
                for worker in up & row.states.keys() if row is not None else ():
                    for status in row.states[worker]:  # type: ignore[union-attr]
                        self._states.setdefault(status.name, {})[worker] = status
        return self._states


class Follower:
    """Tells a gateway of all rows."""

    def __init__(
        self,
        broker: Broker,
        names: Names,
        take: Callable[[str, Row | None], None],
        read: Callable[[dict[str, Row]], None],
    ) -> None:
        """`take` gets one row, None for a row that is gone; `read` gets the whole bucket."""
        self._broker, self._names, self._take, self._read = broker, names, take, read
        self._live: dict[str, Row | None] = {}
        self._rows: dict[str, Row] = {}
        """What is known. While a box writes the parts of a row, the row of before holds."""
        self._parts: dict[str, bytes] = {}
        self._live_parts: dict[str, bytes | None] = {}
        """Parts of rows; those that came or went during a reading, as `_live` has rows."""
        self._wanted = asyncio.Event()
        self._seldom = Seldom(log)
        broker.listen(subjects(names), self._heard)
        broker.on_up.append(self._wanted.set)

    def _heard(self, message: Msg) -> None:
        key = message.subject.removeprefix(subjects(self._names)[:-1])
        operation = (message.headers or {}).get("KV-Operation")
        if parts.is_part(key):
            data = self._live_parts[key] = None if operation in GONE else message.data
            self._parts.pop(key, None)
            if data is not None:
                self._parts[key] = data
            return
        row = None if operation in GONE else self._readable(key, message.data, self._parts)
        if row is not None or operation in GONE:
            self._live[key] = row
            self._rows.pop(key, None)
            if row is not None:
                self._rows[key] = row
            self._take(key, row)

    def _readable(self, key: str, data: bytes, known: Mapping[str, bytes]) -> Row | None:
        def read(head: bytes) -> Row:
            return read_row(parts.joined(key, head, known))

        return readable(read, data, self._seldom, "a row of the bucket of models was passed over")

    async def run(self) -> None:
        """Read the bucket for ever."""
        await reading(self._broker, self._wanted, self._read_all)

    async def _read_all(self) -> bool:
        """Read the whole bucket once; returns whether that succeeded. A missing bucket leaves the known rows alone."""
        self._live, self._live_parts, rows = {}, {}, dict[str, Row]()
        try:
            values = await values_of(self._broker, self._names.models)
            found = {key: value.data for key, value in values.items() if parts.is_part(key)}
            for key in values.keys() - found.keys():
                row = self._readable(key, values[key].data, found) or self._rows.get(key)
                if row is not None:
                    rows[key] = row
        except NotFoundError:
            self._seldom.over(_UNREADABLE)
            return True
        except LOST as error:
            self._seldom.warning(_UNREADABLE, repr(error))
            return False
        self._seldom.over(_UNREADABLE)
        # Rows that were heard during the reading are newer than the rows that were read.
        for key, row in self._live.items():
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        newer = {key: data for key, data in self._live_parts.items() if data is not None}
        self._parts, self._rows = {**found, **newer}, rows
        self._read(rows)
        return True


class Writer:
    """Writes the rows of one box."""

    def __init__(self, broker: Broker, names: Names) -> None:
        self._broker, self._names = broker, names
        self._bucket: KeyValue | None = None
        self._written: dict[str, bytes] = {}
        self._revision = 0
        self._seldom = Seldom(log)
        self._untold: set[str] = set()
        self.on_untold: Callable[[int], None] = lambda count: None
        """Told how many models have rows that are too large, whenever that changes."""

    async def write(self, rows: dict[str, Row], *, again: str = "") -> bool:
        """Have the bucket hold `rows` by key and no other rows of this box; returns whether the bucket does.

        Rows that have not changed are not written, except the row of the key `again`. Without a bucket the rows only
        reach gateways that listen now.
        """
        most = self._broker.inline_nbytes
        data: dict[str, bytes] = {}
        for key, row in self._told(rows).items():
            data.update(parts.cut(key, row, most))
        try:
            if self._bucket is None:
                self._bucket = await self._made()
                self._written = {}
            changed = [key for key, value in data.items() if key == again or self._written.get(key) != value]
            for key in sorted(changed, key=_turn):
                await self._put(self._bucket, key, data[key])
            for key in self._written.keys() - data.keys():
                await self._bucket.purge(key)
                del self._written[key]
            self._seldom.over(_UNWRITABLE)
            return True
        except LOST as error:
            self._seldom.warning(_UNWRITABLE, repr(error))
            self._bucket = None
            for key in sorted(data, key=_turn):
                self._broker.say(subjects(self._names)[:-1] + key, data[key])
            return False

    def _told(self, rows: dict[str, Row]) -> dict[str, bytes]:
        """The rows as they are written, without models whose rows are too large."""
        data = {key: encode(row) for key, row in rows.items()}
        untold = {key for key, value in data.items() if len(value) > MOST_MESSAGE_NBYTES}
        for key in untold - self._untold:
            log.error(
                "a model of this box is not told to gateways: its entry has %d bytes, %d may be (row %s)",
                len(data[key]),
                MOST_MESSAGE_NBYTES,
                key,
            )
        if untold != self._untold:
            self._untold = untold
            self.on_untold(len(untold))
        for key, row in rows.items() if untold else ():
            if isinstance(row, BoxRow):
                models = [model for model in row.models if row_key(row.box, model) not in untold]
                data[key] = encode(msgspec.structs.replace(row, models=models))
        return {key: value for key, value in data.items() if key not in untold}

    def forget(self) -> None:
        """Write all rows with the next `write`."""
        self._written = dict.fromkeys(self._written, b"")

    async def _put(self, bucket: KeyValue, key: str, value: bytes) -> None:
        revision = await bucket.put(key, value)
        if revision <= self._revision:
            # The bucket was made anew under its name, without the rows that were written before.
            self._written, self._revision = {}, revision
            raise TimeoutError("the bucket has been made anew")
        self._revision = revision
        self._written[key] = value

    async def _made(self) -> KeyValue:
        stream = self._broker.client.jetstream(timeout=TIMEOUT_S)
        self._revision = 0
        try:
            bucket = await stream.key_value(self._names.models)
            config = (await bucket.status()).stream_info.config
            if config.max_age != ROWS_S:
                window_s = min(config.duplicate_window or ROWS_S, ROWS_S)
                await stream.update_stream(config.evolve(max_age=ROWS_S, duplicate_window=window_s))
            return bucket
        except BucketNotFoundError:
            pass
        return await create(self._broker, self._names.models, ROWS_S)
