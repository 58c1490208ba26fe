"""A value of a bucket at the brokers that several processes change and follow.

1. `run` reads the value after every connect, after every write of anybody, and each minute, since a word about a
   write may have been lost. A value that cannot be read is passed over, and the value before stays.
2. `change` reads, changes and writes; the write names the revision that was read. If somebody else was quicker, the
   change is made anew from the newer value. Nothing is merged. A value is one message, whose size the broker limits.
3. Without a broker the value stays as it was last read, and changes are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from frontend.cluster.broker import HEAD_NBYTES, NO_BROKER, Broker
from frontend.cluster.bucket import LOST, TIMEOUT_S, reading
from ipc.errors import ProtocolError, QueueUnavailable, StateFull
from ipc.logs import Seldom

log = logging.getLogger(__name__)

MOST_TRIES = 50
T = TypeVar("T")


class Shared(Generic[T]):
    """One value, by its bucket and key; `empty` stands for a value that nobody has written."""

    def __init__(
        self,
        broker: Broker,
        bucket: str,
        key: str,
        read: Callable[[bytes], T],
        write: Callable[[T], bytes],
        empty: T,
    ) -> None:
        """`read` raises `ProtocolError` for what is no value."""
        self._broker, self._bucket_name, self._key = broker, bucket, key
        self._decode, self._encode, self._empty = read, write, empty
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        self._one_at_a_time = asyncio.Lock()
        self.value, self.revision = empty, 0
        """As last read. The revision is 0 until the value was found in the bucket."""
        self.is_read = False
        """Whether `value` is what the brokers kept once, not `empty` for want of an answer."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after `value` was replaced by another one."""
        broker.listen(f"$KV.{bucket}.{key}", lambda _: self._wanted.set())
        broker.on_up.append(self._wanted.set)

    async def run(self) -> None:
        """Follow the value for ever."""
        await reading(self._broker, self._wanted, self._follow)

    async def _follow(self) -> bool:
        failed = f"bucket {self._bucket_name} cannot be read"
        try:
            async with self._one_at_a_time:
                await self._read(await self._found())
        except LOST as error:
            self._seldom.warning(failed, repr(error))
            return False
        except ProtocolError as error:
            self._seldom.warning(failed, error.message)
            return True
        self._seldom.over(failed)
        return True

    async def _found(self) -> KeyValue | None:
        try:
            return await self._broker.client.jetstream(timeout=TIMEOUT_S).key_value(self._bucket_name)
        except BucketNotFoundError:
            return None

    async def _read(self, bucket: KeyValue | None) -> tuple[T, int]:
        """(value, revision) in the bucket. Raises `ProtocolError`, and one of `LOST`."""
        value, revision = self._empty, 0
        if bucket is not None:
            try:
                entry = await bucket.get(self._key)
                value, revision = self._decode(entry.value or b""), entry.revision or 0
            except KeyNotFoundError as error:
                # The mark of a removed key has a revision, too, which the next write has to name.
                revision = error.entry.revision if error.entry is not None else 0
        self._take(value, revision)
        return value, revision

    def _take(self, value: T, revision: int) -> None:
        before, self.value, self.revision, self.is_read = self.value, value, revision, True
        if value != before:
            self.on_change()

    async def change(self, change: Callable[[T], T]) -> T:
        """Write what `change` makes of the present value; returns the written value.

        `change` may be called several times, and what it raises ends the change. A value that stays equal is not
        written. Raises `QueueUnavailable` without a broker that keeps the bucket, and `StateFull` for a value that is
        larger than a message may be.
        """
        if not self._broker.up:
            raise QueueUnavailable(NO_BROKER, retry_after_s=1)
        try:
            async with self._one_at_a_time:
                return await self._changed(change)
        except LOST as error:
            raise QueueUnavailable(
                f"the brokers do not keep the bucket {self._bucket_name} now: {error}", retry_after_s=1
            ) from error

    async def _changed(self, change: Callable[[T], T]) -> T:
        bucket = await self._found()
        for _ in range(MOST_TRIES):
            try:
                value, revision = await self._read(bucket)
            except ProtocolError as error:
                raise QueueUnavailable(error.message, retry_after_s=1) from error
            changed = change(value)
            if changed == value:
                return value
            if bucket is None:
                bucket = await self._made()
            try:
                written = await bucket.update(self._key, self._data(changed), last=revision or None)
            except KeyWrongLastSequenceError:
                continue
            self._take(changed, written)
            return changed
        raise QueueUnavailable(
            f"the bucket {self._bucket_name} is changed by too many others", retry_after_s=1
        )

    def _data(self, value: T) -> bytes:
        data, most = self._encode(value), self._broker.client.max_payload - HEAD_NBYTES
        if len(data) > most:
            raise StateFull(
                f"the bucket {self._bucket_name} would have {len(data)} bytes; the brokers take {most}"
            )
        return data

    async def _made(self) -> KeyValue:
        wanted = KeyValueConfig(
            bucket=self._bucket_name, history=1, storage=StorageType.FILE, replicas=self._broker.replicas
        )
        return await self._broker.client.jetstream(timeout=TIMEOUT_S).create_key_value(wanted)
