"""The tables of one store, which all gateways of a cluster share: a bucket at the brokers, and a copy in SQLite.

1. A row is a value of the bucket under a digest of its identity (`ipc.wire.kept_rows`). Each gateway process keeps a
   copy of all rows in a file of its own, so that the statements of the store run here as on one host.
2. A read first asks the brokers for the number of the last write (`_fresh`), and takes in what the copy lacks. So a
   read sees every write that was acknowledged before the read began, whichever gateway wrote.
3. A write runs on the copy and is undone; its changed rows go to the brokers. The first one names the last write that
   the copy has: if anybody was quicker, nothing was written, and the write runs again on newer rows. The other rows
   name the revisions that they replace, and rows that are gone come last.
   Gateways hear each attempt of one another, also those that the brokers refuse, with the number of attempts before.
   Whoever hears of more attempts than its own write has had gives way, so that no gateway always comes second.
4. Without a broker reads go on from the copy, but what the copy lacks may be at the brokers: then, and for writes, the
   store is away. A bucket that was made anew under its name takes the place of all rows.
5. Marks of removed rows stay for `MARKS_S`. A copy that was not brought up to date for half of that begins anew.
6. Values that cannot be read, that are larger than a row may be, or that do not belong under their key, are told and
   passed over.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from nats.aio.msg import Msg
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from frontend.cluster.broker import HEAD_NBYTES, NO_BROKER, Broker, lasting
from frontend.cluster.bucket import GONE, LOST, TIMEOUT_S, Value, all_values, create, subjects_of
from frontend.cluster.copies import MARKS_S, Change, RowsCopy, Written
from frontend.cluster.kept import OTHER_REVISION
from frontend.cluster.parts import Parts, unreadable
from frontend.state.errors import is_full
from frontend.state.places import Tables
from ipc.errors import InvalidInput, ProtocolError
from ipc.store.store import How, StoreAway, StoreUnreadable
from ipc.wire.cluster import VERSION, encode
from ipc.wire.kept_rows import KeptRow, read_row, read_values, values_of

log = logging.getLogger(__name__)

R = TypeVar("R")
INLINE_NBYTES = 256 << 10
"""Bytes of a row that is one message."""
FEW = 32
"""So many new writes are asked for one by one; of more the whole bucket is read."""
BATCH, BATCH_NBYTES = 256, 8 << 20
"""Rows that the copy takes in together."""
MOST_TRIES = 50
LOOK_WHOLE_AFTER = 3
"""Attempts of a write that failed, after which the copy is compared with the whole bucket."""
PAUSE_S, MOST_PAUSE_S = 0.005, 0.02
"""Longest pause between two attempts, for each attempt so far; and of many attempts."""
GIVE_WAY_S = 0.05
"""How long a write gives way to an attempt of another gateway: for its next pause, and its look at the newest rows."""
ATTEMPT = "Penstock-Attempt"
"""Header of the first row of a write: who writes, and the number of attempts before."""
_NUMBER = re.compile(r"[0-9]{1,2}")
LONG_S, AWAY_S = 0.5, 1.0
"""Brokers that were waited for in vain for so long are away for so long: whoever asks meanwhile waits no more."""


class SharedRows:
    """See the module; the interface is `frontend.state.places.Rows`."""

    def __init__(
        self,
        broker: Broker,
        bucket: str,
        copy: Path,
        schema: str,
        tables: Tables,
        parts: Parts,
        most_nbytes: int,
    ) -> None:
        """`copy` is the file of this process alone. A row has at most `most_nbytes`. Opens nothing yet."""
        self._broker, self._bucket, self._parts = broker, bucket, parts
        self._most_nbytes = most_nbytes
        self._copy = RowsCopy(copy, schema, tables, bucket)
        self._position = self._looks = self._begun = self._done = self._least = 0
        self._made: datetime | None = None
        """When the brokers made the bucket that the copy is of."""
        self._is_read = False
        self._failure: str | None = None
        """Why the last look has failed; None if that look succeeded."""
        self._away_until_s = 0.0
        self._following: asyncio.Task[None] | None = None
        self._fresh_s = time.monotonic()
        self._refreshing, self._writing = asyncio.Lock(), asyncio.Lock()
        self._wanted = asyncio.Event()
        self._me, self._others = secrets.token_hex(8), dict[str, tuple[int, float]]()
        """Who this is in `ATTEMPT`, and the last attempt of each other gateway with its time."""
        self.heard: list[Callable[[], None]] = []
        """Called after changes that this process did not ask for."""
        broker.listen(f"$KV.{bucket}.>", self._hear)
        broker.on_up.append(self._joined)

    def _hear(self, message: Msg) -> None:
        self._wanted.set()
        who, _, number = (message.headers or {}).get(ATTEMPT, "").partition(" ")
        if who != self._me and _NUMBER.fullmatch(number):
            now_s = time.monotonic()
            self._others = {
                each: at for each, at in self._others.items() if now_s - at[1] < GIVE_WAY_S and each != who
            }
            self._others[who] = int(number), now_s

    def _joined(self) -> None:
        self._away_until_s = 0.0
        self._wanted.set()

    # The interface of `Rows`.

    async def version(self) -> int:
        """Another number each time: only the brokers know."""
        self._looks += 1
        return self._looks

    def exists(self) -> bool:
        """Whether there is a broker to ask: work that no client waits for is left until there is one."""
        return self._broker.up

    async def read(self, how: How[R]) -> R:
        """The result of `how`, which reads from one snapshot."""
        return await self._seen(self._copy.read, how)

    async def find(self, how: How[R]) -> R:
        """The result of `how`, one statement that reads a few rows."""
        return await self._seen(self._copy.find, how)

    async def _seen(self, read: Callable[[How[R]], Awaitable[R]], how: How[R]) -> R:
        try:
            await self._fresh()
        except StoreAway as away:
            if not self._is_read:
                raise
            try:
                found = await read(how)
            except InvalidInput:
                raise away from None
            if found is None:
                raise
            return found
        return await read(how)

    async def write(self, how: How[R], committed: Callable[[], None] | None = None) -> R:
        """The result of `how`, whose changes are at the brokers, also if the caller is cancelled."""
        result = await asyncio.shield(asyncio.ensure_future(self._write(how)))
        if committed is not None:
            committed()
        return result

    async def _write(self, how: How[R]) -> R:
        async with self._writing:
            for attempt in range(MOST_TRIES):
                await self._give_way(attempt)
                await self._fresh()
                if attempt == LOOK_WHOLE_AFTER:
                    await self.compare()
                position = self._position
                result, changes = await self._copy.tried(how)
                try:
                    if await self._published(changes, position, attempt):
                        # A write without changes says nothing about room, and neither does one without a broker.
                        self._parts.is_full &= not changes
                        return result
                except LOST as error:
                    found = unreadable(error, self._bucket)
                    self._parts.is_full |= is_full(found)
                    raise found from error
                finally:
                    # What a row names by now stays; the sweep removes the rest.
                    self._parts.writing.clear()
                await asyncio.sleep(random.uniform(0, min(PAUSE_S * (attempt + 1), MOST_PAUSE_S)))
        raise StoreAway(errno.EBUSY, f"too many others change {self._bucket}")

    async def _give_way(self, attempt: int) -> None:
        """Wait while other gateways have tried more often than this write."""
        while others := [at_s for number, at_s in self._others.values() if number > attempt]:
            left_s = max(others) + GIVE_WAY_S - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    # Towards the brokers.

    def _stream(self) -> JetStreamContext:
        if not self._broker.up:
            raise StoreAway(errno.EIO, NO_BROKER)
        return self._broker.client.jetstream(timeout=TIMEOUT_S)

    async def _published(self, changes: list[Change], position: int, attempt: int) -> bool:
        """Write rows; false where somebody was quicker, and the whole write has to run again. Raises one of `LOST`."""
        if not changes:
            return True
        if self._made is None:
            # The next attempt learns when the bucket was made.
            await create(self._broker, self._bucket, None)
            return False
        messages = [await self._encoded(change) for change in changes]
        headers = {"Nats-Expected-Last-Sequence": str(position), ATTEMPT: f"{self._me} {attempt}"}
        revisions = [await self._put(changes[0], messages[0][0], headers)]
        if revisions[0] is not None:
            for at in range(1, len(changes), FEW):
                pairs = zip(changes[at : at + FEW], messages[at : at + FEW], strict=True)
                revisions += await asyncio.gather(
                    *(self._put_over(change, data) for change, (data, _) in pairs)
                )
        revisions += [None] * (len(changes) - len(revisions))
        written, useless = list[Written](), list[str]()
        for change, revision, (_, each) in zip(changes, revisions, messages, strict=True):
            useless.append(each.large if revision is None else change.large)
            if revision is not None:
                written.append(replace(each, revision=revision))
        await self._take_own(position, written)
        await self._parts.remove(useless)
        # A row that is gone otherwise, or that has come back, is nobody's loss.
        return revisions[0] is not None and all(
            revision is not None or change.row is None
            for change, revision in zip(changes, revisions, strict=True)
        )

    async def _encoded(self, change: Change) -> tuple[bytes, Written]:
        """The message of a change, and the write as the copy takes it in, still without its number."""
        if change.row is None:
            return b"", Written(0, change.key)
        data, name = encode(KeptRow(VERSION, change.table, list(change.row))), ""
        if len(data) > min(INLINE_NBYTES, self._broker.client.max_payload - HEAD_NBYTES):
            whole, name = values_of(change.row), self._parts.new_name()
            if len(whole) > self._most_nbytes:
                most = f"{self._most_nbytes} may be (twice limits.max_body_bytes)"
                raise StoreUnreadable(errno.EFBIG, f"a row of {self._bucket} has {len(whole)} bytes, {most}")

            async def read(position: int, count: int) -> bytes:
                return whole[position : position + count]

            large = await self._parts.put(name, len(whole), read)
            data = encode(KeptRow(VERSION, change.table, [], large))
        return data, Written(0, change.key, change.table, change.row, name)

    async def _put_over(self, change: Change, data: bytes) -> int | None:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(change.known)}
        return await self._put(change, data, headers)

    async def _put(self, change: Change, data: bytes, headers: dict[str, str]) -> int | None:
        """The revision of a written row; None where the revision that it names is not the last any more."""
        if change.row is None:
            headers["KV-Operation"] = "DEL"
        subject = f"$KV.{self._bucket}.{change.key}"
        try:
            ack = await self._stream().publish(subject, data, timeout=TIMEOUT_S, headers=headers)
        except APIError as error:
            if error.err_code in OTHER_REVISION:
                return None
            raise
        return ack.seq

    async def _take_own(self, position: int, written: list[Written]) -> None:
        """Have the copy hold what was written here, as far as nobody has written in between."""
        async with self._refreshing:
            if self._position == position:
                written.sort(key=lambda each: each.revision)
                last = range(position + 1, position + 1 + len(written))
                own = [each for each, number in zip(written, last, strict=True) if each.revision == number]
                if own:
                    await self._take(own)

    # From the brokers.

    async def _fresh(self) -> None:
        """Bring the copy up to date with what was written before this call. Raises `StoreAway`."""
        begun = self._begun
        async with self._refreshing:
            began_s = time.monotonic()
            if self._done > begun or began_s < self._away_until_s:
                # A look that began after the call has ended, or one that took long has failed a moment ago.
                if self._failure is not None:
                    raise StoreAway(errno.EIO, self._failure)
                if self._done > begun:
                    return
            self._begun = number = self._begun + 1
            try:
                await self._look()
            except LOST as error:
                found = unreadable(error, self._bucket)
                self._failure, self._done, now_s = found.strerror or "", number, time.monotonic()
                if now_s - began_s >= LONG_S:
                    self._away_until_s = now_s + AWAY_S
                raise found from error
            # NOTE: a look whose caller was cancelled has not ended, and nobody may rely on such a look.
            self._failure, self._done, self._is_read, self._fresh_s = None, number, True, time.monotonic()

    async def _look(self) -> None:
        if not self._copy.is_open:
            await self._copy.open()
            self._following = asyncio.get_running_loop().create_task(lasting(self._follow))
        try:
            info = await self._stream().stream_info(f"KV_{self._bucket}")
        except NotFoundError:
            if self._made is not None:
                log.warning("the bucket %s is gone, and its rows with it", self._bucket)
                await self._clear(None)
            return
        last = info.state.last_seq
        is_old = time.monotonic() - self._fresh_s > MARKS_S / 2
        if info.created != self._made or last < self._position or is_old:
            await self._clear(info.created)
        if last - self._position > FEW:
            await self._read_all()
        # A broker that reads the bucket out may be behind the one that counts the writes.
        while self._position < max(last, self._least):
            message = await self._next(self._position + 1)
            if message is None:
                break
            await self._take([message])
        # Rows that were written over since have left holes.
        self._position = max(self._position, last)

    async def _next(self, revision: int) -> Written | None:
        """The write with this number or the next one that is left; None behind the last one."""
        for _ in range(MOST_TRIES):
            try:
                found = await self._stream().get_msg(
                    f"KV_{self._bucket}", seq=revision, subject=f"$KV.{self._bucket}.>", next=True
                )
            except NotFoundError:
                return None
            key = (found.subject or "").removeprefix(f"$KV.{self._bucket}.")
            operation = (found.headers or {}).get("KV-Operation")
            message = await self._message(Value(key, found.data or b"", found.seq or 0, operation))
            if message is not None:
                return message
        raise StoreAway(errno.EBUSY, f"too many others change {self._bucket}")

    async def _message(self, value: Value) -> Written | None:
        """A write as the copy takes it in. What cannot be read is a row that is gone.

        None for a write that another one has replaced meanwhile, whose parts went; `_least` tells of the other one.
        """
        key, revision = value.key, value.revision
        if value.operation in GONE:
            return Written(revision, key)
        try:
            row = read_row(value.data)
            if row.large is None:
                return Written(revision, key, row.table, row.values)
            if row.large.nbytes > self._most_nbytes:
                raise ProtocolError(f"{row.large.nbytes} bytes, {self._most_nbytes} may be")
            values = read_values(await self._parts.read(row.large))
            return Written(revision, key, row.table, values, row.large.name)
        except FileNotFoundError as error:
            newest = await self._newest(f"$KV.{self._bucket}.{key}")
            if newest > revision:
                self._least = max(self._least, newest)
                return None
            log.error("a row of %s is passed over: %s", self._bucket, error)
        except (ProtocolError, RecursionError, ValueError) as error:
            log.error("a row of %s is passed over: %s", self._bucket, error)
        return Written(revision, key)

    async def _newest(self, subject: str) -> int:
        """The number of the last write of a row; 0 for one that is gone without a mark."""
        try:
            return (await self._stream().get_msg(f"KV_{self._bucket}", subject=subject)).seq or 0
        except NotFoundError:
            return 0

    async def _read_all(self) -> None:
        """Take in the whole bucket."""
        batch, nbytes = list[Written](), 0
        async with aclosing(all_values(self._broker, self._bucket)) as values:
            async for each in values:
                message = await self._message(each)
                if message is None:
                    continue
                batch.append(message)
                nbytes += sum(len(value) for value in message.values or () if isinstance(value, str | bytes))
                if len(batch) >= BATCH or nbytes > BATCH_NBYTES:
                    await self._take(batch)
                    batch, nbytes = [], 0
        await self._take(batch)

    async def compare(self) -> None:
        """Remove rows from the copy that the brokers lack without a mark, and old marks. Raises `StoreUnreadable`.

        Nothing is compared where the brokers' keys change while these are read.
        """
        await self._fresh()
        async with self._refreshing:
            try:
                prefix = f"$KV.{self._bucket}."
                made, subjects = await subjects_of(self._broker, self._bucket, f"{prefix}>")
                if made != self._made or subjects is None:
                    return
                there = {subject.removeprefix(prefix) for subject in subjects}
                for revision in await self._copy.compare(there):
                    await self._forget_mark(revision)
            except NotFoundError:
                return
            except LOST as error:
                raise unreadable(error, self._bucket) from error

    async def _forget_mark(self, revision: int) -> None:
        try:
            await self._stream().delete_msg(f"KV_{self._bucket}", revision)
        except APIError as error:
            log.debug("the mark %d of %s is gone already: %r", revision, self._bucket, error)

    async def sweep(self) -> None:
        """Compare the copy with the brokers, and remove parts of rows that are gone. Raises `StoreUnreadable`."""
        await self.compare()
        await self._parts.sweep(self._named)

    async def _named(self, names: Collection[str]) -> set[str]:
        await self._fresh()
        return (await self._copy.large()).intersection(names)

    async def _follow(self) -> None:
        """Bring the copy up to date for ever, whenever a gateway has written."""
        while True:
            await self._wanted.wait()
            # PERF: a write of this process is heard before the copy holds the write, which need not be asked for.
            async with self._writing:
                self._wanted.clear()
            try:
                await self._fresh()
            except StoreUnreadable as error:
                log.debug("writes of others are not known yet: %s", error.strerror)
            for hear in self.heard:
                hear()

    def close(self) -> None:
        """Follow the brokers no more."""
        if self._following is not None:
            self._following.cancel()

    async def _clear(self, made: datetime | None) -> None:
        """Begin a new copy, of the bucket that was made at this time."""
        await self._copy.clear()
        self._position, self._least, self._made = 0, 0, made

    async def _take(self, written: list[Written]) -> None:
        """Have the copy hold writes."""
        await self._copy.take(written)
        self._position = max([self._position, *(each.revision for each in written)])
