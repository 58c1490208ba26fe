"""Stored responses: rows that all frontends share and a restart keeps, in the state directory or at the brokers.

1. A response is stored when it has ended. A response in the background is stored when it is asked for: its row names
   the process that runs it, and its neutral events are kept beside it.
2. The end of a response is written only while its row is unfinished. So the first end counts: a late end never
   replaces a cancellation.
3. A response whose process is dead is adopted by another process of the same server: one write names the new process,
   and only the first of these writes finds the dead one. A process that has lost its response writes nothing more.
   The row keeps the request until the end, and each piece of events a mark (`frontend.engine.events`).
   Where no process can go on with a response, or its server has ended, the process that looks ends the response as
   failed.
4. Each row has an owner, the public id of an API key. To everybody else the response does not exist.
5. Each new row deletes what is too old, too many or too much, oldest first, but nothing that still runs.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson

from frontend.engine.events import Event, Mark, Past
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.event_bytes import decode, encode
from frontend.protocols.responses.items import DamagedEvents
from frontend.protocols.responses.output import Output, Resource
from frontend.state.places import Lives, Place, Rows
from ipc import settings
from ipc.errors import InvalidInput, PenstockError
from ipc.store.store import How, StoreUnreadable

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_marks = msgspec.msgpack.Decoder(Mark)
FILE = "responses-3.db"
"""The number rises when the tables change, or the kinds of events or their fields."""
TABLES = {"events": ("id", "number"), "responses": ("id",)}
"""The row of a response that has ended comes behind its events, so that whoever sees the end has all events."""
MAX_EVENTS_NBYTES = 8 << 20
"""Bytes of the events of one response; of a response with more none are kept."""
_ROW_NBYTES = 512
_STATUSES = ", ".join(f"'{status}'" for status in resource.UNFINISHED)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, status TEXT NOT NULL, runner TEXT NOT NULL,
    followable INTEGER NOT NULL, begun BLOB NOT NULL, whole BLOB, history BLOB NOT NULL, items BLOB NOT NULL,
    nbytes INTEGER NOT NULL, events_nbytes INTEGER NOT NULL DEFAULT 0, server TEXT NOT NULL, movable INTEGER NOT NULL,
    request BLOB NOT NULL, moves INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS by_runner ON responses (runner) WHERE runner != '';
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL, number INTEGER NOT NULL, entries BLOB NOT NULL, mark BLOB, PRIMARY KEY (id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), count INTEGER, nbytes INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE totals SET count = count + 1, nbytes = nbytes + NEW.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS grown AFTER UPDATE OF nbytes ON responses BEGIN
    UPDATE totals SET nbytes = nbytes + NEW.nbytes - OLD.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON responses BEGIN
    UPDATE totals SET count = count - 1, nbytes = nbytes - OLD.nbytes;
    DELETE FROM events WHERE id = OLD.id;
END;
"""
_COLUMNS = "id, owner, created, status, runner, server, movable, followable, begun, whole, history, items"
_INSERT = f"INSERT OR IGNORE INTO responses ({_COLUMNS}, request, nbytes) VALUES (?{13 * ', ?'})"
_FIND = "SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND created > ?"
# PERF: conversations are long, and most reads need no more than the response.
_PART = _COLUMNS.replace("history, items", "x'', x''")
_FIND_WHOLE, _FIND_PART = (_FIND.format(columns=columns) for columns in (_COLUMNS, _PART))
_GROW = f"""
UPDATE responses SET status = 'in_progress', nbytes = nbytes + ?1, events_nbytes = events_nbytes + ?1
WHERE id = ?2 AND runner = ?3 AND status IN ({_STATUSES})
"""
_END = f"""
UPDATE responses SET status = ?1, whole = ?2, runner = '', request = x'',
nbytes = nbytes + length(?2) - length(request) WHERE id = ?3 AND status IN ({_STATUSES})
"""
_ADOPT = f"""
UPDATE responses SET runner = ?1, moves = moves + 1 WHERE id = ?2 AND runner = ?3 AND movable
AND status IN ({_STATUSES}) RETURNING owner, begun, request, moves, followable
"""
_IS_FOLLOWABLE = "SELECT 1 FROM responses WHERE id = ? AND followable AND events_nbytes <= ?"
_OLDEST = f"SELECT id FROM responses WHERE status NOT IN ({_STATUSES}) ORDER BY created LIMIT 16"
_UNFINISHED = f"SELECT {_PART} FROM responses WHERE runner != ''"
T = TypeVar("T")
Items = list[dict[str, Any]]


