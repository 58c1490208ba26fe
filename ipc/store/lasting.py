"""A SQLite file of state that survives the server, for whatever is too much to be kept in memory (`ipc.store.store`).

1. Each process has one connection for reads and one for writes, each in a thread of its own. So the event loop never
   waits, writes of a process happen in their order, and readers do not wait for writers (write-ahead log).
2. Nothing is opened before the first use: a process that never asks has neither thread nor descriptor, and a process
   that forks before has nothing to inherit.
3. A file that is no database any more is put aside, and a new file takes its place.

What was committed survives the death of any process. A loss of power may cost the last commits, never the file.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ipc.store.store import Locked, StoreUnreadable, connect, transacted, translated

log = logging.getLogger(__name__)

R = TypeVar("R")
How = Callable[[sqlite3.Connection], R]
"""Reads or writes inside of one transaction."""

WAIT_S = 5.0
"""How long a write waits for writers of other processes."""
_MADE = 1
"""The `user_version` of a file with its tables."""
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class LastingStore:
    """The file `path`, as one process reads and writes the file. Opens nothing yet.

    `schema` makes tables that are not there. Both methods raise `StoreUnreadable`.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self._path, self._schema = path, schema
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="lasting-read")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="lasting-write")
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None

    async def read(self, how: How[R]) -> R:
        """What `how` reads, in one snapshot."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, how)

    async def write(self, how: How[R]) -> R:
        """What `how` gives; what `how` wrote is committed. The write happens also if its caller is cancelled."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._writing, self._write, how))

    def _read(self, how: How[R]) -> R:
        with _unreadable():
            if self._reader is None:
                self._reader = self._opened()
            return transacted(self._reader, "BEGIN", how)

    def _write(self, how: How[R]) -> R:
        with _unreadable():
            if self._writer is None:
                self._writer = self._opened()
            return transacted(self._writer, "BEGIN IMMEDIATE", how)

    def _opened(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return self._prepared()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _BROKEN:
                raise
            aside = self._path.with_suffix(".broken")
            log.error("%s is no database any more and was renamed to %s: %s", self._path, aside, error)
            self._path.replace(aside)
            # A new file must not be given what was written for the old one.
            for suffix in ("-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            return self._prepared()

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
