"""Files of clients and of agents: rows of a SQLite file in the state directory, and a content file for each.

1. A file is added by its content (bytes, a descriptor, or a draft that an upload has filled), then its row. A file that
   is added under an id that its owner has replaces the file of that id.
2. Each file has an owner, the public id of an API key. To everybody else the file does not exist.
3. A file expires. Each read compares the time, so that an expired file is gone also before a sweep deletes the file.
4. Each new row deletes what has expired, then the oldest files of an owner who has too many. Where all files together
   have too many bytes, files of the owner with the most bytes go first. The new file stays.
5. `sweep` deletes expired files, and contents without a row. A clock that was set back must not lengthen a life, so
   `sweep` also cuts lives that end later than a new file's would.
"""

from __future__ import annotations

import mimetypes
import os
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from frontend.state.content import Draft, completed, in_thread
from frontend.state.errors import FileElided, FilePlaceholder, reached
from frontend.state.places import Place
from ipc import settings
from ipc.errors import FileNotFound, StateFull

T = TypeVar("T")
FILE = "files-1.db"
"""The number rises when the tables change."""
TABLES = {"files": ("owner", "id")}
CONTENTS = "files"
MAX_NAME_NBYTES = 255
OCTETS = "application/octet-stream"
USER_DATA, AGENT_OUTPUT = "user_data", "agent_output"
_ROW_NBYTES = 512
"""What a row counts beside its content."""
_MAX_FORMAT = 16
# NOTE: not the tables of the machine, so that a name has the same type on every machine.
_TYPES = mimetypes.MimeTypes()
for _type, _ending in (
    ("text/markdown", ".md"),
    ("application/jsonl", ".jsonl"),
    ("application/yaml", ".yaml"),
    ("application/yaml", ".yml"),
    ("application/toml", ".toml"),
    ("application/vnd.apache.parquet", ".parquet"),
    ("application/x-ipynb+json", ".ipynb"),
    ("image/webp", ".webp"),
    ("text/plain", ".log"),
):
    _TYPES.add_type(_type, _ending)
_COLUMNS = """
owner, id, name, nbytes, created, expires, format, purpose, tool, round, turn, container, code, message, content
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL,
    nbytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL NOT NULL, format TEXT, purpose TEXT NOT NULL,
    tool TEXT NOT NULL, round INTEGER NOT NULL, turn INTEGER NOT NULL, container TEXT NOT NULL, code TEXT NOT NULL,
    message TEXT NOT NULL, content TEXT NOT NULL, UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS by_owner ON files (owner, number);
CREATE INDEX IF NOT EXISTS by_end ON files (expires);
CREATE INDEX IF NOT EXISTS by_content ON files (content);
CREATE TABLE IF NOT EXISTS totals (owner TEXT PRIMARY KEY, count INTEGER, nbytes INTEGER) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON files BEGIN
    INSERT INTO totals VALUES (NEW.owner, 1, {row} + {new})
    ON CONFLICT (owner) DO UPDATE SET count = count + 1, nbytes = nbytes + excluded.nbytes;
END;
CREATE TRIGGER IF NOT EXISTS replaced AFTER UPDATE OF nbytes, content ON files BEGIN
    UPDATE totals SET nbytes = nbytes + {new} - {old} WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON files BEGIN
    UPDATE totals SET count = count - 1, nbytes = nbytes - {row} - {old} WHERE owner = OLD.owner;
    DELETE FROM totals WHERE owner = OLD.owner AND count = 0;
END;
""".format(
    row=_ROW_NBYTES,
    new="iif(NEW.content = '', 0, NEW.nbytes)",
    old="iif(OLD.content = '', 0, OLD.nbytes)",
)
_INSERT = f"INSERT INTO files ({_COLUMNS}) VALUES ({', '.join('?' * 15)})"
_FIND = f"SELECT {_COLUMNS} FROM files WHERE owner = ? AND id = ? AND expires > ?"
_OLDEST_OF = "SELECT number, content FROM files WHERE owner = ? AND number != ? ORDER BY number LIMIT ?"
_OF_LARGEST = """
SELECT number, content FROM files JOIN totals USING (owner) WHERE number != ?
ORDER BY totals.nbytes DESC, number LIMIT 1
"""


class Origin(NamedTuple):
    """Where a file comes from: the name of a tool, or `user_upload`; round and user turn, both from 0."""

    tool: str
    round: int = 0
    turn: int = 0