class Piece(NamedTuple):
    """Events of a response, which are its piece `number`, and the mark behind them."""

    number: int
    events: list[Event]
    mark: Mark | None = None


def together(marks: Iterable[Mark]) -> Mark | None:
    """The mark of all that these tell, in the order of the events; None without any."""
    whole: Mark | None = None
    for mark in marks:
        ids = mark.ids if whole is None else [a + b for a, b in zip(whole.ids, mark.ids, strict=True)]
        whole = msgspec.structs.replace(mark, ids=ids)
    return whole


def _past_of(events: list[Event], marks: Sequence[bytes], moves: int) -> Past | None:
    mark = together(_marks.decode(mark) for mark in marks)
    return None if mark is None else Past(events, mark, moves)


class ResponseNotFound(InvalidInput):
    """No response of that id is stored for the caller."""

    status = 404


class ResponsesUnavailable(PenstockError):
    """Stored responses cannot be read or written now."""

    status, retryable = 503, True


@dataclass(frozen=True, slots=True)
class Stored:
    """One row.

    `runner` and `server` are process and server at work, and `movable` tells whether another process could go on.
    `whole` is the response as JSON once it has ended, `history` what its conversation began with; `history` and `items`
    are empty where only the response was asked for. A response is `followable` while all of its events are kept.
    """

    id: str
    owner: str
    created: float
    status: str
    runner: str
    server: str
    movable: bool
    followable: bool
    begun: bytes
    whole: bytes | None
    history: bytes
    items: bytes

    @property
    def is_finished(self) -> bool:
        """Whether the response has ended: its row will not change any more."""
        return self.status not in resource.UNFINISHED

    @property
    def body(self) -> bytes:
        """The response as JSON, as it is now."""
        return self.whole or orjson.dumps(resource.at(orjson.loads(self.begun), self.status))

    @property
    def nbytes(self) -> int:
        """Bytes of its JSON."""
        return sum(map(len, (self.begun, self.whole or b"", self.history, self.items)))

    def conversation(self) -> Items:
        """The items of its conversation: those before it, its input, its output."""
        output = orjson.loads(self.whole)["output"] if self.whole else []
        return [*orjson.loads(self.history), *orjson.loads(self.items), *output]


@dataclass(frozen=True, slots=True)
class Adopted:
    """An unfinished response that belongs to this process now.

    `request` are the bytes that `put` was given, and `number` is that of the next piece of events. Without a `mark` in
    `past` nobody can go on with the text.
    """

    owner: str
    begun: Resource
    request: bytes
    number: int
    events: list[Event]
    past: Past | None
    moves: int


def _row_of(
    begun: Resource,
    owner: str,
    history: Items,
    items: Items,
    whole: Resource | None,
    movable: bool,
    lives: Lives,
) -> Stored:
    return Stored(
        begun["id"],
        owner,
        time.time(),
        (whole or begun)["status"],
        lives.own() if whole is None else "",
        lives.server() if whole is None else "",
        movable,
        begun["background"],
        orjson.dumps(begun),
        None if whole is None else orjson.dumps(whole),
        orjson.dumps(history),
        orjson.dumps(items),
    )


