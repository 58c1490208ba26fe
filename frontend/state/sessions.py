"""Sessions: the conversation of a run with its tool turns, and the ids of its files, which later requests go on with.

1. A session belongs to an owner, the public id of an API key, and has an id that the client may choose.
2. `save` replaces a session whole, after each round of a run. A run that dies loses its last round at most.
3. A session is forgotten `state.session_idle_s` after it was saved last. An owner has a number of sessions, all owners
   a number of bytes; the session that was saved longest ago goes first.
4. `match` finds the session whose visible messages begin a conversation: those of no tool turn. A row has a digest of
   its visible messages, so that a search reads no messages.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from frontend.state.errors import reached
from frontend.state.places import Place
from ipc import settings
from ipc.errors import StateFull

FILE = "sessions-2.db"
"""The number rises when the tables change."""
TABLES = {"sessions": ("owner", "id")}
LEAST_MATCHED = 2
"""Visible messages that a session must share with a conversation."""
Message = dict[str, Any]
_ROW_NBYTES = 512
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, saved REAL NOT NULL, digest BLOB NOT NULL,
    nbytes INTEGER NOT NULL, messages BLOB NOT NULL, files BLOB NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS by_digest ON sessions (owner, digest);
CREATE INDEX IF NOT EXISTS by_age ON sessions (saved);
CREATE TABLE IF NOT EXISTS totals (owner TEXT PRIMARY KEY, count INTEGER, nbytes INTEGER) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON sessions BEGIN
    INSERT INTO totals VALUES (NEW.owner, 1, NEW.nbytes)
    ON CONFLICT (owner) DO UPDATE SET count = count + 1, nbytes = nbytes + excluded.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS replaced AFTER UPDATE OF nbytes ON sessions WHEN NEW.nbytes != OLD.nbytes BEGIN
    UPDATE totals SET nbytes = nbytes + NEW.nbytes - OLD.nbytes WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON sessions BEGIN
    UPDATE totals SET count = count - 1, nbytes = nbytes - OLD.nbytes WHERE owner = OLD.owner;
    DELETE FROM totals WHERE owner = OLD.owner AND count = 0;
END;
"""
_INSERT = (
    "INSERT INTO sessions (owner, id, saved, digest, nbytes, messages, files) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
# PERF: a row that stays in its place touches fewer pages than one that is deleted and inserted again.
_REPLACE = """
UPDATE sessions SET saved = ?3, digest = ?4, nbytes = ?5, messages = ?6, files = ?7 WHERE owner = ?1 AND id = ?2
"""
_TOTALS = "SELECT count, (SELECT sum(nbytes) FROM totals) FROM totals WHERE owner = ?"
_FIND = "SELECT messages, files FROM sessions WHERE owner = ? AND id = ? AND saved > ?"
_MATCH = "SELECT id FROM sessions WHERE owner = ? AND digest = ? AND saved > ? ORDER BY saved DESC LIMIT 1"
_OLDEST_OF = """
DELETE FROM sessions WHERE number IN (
    SELECT number FROM sessions WHERE owner = ?1 AND id != ?2 ORDER BY saved LIMIT ?3
)
"""
_OF_LARGEST = """
SELECT number FROM sessions JOIN totals USING (owner) WHERE NOT (owner = ? AND id = ?)
ORDER BY totals.nbytes DESC, saved LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Session:
    """Messages in the form of OpenAI, with arguments of tool calls as objects, and ids of files, the oldest first."""

    messages: list[Message]
    files: list[str]


class SessionStore:
    """The sessions of a server. All methods raise `StateUnavailable`."""

    def __init__(self, place: Place, bounds: settings.State) -> None:
        """Opens nothing yet."""
        self._rows = place.rows(FILE, _SCHEMA, TABLES)
        self._bounds = bounds

    async def get(self, owner: str, id: str) -> Session | None:
        """A live session; None for an unknown one."""

        def read(connection: sqlite3.Connection) -> Any:
            return connection.execute(_FIND, (owner, id, self._oldest())).fetchone()

        row = await reached(self._rows.read(read))
        return None if row is None else Session(orjson.loads(row[0]), orjson.loads(row[1]))

    async def save(self, owner: str, id: str, messages: list[Message], files: list[str]) -> None:
        """Replace a session, or begin a session. Raises `StateFull`."""
        body, ids = _encoded(messages), orjson.dumps(files)
        nbytes = _ROW_NBYTES + len(body) + len(ids)
        if nbytes > self._bounds.max_sessions_bytes:
            raise StateFull(
                f"the session has {nbytes} bytes, all sessions may have {self._bounds.max_sessions_bytes} "
                "(state.max_sessions_bytes)"
            )
        *_, digest = b"", *_digests(messages)
        row = (owner, id, time.time(), digest, nbytes, body, ids)
        await reached(self._rows.write(lambda connection: self._put(connection, row)))

    def _put(self, connection: sqlite3.Connection, row: tuple[Any, ...]) -> None:
        owner, id_ = key = row[:2]
        connection.execute("DELETE FROM sessions WHERE saved <= ?", (self._oldest(),))
        if not connection.execute(_REPLACE, row).rowcount:
            connection.execute(_INSERT, row)
        count, nbytes = connection.execute(_TOTALS, (owner,)).fetchone()
        if (excess := count - self._bounds.max_sessions) > 0:
            connection.execute(_OLDEST_OF, (owner, id_, excess))
        while nbytes > self._bounds.max_sessions_bytes:
            oldest = connection.execute(_OF_LARGEST, key).fetchone()
            if oldest is None:
                break
            connection.execute("DELETE FROM sessions WHERE number = ?", oldest)
            _, nbytes = connection.execute(_TOTALS, (owner,)).fetchone()

    async def delete(self, owner: str, id: str) -> None:
        """Forget a session; an unknown one is forgotten already."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, id))

        await reached(self._rows.write(write))

    async def match(self, owner: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The id of the session that a conversation goes on with: the longest match, then the newest.

        None where no session matches, and where `state.match_sessions` says so: callers without a key are one owner, in
        whose sessions conversations of two people would meet.
        """
        if self._bounds.match_sessions == "none" or (self._bounds.match_sessions == "keys" and not owner):
            return None
        digests = list(_digests(messages))[LEAST_MATCHED - 1 :]

        def read(connection: sqlite3.Connection) -> str | None:
            for digest in reversed(digests):
                found = connection.execute(_MATCH, (owner, digest, self._oldest())).fetchone()
                if found is not None:
                    return str(found[0])
            return None

        return await reached(self._rows.read(read)) if digests else None

    async def sweep(self) -> None:
        """Delete what is forgotten. A clock that was set back must not lengthen a life."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE sessions SET saved = ?1 WHERE saved > ?1", (time.time(),))
            connection.execute("DELETE FROM sessions WHERE saved <= ?", (self._oldest(),))

        if self._rows.exists():
            await reached(self._rows.write(write))

    def _oldest(self) -> float:
        return time.time() - self._bounds.session_idle_s


def _encoded(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # NOTE: orjson refuses integers of more than 64 bits, which arguments of tool calls may have.
        return json.dumps(value).encode()


def _digests(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """The digest of each beginning of the visible messages."""
    digest = b""
    for message in messages:
        if message.get("role") == "tool" or message.get("tool_calls"):
            continue
        encoded = _encoded([message.get("role"), message.get("content") or "", message.get("name")])
        digest = hashlib.blake2b(digest + encoded, digest_size=16).digest()
        yield digest