class Placeholder(NamedTuple):
    """Why an expected file is not there: a short code, such as `not_produced`, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class File:
    """One row. Times are Unix seconds; `content` is empty for a placeholder and for a file imported without bytes."""

    owner: str
    id: str
    name: str
    nbytes: int
    created: float
    expires: float
    format: str | None
    purpose: str
    origin: Origin
    container: str = ""
    placeholder: Placeholder | None = None
    content: str = ""

    @property
    def mime_type(self) -> str:
        """Media type by the format, else by the name."""
        name = f"file.{self.format}" if self.format else self.name
        return _TYPES.guess_type(name)[0] or OCTETS


Source = bytes | int | Draft | None
"""A content: bytes, the descriptor of a regular file, a draft that is filled, or none."""


def clean_name(name: str) -> str:
    """The base name of a path without control characters, at most `MAX_NAME_NBYTES` long as UTF-8."""
    base = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    plain = "".join(character for character in base if character.isprintable()).strip()
    if plain in ("", ".", ".."):
        return "file"
    encoded = plain.encode(errors="replace")
    if len(encoded) <= MAX_NAME_NBYTES:
        return encoded.decode()
    ending = PurePosixPath(plain).suffix.encode(errors="replace")
    ending = ending if len(ending) <= _MAX_FORMAT else b""
    return encoded[: MAX_NAME_NBYTES - len(ending)].decode(errors="ignore") + ending.decode()


def format_of(name: str) -> str | None:
    """The format that the ending of a name tells, in lower case; None without an ending."""
    ending = PurePosixPath(name).suffix[1:].lower()
    return ending if ending.isascii() and ending.isalnum() and len(ending) <= _MAX_FORMAT else None


class FileStore:
    """The files of a server. All methods raise `StateUnavailable`."""

    def __init__(self, place: Place, bounds: settings.State) -> None:
        """Opens nothing yet."""
        self._rows = place.rows(FILE, _SCHEMA, TABLES)
        self._contents = place.contents(CONTENTS)
        self._bounds = bounds

    def draft(self) -> Draft:
        """A content to fill and to give to `add`, as an asynchronous context."""
        return self._contents.draft()

    async def add(
        self,
        owner: str,
        source: Source,
        *,
        name: str,
        purpose: str,
        origin: Origin,
        id: str = "",
        format: str | None = None,
        container: str = "",
        placeholder: Placeholder | None = None,
        nbytes: int = 0,
        expires_after_s: float = 0.0,
    ) -> File:
        """Store a file. Raises `StateFull`.

        `nbytes` is the size of a file without content. `expires_after_s` above 0 shortens the life of the file.
        """
        now = time.time()
        life_s = self._bounds.file_age_s
        name = clean_name(name)
        file = File(
            owner,
            id or f"file-{uuid4().hex}",
            name,
            nbytes,
            now,
            now + (min(expires_after_s, life_s) if expires_after_s > 0 else life_s),
            format or format_of(name),
            purpose,
            origin,
            container,
            placeholder,
        )
        if source is None:
            return await completed(self._put(file, None))
        if isinstance(source, Draft):
            return await completed(self._put(file, source))
        async with self.draft() as draft:
            await (draft.copy(source) if isinstance(source, int) else draft.write(source))
            return await completed(self._put(file, draft))

    async def _put(self, file: File, draft: Draft | None) -> File:
        if draft is not None:
            if draft.nbytes > self._bounds.max_files_bytes:
                raise StateFull(
                    f"the file has {draft.nbytes} bytes, all files may have {self._bounds.max_files_bytes} "
                    "(state.max_files_bytes)"
                )
            await draft.finish()
            file = replace(file, nbytes=draft.nbytes, content=draft.name)
        gone = await reached(self._rows.write(lambda connection: self._insert(connection, file)))
        if draft is not None:
            draft.keep()
        await self._contents.delete(gone)
        return file

    def _insert(self, connection: sqlite3.Connection, file: File) -> list[str]:
        """Insert a row, and delete what is too old or too much; the contents of deleted rows."""
        same = "owner = ? AND id = ?"
        gone = _delete_where(connection, same, file.owner, file.id)
        gone += _delete_where(connection, "expires <= ?", file.created)
        number = connection.execute(_INSERT, _values(file)).lastrowid
        (count,) = connection.execute("SELECT count FROM totals WHERE owner = ?", (file.owner,)).fetchone()
        if (excess := count - self._bounds.max_files) > 0:
            gone += _delete(connection, connection.execute(_OLDEST_OF, (file.owner, number, excess)))
        while self._exceeds(connection) and (oldest := connection.execute(_OF_LARGEST, (number,)).fetchall()):
            gone += _delete(connection, oldest)
        return gone

    def _exceeds(self, connection: sqlite3.Connection) -> bool:
        (nbytes,) = connection.execute("SELECT sum(nbytes) FROM totals").fetchone()
        return bool(nbytes > self._bounds.max_files_bytes)

    async def get(self, owner: str, id: str) -> File:
        """A live file. Raises `FileNotFound`."""

        def read(connection: sqlite3.Connection) -> Any:
            return connection.execute(_FIND, (owner, id, time.time())).fetchone()

        row = await reached(self._rows.find(read))
        if row is None:
            raise _not_found(id)
        return _file_of(row)

    async def page(
        self,
        owner: str,
        *,
        after: str = "",
        limit: int = 10_000,
        order: str = "asc",
        purpose: str = "",
        container: str = "",
    ) -> tuple[list[File], bool]:
        """Live files behind the id `after` in the `order` of their adding, and whether there are more.

        Raises `FileNotFound` for an unknown `after`.
        """

        def read(connection: sqlite3.Connection) -> list[Any]:
            now, where, values = time.time(), "owner = ? AND expires > ?", list[Any]()
            if after:
                query = f"SELECT number FROM files WHERE {where} AND id = ?"
                found = connection.execute(query, (owner, now, after)).fetchone()
                if found is None:
                    raise _not_found(after)
                where, values = f"{where} AND number {'>' if order == 'asc' else '<'} ?", list(found)
            for column, value in (("purpose", purpose), ("container", container)):
                if value:
                    where, values = f"{where} AND {column} = ?", [*values, value]
            query = f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY number {'asc' if order == 'asc' else 'desc'}"
            return connection.execute(f"{query} LIMIT ?", (owner, now, *values, limit + 1)).fetchall()

        rows = await reached(self._rows.read(read))
        return [_file_of(row) for row in rows[:limit]], len(rows) > limit

    async def delete(self, owner: str, id: str) -> None:
        """Delete a live file. Raises `FileNotFound`. A reader that has opened the content reads on."""

        def write(connection: sqlite3.Connection) -> list[str]:
            where = "owner = ? AND id = ? AND expires > ?"
            gone = _delete_where(connection, where, owner, id, time.time())
            if not gone:
                raise _not_found(id)
            return gone

        async def deleted() -> None:
            await self._contents.delete(await reached(self._rows.write(write)))

        await completed(deleted())

    async def open(self, file: File) -> int:
        """A descriptor to read the content from, which the caller closes.

        Raises `FilePlaceholder`, `FileElided`, and `FileNotFound` if the content is gone or torn.
        """
        if file.placeholder is not None:
            raise FilePlaceholder(f"the file {file.id} was not made: {file.placeholder.message}")
        if not file.content:
            raise FileElided(f"the file {file.id} was imported without its bytes")
        try:
            return await self._contents.open(file.content, file.nbytes)
        except FileNotFoundError as error:
            raise _not_found(file.id) from error

    async def reading(self, file: File, read: Callable[[int], T]) -> T:
        """The result of `read` in a thread, which gets a descriptor. Raises as `open`."""
        descriptor = await self.open(file)
        try:
            return await in_thread(read, descriptor)
        finally:
            os.close(descriptor)

    async def sweep(self) -> None:
        """Delete what has expired, and orphans. Cut lives that end later than a new file's would."""

        def write(connection: sqlite3.Connection) -> list[str]:
            now = time.time()
            latest = now + self._bounds.file_age_s
            connection.execute("UPDATE files SET expires = ?1 WHERE expires > ?1", (latest,))
            return _delete_where(connection, "expires <= ?", now)

        if not self._rows.exists():
            return
        await self._contents.delete(await reached(self._rows.write(write)))
        await self._contents.sweep(self._named)

    async def _named(self, names: Collection[str]) -> set[str]:
        """Which of some contents have rows."""

        def read(connection: sqlite3.Connection) -> set[str]:
            query = "SELECT 1 FROM files WHERE content = ?"
            return {name for name in names if connection.execute(query, (name,)).fetchone()}

        return await reached(self._rows.read(read))

    async def totals(self) -> tuple[int, int]:
        """Number of files and their bytes, of all owners; expired files count until they are deleted."""

        def read(connection: sqlite3.Connection) -> Any:
            return connection.execute("SELECT total(count), total(nbytes) FROM totals").fetchone()

        if not self._rows.exists():
            return 0, 0
        count, nbytes = await reached(self._rows.read(read))
        return int(count), int(nbytes)