class ResponseStore:
    """The stored responses of a server. All methods raise `ResponsesUnavailable`."""

    def __init__(self, place: Callable[[], Place], bounds: settings.Responses) -> None:
        """Opens nothing, and asks for its place with the first use."""
        self._place_of, self._bounds = place, bounds

    @cached_property
    def _place(self) -> Place:
        return self._place_of()

    @cached_property
    def _rows(self) -> Rows:
        return self._place.rows(FILE, _SCHEMA, TABLES)

    async def put(
        self,
        begun: Resource,
        owner: str,
        history: Items,
        items: Items,
        whole: Resource | None = None,
        *,
        request: Callable[[], bytes] = bytes,
    ) -> None:
        """Store a response that has ended as `whole`, or that this process is going to run in the background.

        Another process that goes on with the run gets the bytes of `request`; without bytes none can go on.
        A response that is stored already stays as it is.
        """

        def write(connection: sqlite3.Connection) -> None:
            kept = request()
            row = _row_of(begun, owner, history, items, whole, bool(kept), self._place.lives)
            self._put(connection, row, kept)

        await _reached(self._rows.write(write))

    async def get(self, id_: str, owner: str, *, with_items: bool = False) -> Stored:
        """A response, `with_items` of its conversation. Raises `ResponseNotFound`."""
        find = _FIND_WHOLE if with_items else _FIND_PART
        return await self._read(lambda connection: self._found(connection, id_, owner, find), lambda row: row)

    async def follow(self, id_: str, owner: str, known: int) -> tuple[Stored, list[bytes]]:
        """A response, and its kept events from piece number `known` on. Raises `ResponseNotFound`."""

        def read(connection: sqlite3.Connection) -> tuple[Stored, list[bytes]]:
            row = self._found(connection, id_, owner, _FIND_PART)
            return row, _pieces(connection, id_, known) if row.followable else []

        return await self._read(read, lambda found: found[0])

    async def _read(self, how: How[T], row_of: Callable[[T], Stored]) -> T:
        """What `how` reads, read again if nobody goes on with the response of its row any more."""
        stored = await _reached(self._rows.read(how))
        row = row_of(stored)
        if row.is_finished or not await self._settle_lost(row):
            return stored
        return await _reached(self._rows.read(how))

    async def _settle_lost(self, row: Stored) -> bool:
        """End an unfinished response that nobody goes on with as failed; false where somebody does."""
        if self._place.lives.is_running(row.runner) or (
            row.movable and self._place.lives.is_running(row.server)
        ):
            return False
        has_server = self._place.lives.is_running(row.server)
        what = "server process that ran this response" if has_server else "server that ran this response"
        lost = PenstockError(f"the {what} has ended")
        await self.settle(row, lambda begun, output: resource.failed(begun, output, lost))
        return True

    async def orphans(self) -> list[Stored]:
        """Responses of this server whose process is dead and that another process can go on with.

        Other responses of dead processes are ended as failed.
        """
        # NOTE: asked for at once, since a process whose arbiter has ended gets another parent.
        server = self._place.lives.server()
        if not self._rows.exists():
            return []

        def find(connection: sqlite3.Connection) -> list[Stored]:
            return [Stored(*row) for row in connection.execute(_UNFINISHED)]

        rows = [
            row
            for row in await _reached(self._rows.read(find))
            if not self._place.lives.is_running(row.runner)
        ]
        return [row for row in rows if not await self._settle_lost(row) and row.server == server]

    async def adopt(self, orphan: Stored) -> Adopted | None:
        """Make the response of a dead process one of this process; None where another process was first."""

        def write(connection: sqlite3.Connection) -> Adopted | None:
            row = connection.execute(_ADOPT, (self._place.lives.own(), orphan.id, orphan.runner)).fetchone()
            if row is None:
                return None
            owner, begun, request, moves, followable = row
            pieces = connection.execute(
                "SELECT entries, mark FROM events WHERE id = ? ORDER BY number", (orphan.id,)
            ).fetchall()
            events = [event for entries, _ in pieces for event in decode(entries)]
            marks = [mark for _, mark in pieces]
            past = _past_of(events, marks, moves) if followable and None not in marks else None
            return Adopted(owner, orjson.loads(begun), request, len(pieces), events, past, moves)

        return await _reached(self._rows.write(write))

    async def settle(self, row: Stored, how: Callable[[Resource, Output], Resource]) -> bool:
        """End an unfinished response from outside, with the output so far; whether it was still unfinished.

        The output ends before the first events that cannot be read.
        """

        def write(connection: sqlite3.Connection) -> bool:
            begun = orjson.loads(row.begun)
            output = Output(begun)
            try:
                for entries in _pieces(connection, row.id, 0):
                    output.take(decode(entries))
            except DamagedEvents as error:
                log.error("kept events of the response %s cannot be read: %s", row.id, error)
            return _end(connection, how(begun, output))

        return await _reached(self._rows.write(write))

    async def finish(self, whole: Resource, piece: Piece) -> bool:
        """End a response of this process with its last events; whether it was unfinished, and of this process."""
        runner = self._place.lives.own()

        def write(connection: sqlite3.Connection) -> bool:
            return _grow(connection, whole["id"], piece, runner) and _end(connection, whole)

        return await _reached(self._rows.write(write))

    async def grow(self, pieces: Mapping[str, Piece]) -> set[str]:
        """Keep new events of responses that this process runs, by id; which of these go on.

        The others have been cancelled or deleted, or belong to another process.
        """
        runner = self._place.lives.own()

        def write(connection: sqlite3.Connection) -> set[str]:
            return {id_ for id_, piece in pieces.items() if _grow(connection, id_, piece, runner)}

        def look(connection: sqlite3.Connection) -> set[str]:
            return {id_ for id_ in pieces if _is_unfinished(connection, id_, runner)}

        if any(piece.events for piece in pieces.values()):
            return await _reached(self._rows.write(write))
        return await _reached(self._rows.read(look))

    async def delete(self, id_: str, owner: str) -> None:
        """Delete a response. Raises `ResponseNotFound`."""

        def write(connection: sqlite3.Connection) -> None:
            self._found(connection, id_, owner, _FIND_PART)
            connection.execute("DELETE FROM responses WHERE id = ?", (id_,))

        await _reached(self._rows.write(write))

    def _found(self, connection: sqlite3.Connection, id_: str, owner: str, find: str) -> Stored:
        row = connection.execute(find, (id_, owner, time.time() - self._bounds.max_age_s)).fetchone()
        if row is None:
            raise ResponseNotFound(f"no response with the id {id_[:100]!a} is stored")
        return Stored(*row)

    def _put(self, connection: sqlite3.Connection, row: Stored, request: bytes) -> None:
        values = tuple(getattr(row, name) for name in Stored.__slots__)
        connection.execute(_INSERT, (*values, request, _ROW_NBYTES + row.nbytes + len(request)))
        oldest = time.time() - self._bounds.max_age_s
        connection.execute("DELETE FROM responses WHERE created <= ?", (oldest,))
        while self._exceeds(connection):
            oldest_rows = connection.execute(_OLDEST).fetchall()
            if not oldest_rows:
                return
            for (id_,) in oldest_rows:
                if not self._exceeds(connection):
                    return
                connection.execute("DELETE FROM responses WHERE id = ?", (id_,))

    def _exceeds(self, connection: sqlite3.Connection) -> bool:
        count, nbytes = connection.execute("SELECT count, nbytes FROM totals").fetchone()
        return bool(count > self._bounds.max_stored or nbytes > self._bounds.max_stored_bytes)


