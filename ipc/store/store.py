"""One SQLite file in the run directory for the small state that all processes of one server share.

1. A row has a kind (the key space of one sort of state), a key, and a value: JSON of the type that its `Table` names.
   SQLite itself counts the changes of each kind (`kinds.generation`).
2. Readers keep the decoded rows of a kind in memory. Each read asks SQLite whether another connection has written
   (`PRAGMA data_version`, some microseconds), and only then looks at the generations.
3. Writers use a connection of their own in a thread, one transaction for each change, and wait for other writers up to
   a deadline. A writer that dies leaves nothing of its change; a writer that stands still delays other writers only.
4. Each start of the server makes a new file (`begin`), and `current` is a link to it. So nothing of an earlier server
   stays, not even what a process that stood still would write later. Processes that outlive a server follow the link.

Write-ahead logging keeps readers and writers from waiting for each other. Nothing is synchronized to the disk: the
state ends with the server, and the death of a process loses nothing that was written.

State that survives the server is in files of `ipc.store.lasting`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from ipc import deadline
from ipc.decoding import learnt
from ipc.errors import DeadlineExceeded, PenstockError
from ipc.processes.paths import RunPaths

log = logging.getLogger(__name__)
R = TypeVar("R")
T = TypeVar("T")
How = Callable[[sqlite3.Connection], R]
"""Reads or writes inside of one transaction."""

CURRENT = "current"
LOOK_S = 0.01
"""How long a read waits where SQLite brings its own index in order after a death; a read never waits for a writer."""
TRY_S = 0.1
"""How long one attempt to write waits for another writer."""
WRITE_S = 2.0
"""How long a change waits for other writers where no request's deadline says so."""
_ENDING = ".db"
_COUNT = (
    "INSERT INTO kinds VALUES ({row}.kind, 1) ON CONFLICT (kind) DO UPDATE SET generation = generation + 1;"
)
_SCHEMA = "\n".join(
    [
        "CREATE TABLE kinds (kind TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;",
        "CREATE TABLE state (kind TEXT, key BLOB, value BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID;",
        f"CREATE TRIGGER inserted AFTER INSERT ON state BEGIN {_COUNT.format(row='NEW')} END;",
        f"CREATE TRIGGER updated AFTER UPDATE ON state BEGIN {_COUNT.format(row='NEW')} END;",
        f"CREATE TRIGGER deleted AFTER DELETE ON state BEGIN {_COUNT.format(row='OLD')} END;",
    ]
)
_PUT = "INSERT INTO state VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value"


class StoreUnreadable(OSError):
    """SQLite cannot read or write the file; `strerror` says why, and `errno` is ENOSPC without room on the disk."""

    retry_after_s: float | None = None


