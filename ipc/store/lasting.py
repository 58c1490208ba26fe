"""State of a server that survives the server and is too much to be kept in memory: one SQLite file for all processes.

1. Each process has one connection for reads and one for writes, each in a thread of its own. So the event loop never
   waits, writes of a process happen in their order, and readers do not wait for writers. A third connection is for the
   event loop's thread: look-ups of a few rows, which the kernel has in memory and which wait for no lock.
2. Nothing is opened before the first use: a process that never asks has neither thread nor descriptor, and a process
   that forks before has nothing to inherit.
3. A file that has its tables is opened at once. Threads and processes take turns to make a new file, as SQLite fails at
   once where two connections switch a file to write-ahead logging. So a process that stands still with its turn delays
   others while the file is new, and the log names the process.
4. A file that is no database any more is put aside, and a new file takes its place.

What was committed survives the death of any process. A loss of power may cost the last commits, never the file.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ipc.processes.liveness import LOOK_EVERY_S, holder_of, is_taken
from ipc.store.store import TRY_S, How, Locked, StoreUnreadable, connect, transacted, translated

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long a write waits for writers of other processes, and how long an opening waits for other openings."""
_MADE = 1
"""The `user_version` of a file with its tables."""
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
R = TypeVar("R")


class LastingStore:
    """The file `path`, as one process reads and writes the file. Opens nothing yet.

    `schema` makes tables that are not there. All methods raise `StoreUnreadable`.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self._path, self._schema = path, schema
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="lasting-read")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="lasting-write")
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._looker: sqlite3.Connection | None = None

    async def version(self) -> int:
        """A number that changes with the commits of all processes."""
        looker = await self._opened_looker()
        with _unreadable():
            (version,) = looker.execute("PRAGMA data_version").fetchone()
            return int(version)

    def exists(self) -> bool:
        """Whether somebody has used the file."""
        return self._path.exists()

    async def read(self, how: How[R]) -> R:
        """The result of `how`, which reads from one snapshot."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, how)

    async def find(self, how: How[R]) -> R:
        """The result of `how`, one statement that reads a few rows.

        The statement runs on the event loop's thread, in microseconds, where `read` takes a switch to a thread and back
        again. The reading thread reads while another process has locked the file.
        """
        looker = await self._opened_looker()
        try:
            with translated():
                return how(looker)
        except Locked:
            return await self.read(how)

    async def write(self, how: How[R], committed: Callable[[], None] | None = None) -> R:
        """The result of `how`, whose changes are committed, also if the caller is cancelled.

        `committed` is called after the commit, in the writing thread.
        """
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._writing, self._write, how, committed))

    def _read(self, how: How[R]) -> R:
        with _unreadable():
            if self._reader is None:
                self._reader = self._opened()
            return transacted(self._reader, "BEGIN", how)

    def _write(self, how: How[R], committed: Callable[[], None] | None) -> R:
        with _unreadable():
            if self._writer is None:
                self._writer = self._opened()
            result = transacted(self._writer, "BEGIN IMMEDIATE", how)
        if committed is not None:
            committed()
        return result

    async def _opened_looker(self) -> sqlite3.Connection:
        """The connection of the event loop's thread, which must not wait for a lock; the reading thread opens it."""
        if self._looker is not None:
            return self._looker
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._open_looker)

    def _open_looker(self) -> sqlite3.Connection:
        with _unreadable():
            if self._looker is None:
                looker = self._opened()
                looker.execute("PRAGMA busy_timeout = 0")
                self._looker = looker
            return self._looker

    def _opened(self) -> sqlite3.Connection:
        if (opened := self._opened_at_once()) is not None:
            return opened
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _turn(self._path.parent):
            try:
                return self._prepared()
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _BROKEN:
                    raise
                aside = self._path.with_suffix(".broken")
                log.error("%s is no database any more and was renamed to %s: %s", self._path, aside, error)
                self._path.replace(aside)
                # The log of the old file must not be applied to the new one.
                for suffix in ("-wal", "-shm"):
                    Path(f"{self._path}{suffix}").unlink(missing_ok=True)
                return self._prepared()

    def _opened_at_once(self) -> sqlite3.Connection | None:
        """A connection to a file that has its tables; None for any other file, or while another process makes one."""
        try:
            connection = connect(self._path, TRY_S)
        except sqlite3.Error:
            return None
        try:
            if connection.execute("PRAGMA user_version").fetchone() == (_MADE,):
                connection.execute(f"PRAGMA busy_timeout = {WAIT_S * 1e3:.0f}")
                connection.execute("PRAGMA synchronous = NORMAL")
                return connection
        except sqlite3.Error:
            pass
        connection.close()
        return None

    def _prepared(self) -> sqlite3.Connection:
        self._path.touch(mode=0o600)
        connection = connect(self._path, WAIT_S)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            # NOTE: a reader must not wait for writers, so the tables are made once only.
            if connection.execute("PRAGMA user_version").fetchone() != (_MADE,):
                script = f"BEGIN IMMEDIATE;\n{self._schema}\nPRAGMA user_version = {_MADE};\nCOMMIT;"
                connection.executescript(script)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Keep other threads and processes from making files in `directory`.

    Raises `StoreUnreadable` after `WAIT_S`; the log names the process that has the turn.
    """
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + WAIT_S
        while not is_taken(lock):
            if time.monotonic() > until:
                log.error("%s has kept files of %s locked for %g s", holder_of(lock), directory, WAIT_S)
                raise StoreUnreadable(errno.EBUSY, "another process is opening a file")
            time.sleep(LOOK_EVERY_S)
        yield
    finally:
        os.close(lock)


@contextmanager
def _unreadable() -> Iterator[None]:
    """All errors of the file as `StoreUnreadable`."""
    try:
        with translated():
            yield
    except Locked as error:
        raise StoreUnreadable(errno.EBUSY, "another process is writing") from error
    except StoreUnreadable:
        raise
    except OSError as error:
        raise StoreUnreadable(error.errno, f"the file cannot be opened: {error.strerror}") from error