async def _reached(asked: Awaitable[T]) -> T:
    """The result of the file, with its errors as clients may see them."""
    try:
        return await asked
    except StoreUnreadable as error:
        text = f"stored responses cannot be reached: {error.strerror}"
        raise ResponsesUnavailable(text, retry_after_s=error.retry_after_s) from error


def _pieces(connection: sqlite3.Connection, id_: str, known: int) -> list[bytes]:
    rows = connection.execute(
        "SELECT entries FROM events WHERE id = ? AND number >= ? ORDER BY number", (id_, known)
    )
    return [entries for (entries,) in rows]


def _is_unfinished(connection: sqlite3.Connection, id_: str, runner: str) -> bool:
    """Whether the response goes on, in this process, which is the `runner`."""
    query = f"SELECT 1 FROM responses WHERE id = ? AND runner = ? AND status IN ({_STATUSES})"
    return connection.execute(query, (id_, runner)).fetchone() is not None


def _grow(connection: sqlite3.Connection, id_: str, piece: Piece, runner: str) -> bool:
    """Keep a piece of events; whether the response goes on."""
    if not piece.events:
        return _is_unfinished(connection, id_, runner)
    entries, mark = encode(piece.events), None if piece.mark is None else _encoder.encode(piece.mark)
    nbytes = len(entries) + len(mark or b"")
    if not connection.execute(_GROW, (nbytes, id_, runner)).rowcount:
        return False
    if connection.execute(_IS_FOLLOWABLE, (id_, MAX_EVENTS_NBYTES)).fetchone():
        # NOTE: a piece comes again, with more, if its writer did not learn that it had been written.
        connection.execute(
            "INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?)", (id_, piece.number, entries, mark)
        )
    else:
        connection.execute("UPDATE responses SET followable = 0 WHERE id = ?", (id_,))
        connection.execute("DELETE FROM events WHERE id = ?", (id_,))
    return True


def _end(connection: sqlite3.Connection, whole: Resource) -> bool:
    return bool(connection.execute(_END, (whole["status"], orjson.dumps(whole), whole["id"])).rowcount)
