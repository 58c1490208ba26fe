"""A copy of the rows that the brokers keep, in SQLite: what a write would change, and writes of anybody taken in.

1. `tried` runs a write and undoes the write; triggers note the rows that it would change.
2. `take` holds writes by their numbers: a write that is older than what the copy has under its key changes nothing.
3. `_keys` has the number of the last write for each key, also for rows that are gone, whose marks the brokers keep for
   a while.
4. Values that are no row of the table, or that lie under the key of another row, are told and passed over.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from frontend.state.places import Tables
from ipc.store.lasting import LastingStore
from ipc.store.store import How
from ipc.wire.kept_rows import Value, are_values, key_of, read_values, values_of

log = logging.getLogger(__name__)

R = TypeVar("R")
MARKS_S = 3600.0
"""How long marks of rows that are gone stay at the brokers."""
_KEYS = """
CREATE TABLE IF NOT EXISTS _keys (
    key TEXT PRIMARY KEY, revision INTEGER NOT NULL, place BLOB, large TEXT NOT NULL, gone REAL
) WITHOUT ROWID;
"""
_PUT_KEY = "INSERT OR REPLACE INTO _keys VALUES (?, ?, ?, ?, ?)"
_CHANGED = "CREATE TEMP TABLE IF NOT EXISTS _changed (name TEXT, one, two)"


class _Table(NamedTuple):
    """Names of the columns of a table, and where those of its identity stand."""

    columns: tuple[str, ...]
    identity: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A row to write, None for one that is gone; `known` is the write that it replaces, `large` that one's parts."""

    key: str
    table: str
    row: tuple[Value, ...] | None
    known: int
    large: str


@dataclass(frozen=True, slots=True)
class Written:
    """A write of anybody, by its number; `values` None for a row that is gone, `large` names its parts."""

    revision: int
    key: str
    table: str = ""
    values: Sequence[Any] | None = None
    large: str = ""


class _Undone(Exception, Generic[R]):
    """Carries what a write would have done out of its transaction."""

    def __init__(self, result: R, changes: list[Change]) -> None:
        self.result, self.changes = result, changes


