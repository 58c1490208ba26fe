"""One SQLite file in the run directory for the small state that all processes of one server share.

1. A row has a kind (the key space of one sort of state), a key, a value, the time of its writing, and a generation: a
   number that no two writes of a host share. Each kind has the generation of its last change.
2. Readers keep the rows of a kind in memory. Each read asks SQLite whether another connection has written
   (`PRAGMA data_version`, some microseconds), and only then looks at the generations.
3. Writers use a connection of their own in a thread, one transaction for each change, and wait for other writers up to
   a deadline. A writer that dies leaves nothing of its change; a writer that stands still delays other writers only.
4. Each start of the server makes a new file (`begin`), and `current` is a link to it. So nothing of an earlier server
   stays, not even what a process that stood still would write later. Processes that outlive a server follow the link.

Write-ahead logging keeps readers and writers from waiting for each other. Nothing is synchronized to the disk: the
state ends with the server, and the death of a process loses nothing that was written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from ipc import deadline
from ipc.processes.paths import RunPaths

log = logging.getLogger(__name__)

T = TypeVar("T")

CURRENT = "current"
TRY_S = 0.1
"""How long one attempt to write waits for another writer."""
WRITE_S = 2.0
"""How long a change waits for other writers where no request's deadline says so."""
_ENDING = ".db"
_SCHEMA = """
CREATE TABLE kinds (kind TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE state (
    kind TEXT, key BLOB, value BLOB NOT NULL, generation INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TRIGGER removed AFTER DELETE ON state
BEGIN UPDATE kinds SET generation = generation + 1 WHERE kind = OLD.kind; END;
"""


class StoreUnreadable(OSError):
    """SQLite cannot read or write the file; `strerror` says why."""


class Row(NamedTuple):
    """One row; `at` is the time of its writing, in seconds since 1970."""

    value: bytes
    generation: int
    at: float


