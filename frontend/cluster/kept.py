"""Buckets at the brokers with many values, which several processes write and follow.

1. `Kept` reads and writes single values. A write names the revision that was read, so that nobody's change is lost.
2. `Followed` keeps a copy of all values: the whole bucket is read after every connect and each minute, single values
   after every write of anybody.
3. A process hears of a write before the brokers keep the written value, and also of a write that they refuse. So who
   hears of a write looks at once and twice later (`look_again`).
4. A bucket that was made anew under its name counts revisions from 1 again. The time at which the brokers made a bucket
   tells one bucket from another: revisions of an earlier bucket count for nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from nats.js.errors import APIError, BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue

from frontend.cluster.broker import HEAD_NBYTES, Broker, readable
from frontend.cluster.bucket import LOST, TIMEOUT_S, Value, create, reading, values_of
from ipc.errors import StateFull
from ipc.logs import Seldom

log = logging.getLogger(__name__)

LOOK_AGAIN_S = (0.2, 2.0)
OTHER_REVISION = (10071, 10164)
"""Codes of brokers for a change of a key that has another revision by now."""
T = TypeVar("T")


def look_again(look: Callable[[], None]) -> None:
    """Call `look` now, and after each time of `LOOK_AGAIN_S`."""
    look()
    for later_s in LOOK_AGAIN_S:
        asyncio.get_running_loop().call_later(later_s, look)


async def _made_at(bucket: KeyValue) -> datetime.datetime | None:
    """When the brokers made a bucket. Raises one of `LOST`."""
    return (await bucket.status()).stream_info.created


class Kept:
    """The values of one bucket. Every call raises one of `LOST` where no broker keeps the bucket."""

    def __init__(self, broker: Broker, bucket: str, ttl_s: float | None = None) -> None:
        """Brokers forget a value `ttl_s` seconds after its last write."""
        self._broker, self.name, self._ttl_s = broker, bucket, ttl_s

    async def found(self) -> KeyValue | None:
        """The bucket, where there is one."""
        try:
            return await self._broker.client.jetstream(timeout=TIMEOUT_S).key_value(self.name)
        except BucketNotFoundError:
            return None

    async def values(self) -> dict[str, Value]:
        """See `frontend.cluster.bucket.values_of`."""
        return await values_of(self._broker, self.name)

    async def read(self, key: str) -> tuple[bytes | None, int]:
        """(value, revision) of a key; (None, revision) for one without a value, revision 0 for one that never was."""
        bucket = await self.found()
        if bucket is None:
            return None, 0
        try:
            entry = await bucket.get(key)
        except KeyNotFoundError as error:
            # The mark of a removed key has a revision, too, which the next write has to name.
            return None, (error.entry.revision or 0) if error.entry is not None else 0
        return entry.value or b"", entry.revision or 0

    async def write(self, key: str, data: bytes, last: int) -> int:
        """Write a value over the revision `last`; returns its own revision.

        Raises `KeyWrongLastSequenceError` where the key has another revision by now, and `StateFull` for a value that
        is larger than a message may be.
        """
        most = self._broker.client.max_payload - HEAD_NBYTES
        if len(data) > most:
            raise StateFull(
                f"a value of the bucket {self.name} would have {len(data)} bytes; the brokers take {most}"
            )
        bucket = await self.found() or await create(self._broker, self.name, self._ttl_s)
        return await bucket.update(key, data, last=last or None)

    async def remove(self, key: str, revision: int) -> None:
        """Remove a value, unless somebody has written another one over this revision."""
        bucket = await self.found()
        if bucket is not None:
            try:
                await bucket.delete(key, last=revision)
            except APIError as error:
                if error.err_code not in OTHER_REVISION:
                    raise


class Followed(Generic[T]):
    """A copy of all values of a bucket by key, with their revisions. Values that cannot be read are passed over."""

    def __init__(self, broker: Broker, kept: Kept, decode: Callable[[bytes], T]) -> None:
        """`decode` raises `ProtocolError` for what is no value."""
        self._kept, self._decode = kept, decode
        self.values: dict[str, T] = {}
        self.revisions: dict[str, int] = {}
        self.is_read = False
        """Whether the brokers have told once what the bucket has, also that there is none."""
        self.is_there = False
        """Whether there was a bucket when it was last read whole."""
        self.failures = self.changes = self.unreadable = 0
        """How often the bucket could not be read, and how many values came anew or could not be read."""
        self._passed: dict[str, int] = {}
        """Revisions of values that could not be read."""
        self._read_of: datetime.datetime | None = None
        """When the brokers made the bucket that was last read whole."""
        self.on_change: Callable[[], None] = lambda: None
        """Called once after each reading in which values came, changed or went, and after each `take`."""
        self._heard: set[str] = set()
        self._all, self._wanted, self._seldom = True, asyncio.Event(), Seldom(log)
        broker.listen(f"$KV.{kept.name}.>", self._hear)
        broker.on_up.append(self._begin)

    @property
    def revision(self) -> int:
        """The newest revision of all values; 0 without any."""
        return max(self.revisions.values(), default=0)

    def _begin(self) -> None:
        self._all = True
        self._wanted.set()

    def _hear(self, message: Msg) -> None:
        key = message.subject.removeprefix(f"$KV.{self._kept.name}.")

        def look() -> None:
            self._heard.add(key)
            self._wanted.set()

        look_again(look)

    def take(self, key: str, data: bytes, revision: int) -> None:
        """A value is known to be kept with this revision, as it was written here."""
        if self._taken(key, data, revision):
            self.on_change()

    def _taken(self, key: str, data: bytes, revision: int) -> bool:
        if revision <= self.revisions.get(key, 0) or revision == self._passed.get(key):
            return False
        value = readable(self._decode, data, self._seldom, f"a value of {self._kept.name} was passed over")
        if value is None:
            self.unreadable += 1
            self._passed[key] = revision
            return False
        self.changes += 1
        self.values[key], self.revisions[key] = value, revision
        return True

    def _dropped(self, keys: set[str]) -> bool:
        gone = keys & self.values.keys()
        for key in gone:
            del self.values[key], self.revisions[key]
        return bool(gone)

    async def run(self, broker: Broker) -> None:
        """Follow the bucket for ever."""
        await reading(broker, self._wanted, self._look)

    async def _look(self) -> bool:
        failed = f"the bucket {self._kept.name} cannot be read"
        heard, self._heard = self._heard, set()
        whole, self._all = self._all or not heard, False
        try:
            bucket = await self._kept.found()
            self.is_there = bucket is not None
            if bucket is None:
                # What was known stays: brokers that lost their disks do not undo what was configured.
                self._told()
            elif whole or await _made_at(bucket) != self._read_of:
                await self._read_all(bucket)
            else:
                await self._read(heard)
        except LOST as error:
            self._all = True
            self.failures += 1
            self._seldom.warning(failed, repr(error))
            return False
        self._seldom.over(failed)
        return True

    async def _read(self, keys: set[str]) -> None:
        is_other = False
        try:
            for key in keys:
                data, revision = await self._kept.read(key)
                if data is not None:
                    is_other |= self._taken(key, data, revision)
                elif revision:
                    is_other |= self._dropped({key})
        finally:
            if is_other:
                self.on_change()

    async def _read_all(self, bucket: KeyValue) -> None:
        made_at = await _made_at(bucket)
        before = dict(self.revisions)
        values = await self._kept.values()
        if self._read_of not in (None, made_at):
            self.revisions, self._passed = dict.fromkeys(self.revisions, 0), {}
            before = dict(self.revisions)
        self._read_of = made_at
        self._passed = {key: revision for key, revision in self._passed.items() if key in values}
        came = [self._taken(key, value.data, value.revision) for key, value in values.items()]
        # A value that was written here during the reading may be newer than what was read.
        gone = {key for key in before.keys() - values.keys() if self.revisions.get(key) == before[key]}
        self._told(self._dropped(gone) or any(came))

    def _told(self, is_other: bool = False) -> None:
        if is_other or not self.is_read:
            self.is_read = True
            self.on_change()