def _not_found(id: str) -> FileNotFound:
    return FileNotFound(f"no file with the id {id[:100]!a} is stored")


def _values(file: File) -> tuple[Any, ...]:
    placeholder = file.placeholder or ("", "")
    return (
        *(file.owner, file.id, file.name, file.nbytes, file.created, file.expires, file.format, file.purpose),
        *file.origin,
        file.container,
        *placeholder,
        file.content,
    )


def _file_of(row: tuple[Any, ...]) -> File:
    """The file of the columns `_COLUMNS`."""
    owner, id_, name, nbytes, created, expires, format_, purpose, tool, round_, turn, container, *rest = row
    code, message, content = rest
    return File(
        owner,
        id_,
        name,
        nbytes,
        created,
        expires,
        format_,
        purpose,
        Origin(tool, round_, turn),
        container,
        Placeholder(code, message) if code else None,
        content,
    )


def _delete_where(connection: sqlite3.Connection, where: str, *values: Any) -> list[str]:
    return _delete(connection, connection.execute(f"SELECT number, content FROM files WHERE {where}", values))


def _delete(connection: sqlite3.Connection, rows: Any) -> list[str]:
    """Delete rows by (number, content); their contents."""
    deleted = list(rows)
    connection.executemany("DELETE FROM files WHERE number = ?", [(number,) for number, _ in deleted])
    return [content for _, content in deleted]