class Change:
    """What one transaction reads and writes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, kind: str) -> dict[str, Row]:
        """All rows of a kind, by key."""
        found = self._connection.execute(_ROWS, (kind,))
        return {_text(key): Row(value, generation, at) for key, value, generation, at in found}

    def get(self, kind: str, key: str) -> Row | None:
        """One row."""
        found = self._connection.execute(f"{_ROWS} AND key = ?", (kind, _key(key))).fetchone()
        return None if found is None else Row(*found[1:])

    def put(self, kind: str, key: str, value: bytes) -> None:
        """Write a row, in the place of another one of that key."""
        row = kind, _key(key), value, self._next(kind), time.time()
        self._connection.execute("REPLACE INTO state VALUES (?, ?, ?, ?, ?)", row)

    def remove(self, kind: str, key: str) -> None:
        """Delete a row, if there is one."""
        self._connection.execute("DELETE FROM state WHERE kind = ? AND key = ?", (kind, _key(key)))

    def _next(self, kind: str) -> int:
        """The generation of a change that is made now: the time, or one more than the last one."""
        (last,) = self._connection.execute("SELECT coalesce(max(generation), 0) FROM kinds").fetchone()
        generation: int = max(last + 1, time.time_ns())
        self._connection.execute("REPLACE INTO kinds VALUES (?, ?)", (kind, generation))
        return generation


_ROWS = "SELECT key, value, generation, at FROM state WHERE kind = ?"


class Store:
    """The state of one server, as one process reads and writes it. Any thread; never across a fork."""

    def __init__(self, paths: RunPaths) -> None:
        """Opens nothing yet."""
        self.directory = paths.store()
        self._link = self.directory / CURRENT
        self._lock = threading.Lock()
        self._name = ""
        self._reader: sqlite3.Connection | None = None
        self._version = -1
        self._generations: dict[str, int] = {}
        self._kinds: dict[str, tuple[int, dict[str, Row]]] = {}

    def rows(self, kind: str) -> Mapping[str, Row]:
        """All rows of a kind by key, as the last change of any process left them; another mapping after each change.

        While SQLite cannot read, these are the rows that it read last; `StoreUnreadable` if there were none.
        """
        with self._lock:
            try:
                self._look()
                return self._of(kind)
            except (StoreUnreadable, _Locked) as error:
                if (known := self._kinds.get(kind)) is None:
                    raise StoreUnreadable(errno.EIO, "the server's shared state cannot be read") from error
                log.warning("the server's shared state may be old, it cannot be read now: %s", error)
                return known[1]

    async def write(self, how: Callable[[Change], T], until_ns: int = 0) -> T:
        """Run `how` in one transaction, in a thread; nothing changes when it raises.

        Raises `DeadlineExceeded` when another process is still writing at `until_ns` (0: after `WRITE_S`), and
        `StoreUnreadable`. On cancellation the attempt that runs ends first, and may have made its change.
        """
        until_ns = until_ns or deadline.after(WRITE_S)
        while True:
            attempt = asyncio.ensure_future(asyncio.to_thread(self._write, how))
            try:
                return await asyncio.shield(attempt)
            except asyncio.CancelledError:
                await asyncio.wait([attempt])
                raise
            except _Locked:
                deadline.check(until_ns, "before another process had ended its change of the server's state")

    def write_now(self, how: Callable[[Change], T], until_ns: int = 0) -> T:
        """`write` in the calling thread, which must not be that of an event loop."""
        until_ns = until_ns or deadline.after(WRITE_S)
        while True:
            try:
                return self._write(how)
            except _Locked:
                deadline.check(until_ns, "before another process had ended its change of the server's state")

    def close(self) -> None:
        """Close the connection; a later read opens it again."""
        with self._lock:
            self._forget()

    def _look(self) -> None:
        """Follow the link, and drop what is known if another connection has written since the last look."""
        try:
            # PERF: a third of the time of Path.readlink, and each request that asks for a region looks.
            name = os.readlink(str(self._link))  # noqa: PTH115
        except FileNotFoundError:
            name = ""
        with _readable():
            if name != self._name:
                reader = _connect(self.directory / name, 0) if name else None
                self._forget()
                self._reader, self._name = reader, name
            if self._reader is None:
                return
            (version,) = self._reader.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                self._generations = dict(self._reader.execute("SELECT kind, generation FROM kinds"))
                self._version = version

    def _of(self, kind: str) -> dict[str, Row]:
        generation = self._generations.get(kind, 0)
        known = self._kinds.get(kind)
        if known is None or known[0] != generation:
            with _readable():
                rows = Change(self._reader).rows(kind) if self._reader is not None and generation else {}
            # NOTE: rows that are newer than `generation` are read again after the next look.
            known = self._kinds[kind] = generation, rows
        return known[1]

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._name, self._version = None, "", -1
        self._generations, self._kinds = {}, {}

    def _write(self, how: Callable[[Change], T]) -> T:
        """One attempt. Raises `_Locked` when another writer was not done within `TRY_S`."""
        with _readable(), closing(_connect(self._file(), TRY_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = how(Change(connection))
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        return result

    def _file(self) -> Path:
        """The file of the running server, made when there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self.directory / self._link.readlink()
        made = _make(self.directory)
        try:
            self._link.symlink_to(made.name)
        except FileExistsError:
            made.unlink()
        return self.directory / self._link.readlink()


class _Locked(Exception):
    """Another connection is writing."""


def begin(paths: RunPaths) -> None:
    """The server starts: its state is empty, and what earlier ones left is deleted. Raises `StoreUnreadable`."""
    directory = paths.store()
    with _readable():
        made = _make(directory)
    link = made.with_suffix(".link")
    link.symlink_to(made.name)
    link.replace(directory / CURRENT)
    for path in directory.glob(f"*{_ENDING}*"):
        if not path.name.startswith(made.name):
            path.unlink(missing_ok=True)


def _make(directory: Path) -> Path:
    """A new file with its tables, which no link names yet."""
    path = directory / f"{secrets.token_hex(8)}{_ENDING}"
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(_connect(path, TRY_S)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
    return path


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA synchronous = OFF")
    return connection


@contextmanager
def _readable() -> Iterator[None]:
    """SQLite's errors as `StoreUnreadable`, and as `_Locked` where a later attempt may succeed."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _Locked from error
        raise StoreUnreadable(errno.EIO, f"the server's shared state cannot be used: {error}") from error


def _key(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogatepass")
