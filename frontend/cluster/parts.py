"""Large bytes at the brokers: parts in a bucket on disks, and the contents of files that are made of these.

1. Bytes belong to a store, which has names of its own. A name begins with the id of the gateway which wrote the bytes.
   Their parts come first, then their description (`Large`): bytes without a description do not exist.
2. Parts are read one by one and held against length and digest. What is not whole is not there.
3. `SharedContents` keeps a copy of each content in a directory that the frontends of this host share. Rows decide what
   exists: a copy without a row is deleted by the sweep, as on one host.
4. Bytes that no row names are orphans once their writer is dead, or has forgotten them. `sweep` removes what was an
   orphan at the sweep before, too: a writer that stood still may go on, and a write that came late names the bytes.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from types import TracebackType

from nats.js.client import JetStreamContext
from nats.js.errors import BucketNotFoundError, NotFoundError

from frontend.cluster.broker import HEAD_NBYTES, NO_BROKER, Broker
from frontend.cluster.bucket import LOST, TIMEOUT_S, create, subjects_of
from frontend.state.content import Contents, Draft, in_thread
from frontend.state.errors import StateUnavailable, is_full
from frontend.state.places import Lives
from ipc.errors import ProtocolError, StateFull
from ipc.store.store import StoreAway, StoreUnreadable
from ipc.wire.cluster import VERSION, encode
from ipc.wire.kept_rows import Large, is_name, read_large

log = logging.getLogger(__name__)

PART_NBYTES = 128 << 10
WINDOW = 8
"""Parts that are under way at a time."""
NO_ROOM = (10023, 10047, 10077)
"""Codes of brokers that have no room: no resources, no storage, a stream that is full."""


def unreadable(error: BaseException, bucket: str) -> StoreUnreadable:
    """An error of `LOST` as those of stores."""
    if isinstance(error, StoreUnreadable):
        return error
    code = getattr(error, "err_code", 0)
    if code in NO_ROOM:
        return StoreUnreadable(errno.ENOSPC, f"the brokers have no room for {bucket}")
    return StoreAway(errno.EIO, f"the brokers do not keep {bucket} now: {error!r}")


class Parts:
    """The large bytes of one store. All methods raise `StoreUnreadable`."""

    def __init__(self, broker: Broker, bucket: str, store: str, lives: Lives) -> None:
        """`store` is one token of a subject."""
        self._broker, self._bucket, self._lives = broker, bucket, lives
        self._subject = f"$KV.{bucket}.{store}."
        self.writing: set[str] = set()
        """Names of this process that a row may name soon."""
        self._suspects: set[str] = set()
        """Orphans of the last sweep."""
        self.is_full = False
        """Whether the brokers had no room for the last write of the store."""

    @property
    def prefix(self) -> str:
        """The beginning of all names of this process."""
        return f"{self._lives.own()}-"

    def new_name(self) -> str:
        """A name for new bytes."""
        return f"{self.prefix}{secrets.token_hex(16)}"

    def _stream(self) -> JetStreamContext:
        if not self._broker.up:
            raise StoreAway(errno.EIO, NO_BROKER)
        return self._broker.client.jetstream(timeout=TIMEOUT_S)

    @property
    def _part_nbytes(self) -> int:
        return max(1, min(PART_NBYTES, self._broker.client.max_payload - HEAD_NBYTES))

    async def put(self, name: str, nbytes: int, read: Callable[[int, int], Awaitable[bytes]]) -> Large:
        """Write bytes under a new name; `read` gets position and number, and returns as many bytes."""
        self.writing.add(name)
        try:
            large = await self._put(name, nbytes, read)
        except LOST as error:
            found = unreadable(error, self._bucket)
            self.is_full |= is_full(found)
            raise found from error
        self.is_full = False
        return large

    async def _put(self, name: str, nbytes: int, read: Callable[[int, int], Awaitable[bytes]]) -> Large:
        stream, size = self._stream(), self._part_nbytes
        try:
            await stream.key_value(self._bucket)
        except BucketNotFoundError:
            await create(self._broker, self._bucket, None)
        digest, count = hashlib.blake2b(digest_size=16), -(-nbytes // size)
        for first in range(0, count, WINDOW):
            numbers = range(first, min(first + WINDOW, count))
            pieces = [await read(number * size, min(size, nbytes - number * size)) for number in numbers]
            for piece in pieces:
                digest.update(piece)
            named = zip(numbers, pieces, strict=True)
            await asyncio.gather(
                *(self._publish(stream, f"{name}.{number}", piece) for number, piece in named)
            )
        large = Large(VERSION, name, nbytes, count, digest.digest())
        await self._publish(stream, f"{name}.all", encode(large))
        return large

    async def _publish(self, stream: JetStreamContext, key: str, data: bytes) -> None:
        await stream.publish(self._subject + key, data, timeout=TIMEOUT_S)

    async def find(self, name: str) -> Large:
        """The description of bytes. Raises `FileNotFoundError`."""
        try:
            large = read_large(await self._get(f"{name}.all")) if is_name(name) else None
        except ProtocolError as error:
            log.error("the description of the bytes %s is passed over: %s", name, error.message)
            large = None
        if large is None or large.name != name:
            raise FileNotFoundError(errno.ENOENT, "the brokers do not have the bytes", name)
        return large

    async def _get(self, key: str) -> bytes:
        try:
            found = await self._stream().get_msg(
                f"KV_{self._bucket}", subject=self._subject + key, direct=False
            )
        except NotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, "the brokers do not have a part of the bytes", key
            ) from error
        except LOST as error:
            raise unreadable(error, self._bucket) from error
        return found.data or b""

    async def pieces(self, large: Large) -> AsyncIterator[bytes]:
        """The bytes in pieces. What is not whole ends with `FileNotFoundError`, at the latest behind the last piece."""
        digest, nbytes = hashlib.blake2b(digest_size=16), 0
        if not is_name(large.name):
            raise FileNotFoundError(errno.ENOENT, "the bytes have no name", large.name)
        for first in range(0, large.parts, WINDOW):
            numbers = range(first, min(first + WINDOW, large.parts))
            for piece in await asyncio.gather(*(self._get(f"{large.name}.{number}") for number in numbers)):
                digest.update(piece)
                nbytes += len(piece)
                if nbytes > large.nbytes:
                    break
                yield piece
        if nbytes != large.nbytes or digest.digest() != large.digest:
            log.error("the stored bytes %s are torn and passed over", large.name)
            raise FileNotFoundError(errno.ENOENT, "the bytes are torn", large.name)

    async def read(self, large: Large) -> bytes:
        """The bytes. Raises `FileNotFoundError` for what is not whole."""
        return b"".join([piece async for piece in self.pieces(large)])

    async def remove(self, names: Collection[str]) -> None:
        """Remove bytes. What cannot be removed now is left to `sweep`."""
        for name in filter(is_name, names):
            self.writing.discard(name)
            try:
                await self._stream().purge_stream(f"KV_{self._bucket}", subject=f"{self._subject}{name}.*")
            except (*LOST, StoreAway) as error:
                log.debug("stored bytes could not be removed: %r", error)

    async def sweep(self, named: Callable[[Collection[str]], Awaitable[set[str]]]) -> int:
        """Remove those orphans that the sweep before found, too; their number. `named`: which names have rows now."""
        if not self._broker.up:
            raise StoreAway(errno.EIO, NO_BROKER)
        try:
            _, subjects = await subjects_of(self._broker, self._bucket, f"{self._subject}>")
        except NotFoundError:
            return 0
        except LOST as error:
            raise unreadable(error, self._bucket) from error
        names = {subject.removeprefix(self._subject).partition(".")[0] for subject in subjects or ()}
        left = {name for name in names if is_name(name) and not self._is_being_written(name)}
        orphans = left - await named(left)
        gone, self._suspects = orphans & self._suspects, orphans
        await self.remove(gone)
        return len(gone)

    def _is_being_written(self, name: str) -> bool:
        if name.startswith(self.prefix):
            return name in self.writing
        return self._lives.is_running(name.rpartition("-")[0])


class SharedDraft(Draft):
    """A new content, which `finish` brings to the brokers, too."""

    def __init__(self, directory: Path, parts: Parts) -> None:
        super().__init__(directory, parts.prefix)
        self._parts = parts

    async def finish(self) -> None:
        """Make the bytes durable here and at the brokers. Raises `StateFull` and `StateUnavailable`."""
        await super().finish()

        async def read(position: int, count: int) -> bytes:
            return await in_thread(os.pread, self._fd, count, position)

        try:
            await self._parts.put(self.name, self.nbytes, read)
        except StoreUnreadable as error:
            await self._parts.remove([self.name])
            if is_full(error):
                raise StateFull("the brokers have no room left to store this") from error
            raise StateUnavailable(
                f"stored content cannot be written: {error.strerror}", retry_after_s=1
            ) from error

    def keep(self) -> None:
        """A row names the content."""
        super().keep()
        self._parts.writing.discard(self.name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        if self._kept or self.name not in self._parts.writing:
            return
        if isinstance(error, StateUnavailable | asyncio.CancelledError):
            # NOTE: a broker that did not answer may have kept the row, which names the content. The sweep looks.
            self._parts.writing.discard(self.name)
        else:
            await self._parts.remove([self.name])


class SharedContents(Contents):
    """The contents of one kind of object, in a directory with copies of what the brokers have."""

    def __init__(self, directory: Path, parts: Parts) -> None:
        super().__init__(directory)
        self._parts = parts

    def draft(self) -> Draft:
        """A new content."""
        return SharedDraft(self._directory, self._parts)

    async def open(self, name: str, nbytes: int) -> int:
        """A descriptor to read a content from.

        Raises `FileNotFoundError` for a content that is gone or torn, and `StateUnavailable` without brokers.
        """
        if not is_name(name):
            raise FileNotFoundError(errno.ENOENT, "no content has such a name", name)
        try:
            return await super().open(name, nbytes)
        except FileNotFoundError:
            pass
        try:
            await self._copy(name, nbytes)
        except StoreUnreadable as error:
            raise StateUnavailable(
                f"stored content cannot be reached: {error.strerror}", retry_after_s=1
            ) from error
        return await super().open(name, nbytes)

    async def _copy(self, name: str, nbytes: int) -> None:
        large = await self._parts.find(name)
        if large.nbytes != nbytes:
            raise FileNotFoundError(errno.ENOENT, "the content is torn", name)
        async with Draft(self._directory) as draft:
            async for piece in self._parts.pieces(large):
                await draft.write(piece)
            draft.name = name
            await draft.finish()
            draft.keep()

    async def delete(self, names: Collection[str]) -> None:
        """Delete contents whose rows are gone, here and at the brokers."""
        # NOTE: rows may come from anybody who may write to the brokers, and a name becomes a path.
        await super().delete(list(filter(is_name, names)))
        await self._parts.remove(names)

    async def sweep(self, named: Callable[[Collection[str]], Awaitable[set[str]]]) -> int:
        """Delete orphans, here and at the brokers."""
        count = await super().sweep(named)
        try:
            return count + await self._parts.sweep(named)
        except StoreUnreadable as error:
            raise StateUnavailable(f"orphans cannot be found: {error.strerror}", retry_after_s=1) from error