class RowsCopy:
    """The copy of one process, in a file of its own. All methods raise `StoreUnreadable`."""

    def __init__(self, path: Path, schema: str, tables: Tables, name: str) -> None:
        """`name` is for messages. Opens nothing yet."""
        self._store, self._tables, self._name = LastingStore(path, schema + _KEYS), tables, name
        self._columns: dict[str, _Table] = {}
        self.read, self.find = self._store.read, self._store.find

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return bool(self._columns)

    async def open(self) -> None:
        """Learn the columns, and note from now on which rows change."""
        await self._store.write(self._prepare)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(_CHANGED)
        columns = dict[str, _Table]()
        for name, identity in self._tables.items():
            names = tuple(row[1] for row in connection.execute(f"PRAGMA table_info({name})"))
            columns[name] = _Table(names, tuple(names.index(column) for column in identity))
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                values = ", ".join([*(f"{row}.{column}" for column in identity), "NULL"][:2])
                connection.execute(
                    f"CREATE TEMP TRIGGER IF NOT EXISTS _{name}_{event} AFTER {event} ON main.{name} "
                    f"BEGIN INSERT INTO _changed VALUES ('{name}', {values}); END"
                )
        self._columns = columns

    async def tried(self, how: How[R]) -> tuple[R, list[Change]]:
        """What a write gives, and the rows that it would change. Raises what `how` raises."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM temp._changed")
            result = how(connection)
            raise _Undone(result, self._changes(connection))

        try:
            await self._store.write(work)
        except _Undone as undone:
            return undone.result, undone.changes
        raise AssertionError

    def _changes(self, connection: sqlite3.Connection) -> list[Change]:
        """Rows to write, then rows that are gone, each in the order of the tables."""
        found = connection.execute("SELECT DISTINCT name, one, two FROM temp._changed").fetchall()
        changes = list[Change]()
        for name, *values in found:
            identity = values[: len(self._tables[name])]
            key = key_of(name, identity)
            row = connection.execute(f"SELECT * FROM {name} WHERE {self._where(name)}", identity).fetchone()
            query = "SELECT revision, large, place IS NULL FROM _keys WHERE key = ?"
            revision, large, is_gone = connection.execute(query, (key,)).fetchone() or (0, "", True)
            if row is not None or not is_gone:
                changes.append(Change(key, name, row, revision, large))
        order = list(self._tables)
        return sorted(changes, key=lambda change: (change.row is None, order.index(change.table)))

    def _where(self, name: str) -> str:
        return " AND ".join(f"{column} = ?" for column in self._tables[name])

    async def clear(self) -> None:
        """Begin anew, without rows."""

        def work(connection: sqlite3.Connection) -> None:
            for name in (*self._tables, "_keys"):
                connection.execute(f"DELETE FROM {name}")

        await self._store.write(work)

    async def take(self, written: list[Written]) -> None:
        """Hold writes."""
        in_order = sorted(written, key=lambda each: each.revision)
        await self._store.write(lambda connection: self._apply(connection, in_order))

    def _apply(self, connection: sqlite3.Connection, written: list[Written]) -> None:
        for each in written:
            query = "SELECT revision, place FROM _keys WHERE key = ?"
            revision, before = connection.execute(query, (each.key,)).fetchone() or (0, None)
            if revision >= each.revision:
                continue
            place = None if each.values is None else self._insert(connection, each, each.values)
            if place is None and before is not None:
                self._remove(connection, each.key, before)
            gone = time.monotonic() if place is None else None
            connection.execute(_PUT_KEY, (each.key, each.revision, place, each.large if place else "", gone))
        connection.execute("DELETE FROM temp._changed")

    def _insert(self, connection: sqlite3.Connection, each: Written, values: Sequence[Any]) -> bytes | None:
        """Insert or replace a row; the values of its identity, None for values that are no row under this key."""
        table = self._columns.get(each.table)
        if table is None or len(values) != len(table.columns) or not are_values(values):
            log.error("a row of %s has other columns and is passed over", self._name)
            return None
        identity = [values[at] for at in table.identity]
        if key_of(each.table, identity) != each.key:
            log.error("a row of %s lies under the key of another and is passed over", self._name)
            return None
        name, columns = each.table, table.columns
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
        try:
            connection.execute(
                f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
                f"ON CONFLICT ({', '.join(self._tables[name])}) DO UPDATE SET {changes}",
                list(values),
            )
        except (sqlite3.Error, OverflowError) as error:
            log.error("a row of %s is passed over: %s", self._name, error)
            return None
        return values_of(identity)

    def _remove(self, connection: sqlite3.Connection, key: str, place: bytes) -> None:
        name, _, _ = key.partition(".")
        connection.execute(f"DELETE FROM {name} WHERE {self._where(name)}", read_values(place))

    async def compare(self, there: Collection[str]) -> list[int]:
        """Remove rows whose keys are not `there`; the numbers of marks that are older than `MARKS_S`, forgotten now."""
        return await self._store.write(lambda connection: self._compared(connection, there))

    def _compared(self, connection: sqlite3.Connection, there: Collection[str]) -> list[int]:
        before, old = time.monotonic() - MARKS_S, list[int]()
        known = connection.execute("SELECT key, place, gone, revision FROM _keys").fetchall()
        for key, place, gone, revision in known:
            is_old = place is None and gone is not None and gone < before
            if key in there and not is_old:
                continue
            if place is not None:
                self._remove(connection, key, place)
            elif key in there:
                old.append(revision)
            connection.execute("DELETE FROM _keys WHERE key = ?", (key,))
        connection.execute("DELETE FROM temp._changed")
        return old

    async def large(self) -> set[str]:
        """Names of the parts of large rows."""

        def read(connection: sqlite3.Connection) -> set[str]:
            return {name for (name,) in connection.execute("SELECT large FROM _keys WHERE large != ''")}

        return await self._store.read(read)