class StoreAway(StoreUnreadable):
    """Brokers keep the store, and none can be reached; trying again may help."""

    retry_after_s = 1.0


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

    def newer(self, kind: str, known: tuple[str, int]) -> tuple[tuple[str, int], Any] | None:
        """The rows of a kind and their stamp, or None while the stamp is still `known`.

        Raises `StoreUnreadable`.
        """
        with self._lock, translated():
            self._look()
            stamp = self._name, self._generations.get(kind, 0)
            if stamp == known:
                return None
            # NOTE: rows that are newer than their stamp are read again after the next look.
            return stamp, [] if self._reader is None else self._reader.execute(
                "SELECT key, value FROM state WHERE kind = ?", (kind,)
            ).fetchall()

    def close(self) -> None:
        """Close the connection; a later read opens another."""
        with self._lock:
            self._forget()

    def _look(self) -> None:
        """Follow the link, and learn which kinds changed if another connection has written since the last look."""
        try:
            # PERF: a third of the time of Path.readlink, and each request that asks for a region looks.
            name = os.readlink(str(self._link))  # noqa: PTH115
        except FileNotFoundError:
            name = ""
        if name != self._name:
            reader = connect(self.directory / name, LOOK_S) if name else None
            self._forget()
            self._reader, self._name = reader, name
        if self._reader is None:
            return
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        if version != self._version:
            self._generations = dict(self._reader.execute("SELECT kind, generation FROM kinds"))
            self._version = version

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._name, self._version, self._generations = None, "", -1, {}

    def attempt(self, how: How[R]) -> R:
        """Run `how` in one transaction. Raises `Locked` when another writer was not done within `TRY_S`."""
        with translated(), closing(connect(self._file(), TRY_S)) as connection:
            return transacted(connection, "BEGIN IMMEDIATE", how)

    def _file(self) -> Path:
        """The file of the running server, made when there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self.directory / self._link.readlink()
        path = _make(self.directory)
        try:
            self._link.symlink_to(path.name)
        except FileExistsError:
            path.unlink()
        return self.directory / self._link.readlink()


class Table(Generic[T]):
    """The rows of one kind, whose values are of one type."""

    def __init__(self, store: Store, kind: str, type_: type[T]) -> None:
        self._store, self._kind, self._type = store, kind, learnt(type_)
        self._read: tuple[tuple[str, int], dict[str, T]] = ("", -1), {}
        """Stamp and rows that were read last; one object, since several threads may read."""

    def rows(self) -> Mapping[str, T]:
        """All rows by key, as the last change of any process left them; another mapping after each change.

        While SQLite cannot read, these are the rows that were read last; `StoreUnreadable` if there were none.
        """
        stamp, rows = self._read
        try:
            newer = self._store.newer(self._kind, stamp)
        except (StoreUnreadable, Locked) as error:
            if stamp[1] < 0:
                raise StoreUnreadable(
                    errno.EIO, f"the server's shared state cannot be read: {error}"
                ) from error
            log.warning("the server's shared state may be old, it cannot be read now: %s", error)
            return rows
        if newer is not None:
            stamp, stored = newer
            rows = self._decoded(stored)
            self._read = stamp, rows
        return rows

    def _decoded(self, stored: Iterable[tuple[bytes, bytes]]) -> dict[str, T]:
        """Rows by key. A row that is none of this table is told and passed over; the next change deletes the row."""
        rows: dict[str, T] = {}
        for key, value in stored:
            try:
                rows[_text(key)] = msgspec.json.decode(value, type=self._type)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("a row %a of the server's shared state is passed over: %s", self._kind, error)
        return rows

    async def change(self, how: Callable[[dict[str, T]], R], until_ns: int = 0) -> R:
        """Let `how` change the rows, in one transaction and a thread; nothing changes when `how` raises.

        Raises `DeadlineExceeded` when another process is still writing at `until_ns` (0: after `WRITE_S`), and
        `StoreUnreadable`. On cancellation the attempt that runs ends first, and may have made its change.
        """
        until_ns = until_ns or deadline.after(WRITE_S)
        while True:
            attempt = asyncio.ensure_future(asyncio.to_thread(self._attempt, how))
            try:
                return await asyncio.shield(attempt)
            except asyncio.CancelledError:
                await asyncio.wait([attempt])
                raise
            except Locked:
                deadline.check(until_ns, _WAITING)

    def change_now(self, how: Callable[[dict[str, T]], R]) -> R:
        """`change` in the calling thread, which must not run an event loop."""
        until_ns = deadline.after(WRITE_S)
        while True:
            try:
                return self._attempt(how)
            except Locked:
                deadline.check(until_ns, _WAITING)

    def change_soon(
        self, how: Callable[[dict[str, T]], None], done: Callable[[OSError | PenstockError | None], None]
    ) -> None:
        """`change` in a thread, for callers that cannot wait; `done` is told on the event loop how the change ended.

        Without a running event loop, the change is made before this returns.
        """

        def work() -> OSError | PenstockError | None:
            try:
                self.change_now(how)
            except (OSError, DeadlineExceeded) as error:
                return error
            return None

        def tell(ended: asyncio.Future[OSError | PenstockError | None]) -> None:
            if not ended.cancelled():
                done(ended.result())

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            done(work())
        else:
            loop.run_in_executor(None, work).add_done_callback(tell)

    def _attempt(self, how: Callable[[dict[str, T]], R]) -> R:
        def write(connection: sqlite3.Connection) -> R:
            stored = connection.execute(
                "SELECT key, value FROM state WHERE kind = ?", (self._kind,)
            ).fetchall()
            before, rows = dict(stored), self._decoded(stored)
            result = how(rows)
            after = {_key(key): msgspec.json.encode(value) for key, value in rows.items()}
            changed = [(self._kind, key, value) for key, value in after.items() if before.get(key) != value]
            connection.executemany(_PUT, changed)
            gone = [(self._kind, key) for key in before.keys() - after.keys()]
            connection.executemany("DELETE FROM state WHERE kind = ? AND key = ?", gone)
            return result

        return self._store.attempt(write)


_WAITING = "before another process had ended its change of the server's state"


class Locked(Exception):
    """Another connection is writing."""


def begin(paths: RunPaths) -> None:
    """The server starts: its state is empty, and files of earlier servers are deleted. Raises `StoreUnreadable`."""
    directory = paths.store()
    with translated():
        current = _make(directory)
    # NOTE: a name that the next start deletes, should this one end here.
    link = current.with_name(f"{current.name}.link")
    link.symlink_to(current.name)
    link.replace(directory / CURRENT)
    for path in directory.glob(f"*{_ENDING}*"):
        if not path.name.startswith(current.name):
            path.unlink(missing_ok=True)


def _make(directory: Path) -> Path:
    """A new file with its tables, which no link names yet."""
    path = directory / f"{secrets.token_hex(8)}{_ENDING}"
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(connect(path, TRY_S)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
    return path


def connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection to a file that is there, for any one thread at a time; each wait for others ends by `timeout_s`."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def transacted(connection: sqlite3.Connection, begin: str, how: How[R]) -> R:
    """The result of `how` inside of one transaction, which the statement `begin` opens."""
    connection.execute(begin)
    try:
        result = how(connection)
        connection.execute("COMMIT")
    except BaseException:
        # NOTE: SQLite has rolled back by itself where the disk is full.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


@contextmanager
def translated() -> Iterator[None]:
    """SQLite's errors as `StoreUnreadable`, and as `Locked` where a later attempt may succeed."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Locked from error
        number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
        raise StoreUnreadable(number, f"the server's shared state cannot be used: {error}") from error


def _key(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(key: bytes) -> str:
    return key.decode(errors="surrogatepass")
