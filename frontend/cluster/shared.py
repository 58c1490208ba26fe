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

from nats.js.errors import KeyWrongLastSequenceError

from frontend.cluster.broker import NO_BROKER, Broker
from frontend.cluster.bucket import LOST, reading
from frontend.cluster.kept import Kept, look_again
from ipc.errors import ProtocolError, QueueUnavailable
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
        self._kept = Kept(broker, bucket)
        self._decode, self._encode, self._empty = read, write, empty
        self._wanted, self._seldom = asyncio.Event(), Seldom(log)
        self._one_at_a_time = asyncio.Lock()
        self.value, self.revision = empty, 0
        """As last read. The revision is 0 until the value was found in the bucket."""
        self.is_read = False
        """Whether `value` is what the brokers kept once, not `empty` for want of an answer."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after `value` was replaced by another one."""
        broker.listen(f"$KV.{bucket}.{key}", lambda _: look_again(self._wanted.set))
        broker.on_up.append(self._wanted.set)

    async def run(self) -> None:
        """Follow the value for ever."""
        await reading(self._broker, self._wanted, self._follow)

    async def _follow(self) -> bool:
        failed = f"bucket {self._bucket_name} cannot be read"
        try:
            async with self._one_at_a_time:
                await self._read()
        except LOST as error:
            self._seldom.warning(failed, repr(error))
            return False
        except ProtocolError as error:
            self._seldom.warning(failed, error.message)
            return True
        self._seldom.over(failed)
        return True

    async def _read(self) -> tuple[T, int]:
        """(value, revision) in the bucket. Raises `ProtocolError`, and one of `LOST`."""
        data, revision = await self._kept.read(self._key)
        value = self._empty if data is None else self._decode(data)
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
        for _ in range(MOST_TRIES):
            try:
                value, revision = await self._read()
            except ProtocolError as error:
                raise QueueUnavailable(error.message, retry_after_s=1) from error
            changed = change(value)
            if changed == value:
                return value
            try:
                written = await self._kept.write(self._key, self._encode(changed), revision)
            except KeyWrongLastSequenceError:
                continue
            self._take(changed, written)
            return changed
        raise QueueUnavailable(
            f"the bucket {self._bucket_name} is changed by too many others", retry_after_s=1
        )
