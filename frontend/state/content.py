"""Bytes of stored objects: one file for each content, in a directory that all frontends share.

1. A `Draft` is a new file with an exclusive lock. Its writer fills the file, `finish` makes the bytes durable and gives
   the file its name, then the writer commits the row that names the content, then the lock ends.
2. Rows decide what exists. A content without a row is an orphan: its writer was killed, or its row was deleted by a
   process that was killed before it deleted the content.
3. `sweep` deletes orphans. A locked file is no orphan: its writer lives and has not committed the row yet. The lock
   ends with its process, so that no clock is asked.
4. Work on files runs in threads of their own. A cancelled caller waits for its thread first, so that no thread uses a
   descriptor which the caller has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from frontend.state.errors import StateUnavailable, is_full
from ipc.errors import StateFull

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
PIECE_NBYTES = 1 << 20
"""Bytes that one piece of work in a thread reads or writes."""
MOST_SWEPT = 256
"""Orphans that one sweep deletes; each holds a descriptor meanwhile."""
_PART = ".part"
_THREADS = ThreadPoolExecutor(4, thread_name_prefix="content")


async def completed(work: Awaitable[T]) -> T:
    """The result of `work`. A cancelled caller waits for the end of the work, which is not cancelled."""
    done = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
        if not done.cancelled():
            # NOTE: the error of a cancelled caller has no reader.
            done.exception()
        raise


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(...)` in a thread for files, as `completed`."""
    loop = asyncio.get_running_loop()
    return await completed(loop.run_in_executor(_THREADS, lambda: work(*args, **kwargs)))


@contextmanager
def translated() -> Iterator[None]:
    """Errors of the file system as clients may see them: `StateFull` without room, else `StateUnavailable`."""
    try:
        yield
    except OSError as error:
        log.error("stored content cannot be read or written: %s", error)
        if is_full(error):
            raise StateFull("the server has no room left to store this") from error
        raise StateUnavailable(f"stored content cannot be reached: {error.strerror}") from error


class Draft:
    """A new content, as an asynchronous context. The exit ends the lock, and deletes the file unless `keep` was called.

    All methods raise `StateFull` and `StateUnavailable`.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        """`prefix` begins the name of the content."""
        self.name = ""
        self.nbytes = 0
        self._directory, self._prefix = directory, prefix
        self._path = directory
        self._fd = -1
        self._kept = False

    async def __aenter__(self) -> Draft:
        try:
            await in_thread(self._open)
        except asyncio.CancelledError:
            if self._fd >= 0:
                self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await in_thread(self._close)

    def _open(self) -> None:
        with translated():
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                self.name = self._prefix + secrets.token_hex(16)
                self._path = self._directory / f"{self.name}{_PART}"
                self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if os.fstat(self._fd).st_nlink:
                    return
                # A sweep found the file before its lock.
                os.close(self._fd)

    def _close(self) -> None:
        if not self._kept:
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._fd)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        await in_thread(self._write, data)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        with translated():
            while view:
                written = os.write(self._fd, view)
                self.nbytes += written
                view = view[written:]

    async def copy(self, source: int) -> None:
        """Append the bytes of the regular file `source`, a descriptor, which keeps its offset."""
        await in_thread(self._copy, source)

    def _copy(self, source: int) -> None:
        with translated():
            offset = 0
            while piece := os.pread(source, PIECE_NBYTES, offset):
                offset += len(piece)
                self._write(piece)

    async def finish(self) -> None:
        """Make the bytes durable, under the name of the content."""
        await in_thread(self._finish)

    def _finish(self) -> None:
        with translated():
            os.fsync(self._fd)
            named = self._directory / self.name
            self._path.rename(named)
            self._path = named
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def keep(self) -> None:
        """A row names the content: the exit leaves the file."""
        self._kept = True


class Contents:
    """The contents of one kind of object. The first draft makes the directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def draft(self) -> Draft:
        """A new content."""
        return Draft(self._directory)

    async def open(self, name: str, nbytes: int) -> int:
        """A descriptor to read a content from. Raises `FileNotFoundError` for a content that is gone or torn."""
        try:
            return self._open(name, nbytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FileNotFoundError(error.errno, error.strerror, name) from error

    def _open(self, name: str, nbytes: int) -> int:
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        facts = os.fstat(descriptor)
        if stat.S_ISREG(facts.st_mode) and facts.st_size == nbytes:
            return descriptor
        os.close(descriptor)
        log.error("content %s has %d bytes in place of %d and is passed over", name, facts.st_size, nbytes)
        raise FileNotFoundError(errno.ENOENT, "the content is torn", name)

    async def delete(self, names: Collection[str]) -> None:
        """Delete contents whose rows are gone. A content that cannot be deleted now is left to `sweep`."""
        if any(names):
            await in_thread(self._delete, names)

    def _delete(self, names: Collection[str]) -> None:
        for name in filter(None, names):
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("a content could not be deleted: %s", error)

    async def sweep(self, named: Callable[[Collection[str]], Awaitable[set[str]]]) -> int:
        """Delete orphans; the number of deleted files. `named` tells which of some contents have rows now."""
        names = await in_thread(self._found)
        without = sorted(set(names) - await named(names))[:MOST_SWEPT]
        locked = await in_thread(self._locked, without)
        try:
            # NOTE: a writer may have committed its row between the first look and our lock.
            named_now = await named(locked)
            orphans = [name for name in locked if name not in named_now]
            await self.delete(orphans)
        finally:
            for descriptor in locked.values():
                os.close(descriptor)
        return len(orphans)

    def _found(self) -> list[str]:
        try:
            return [path.name for path in self._directory.iterdir()]
        except FileNotFoundError:
            return []

    def _locked(self, names: Collection[str]) -> dict[str, int]:
        """Descriptors of those files that no writer has locked, which are locked now."""
        locked = {}
        for name in names:
            with contextlib.suppress(OSError):
                descriptor = os.open(
                    self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                )
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    continue
                locked[name] = descriptor
        return locked


class StoredBytes:
    """Bytes of an open content in pieces, as an asynchronous iterator; `close` closes the descriptor."""

    def __init__(self, descriptor: int, span: range) -> None:
        self._descriptor, self._at, self._stop = descriptor, span.start, span.stop

    def __aiter__(self) -> StoredBytes:
        return self

    async def __anext__(self) -> bytes:
        """The next piece. Raises `StateUnavailable` for a file that has become shorter."""
        if self._at >= self._stop:
            raise StopAsyncIteration
        piece = await in_thread(
            os.pread, self._descriptor, min(PIECE_NBYTES, self._stop - self._at), self._at
        )
        if not piece:
            raise StateUnavailable("the file became shorter while it was being sent")
        self._at += len(piece)
        return piece

    async def close(self) -> None:
        """Close the file. Called by Falcon when the response is over or was cut."""
        os.close(self._descriptor)
