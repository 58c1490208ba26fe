"""Skills with their versions: rows of a SQLite file in the state directory, and a zip for each version.

1. A version is a checked set of files (`frontend.state.archives`), stored as one zip, then its row.
2. Versions count 1, 2, 3, ... and no number comes twice. The newest version gives the skill name and description. The
   last version goes with its skill; where the default version goes, the newest takes its place.
3. A skill has an owner, the public id of an API key. To everybody else the skill does not exist.
4. Skills do not expire. Where a bound is reached, a new skill or version is refused.
5. `open` copies the files of a version into memory files, so that a run keeps them though the version is deleted.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from frontend.state import archives
from frontend.state.archives import SkillFiles, unpacked
from frontend.state.content import Draft, completed, in_thread
from frontend.state.errors import reached
from frontend.state.places import Place
from ipc import settings
from ipc.errors import InvalidInput, StateFull

FILE = "skills-1.db"
"""The number rises when the tables change."""
TABLES = {"skills": ("id",), "versions": ("skill", "version")}
"""The row of a skill counts its versions, so that no other process gives a version the same number."""
CONTENTS = "skills"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS skills (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created REAL NOT NULL,
    updated REAL NOT NULL, title TEXT NOT NULL, chosen INTEGER NOT NULL, counted INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON skills (owner, number);
CREATE TABLE IF NOT EXISTS versions (
    skill TEXT NOT NULL, version INTEGER NOT NULL, created REAL NOT NULL, name TEXT NOT NULL,
    description TEXT NOT NULL, directory TEXT NOT NULL, content TEXT NOT NULL, nbytes INTEGER NOT NULL,
    PRIMARY KEY (skill, version)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_content ON versions (content);
"""
_SKILL = """
SELECT skills.id, skills.created, updated, title, chosen, latest.version, latest.name, latest.description
FROM skills JOIN versions AS latest ON latest.skill = skills.id
AND latest.version = (SELECT max(version) FROM versions WHERE skill = skills.id)
WHERE owner = ?
"""
_VERSION = "skill, version, created, name, description, directory, content, nbytes"
_OWNED = "SELECT 1 FROM skills WHERE owner = ? AND id = ?"


class SkillNotFound(InvalidInput):
    """No skill, or no version, of that id is stored for the caller."""

    status = 404


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill; `name` and `description` are those of its latest version. Times are Unix seconds."""

    id: str
    created: float
    updated: float
    title: str
    default: int
    latest: int
    name: str
    description: str


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a skill; `nbytes` are those of its zip."""

    skill: str
    number: int
    created: float
    name: str
    description: str
    directory: str
    content: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class OpenSkill:
    """A version whose files stay readable. Whoever opens the skill closes the descriptors of `files`."""

    name: str
    description: str
    files: list[tuple[str, int]]


class SkillStore:
    """The skills of a server. All methods raise `StateUnavailable`."""

    def __init__(self, place: Place, bounds: settings.State) -> None:
        """Opens nothing yet."""
        self._rows = place.rows(FILE, _SCHEMA, TABLES)
        self._contents = place.contents(CONTENTS)
        self._bounds = bounds

    async def add(self, owner: str, files: SkillFiles, *, title: str = "") -> Skill:
        """Store a new skill with its first version. Raises `StateFull`."""
        id_, now = f"skill_{uuid4().hex}", time.time()

        def begin(connection: sqlite3.Connection) -> None:
            (count,) = connection.execute("SELECT count(*) FROM skills WHERE owner = ?", (owner,)).fetchone()
            if count >= self._bounds.max_skills:
                raise StateFull(f"{count} skills are stored, the limit of a key (state.max_skills)")
            row = (id_, owner, now, now, title, 1, 0)
            columns = "id, owner, created, updated, title, chosen, counted"
            connection.execute(f"INSERT INTO skills ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        await self._store(owner, id_, files, begin, default=True)
        return await self.get(owner, id_)

    async def add_version(self, owner: str, id: str, files: SkillFiles, *, default: bool = False) -> Version:
        """Store a new version of a skill. Raises `SkillNotFound` and `StateFull`."""
        return await self._store(owner, id, files, lambda connection: None, default=default)

    async def _store(self, owner: str, id_: str, files: SkillFiles, begin: Any, *, default: bool) -> Version:
        body = await in_thread(archives.packed, files)

        def write(connection: sqlite3.Connection, draft: Draft) -> Version:
            begin(connection)
            return self._insert(connection, owner, id_, files, draft, default)

        async with self._contents.draft() as draft:
            await draft.write(body)
            await draft.finish()

            async def commit() -> Version:
                version = await reached(self._rows.write(lambda connection: write(connection, draft)))
                draft.keep()
                return version

            return await completed(commit())

    def _insert(
        self,
        connection: sqlite3.Connection,
        owner: str,
        id_: str,
        files: SkillFiles,
        draft: Draft,
        default: bool,
    ) -> Version:
        row = connection.execute(
            "SELECT counted FROM skills WHERE owner = ? AND id = ?", (owner, id_)
        ).fetchone()
        if row is None:
            raise _not_found(id_)
        query = "SELECT count(*), (SELECT total(nbytes) FROM versions) FROM versions WHERE skill = ?"
        count, nbytes = connection.execute(query, (id_,)).fetchone()
        if count >= self._bounds.max_skill_versions:
            raise StateFull(f"{count} versions are stored, the limit of a skill (state.max_skill_versions)")
        if nbytes + draft.nbytes > self._bounds.max_skills_bytes:
            raise StateFull(
                f"all skills may have {self._bounds.max_skills_bytes} bytes (state.max_skills_bytes), which this "
                "version would exceed"
            )
        number, now = row[0] + 1, time.time()
        version = Version(
            id_, number, now, files.name, files.description, files.directory, draft.name, draft.nbytes
        )
        values = tuple(getattr(version, name) for name in Version.__slots__)
        connection.execute(f"INSERT INTO versions ({_VERSION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        change = "UPDATE skills SET counted = ?1, updated = ?2, chosen = iif(?3, ?1, chosen) WHERE id = ?4"
        connection.execute(change, (number, now, default, id_))
        return version

    async def get(self, owner: str, id: str) -> Skill:
        """A skill. Raises `SkillNotFound`."""

        def read(connection: sqlite3.Connection) -> Any:
            return connection.execute(f"{_SKILL} AND skills.id = ?", (owner, id)).fetchone()

        row = await reached(self._rows.read(read))
        if row is None:
            raise _not_found(id)
        return Skill(*row)

    async def page(
        self, owner: str, *, after: str = "", limit: int, order: str = "asc"
    ) -> tuple[list[Skill], bool]:
        """Skills behind the id `after` in the `order` of their adding, and whether there are more.

        Raises `SkillNotFound` for an unknown `after`.
        """

        def read(connection: sqlite3.Connection) -> list[Any]:
            where, values = "", list[Any]()
            if after:
                query = "SELECT number FROM skills WHERE owner = ? AND id = ?"
                found = connection.execute(query, (owner, after)).fetchone()
                if found is None:
                    raise _not_found(after)
                where, values = f"AND skills.number {'>' if order == 'asc' else '<'} ?", list(found)
            query = f"{_SKILL} {where} ORDER BY skills.number {'asc' if order == 'asc' else 'desc'} LIMIT ?"
            return connection.execute(query, (owner, *values, limit + 1)).fetchall()

        rows = await reached(self._rows.read(read))
        return [Skill(*row) for row in rows[:limit]], len(rows) > limit

    async def versions(
        self, owner: str, id: str, *, after: int | None = None, limit: int, order: str = "asc"
    ) -> tuple[list[Version], bool]:
        """Versions of a skill behind the number `after`, and whether there are more. Raises `SkillNotFound`."""

        def read(connection: sqlite3.Connection) -> list[Any]:
            if connection.execute(_OWNED, (owner, id)).fetchone() is None:
                raise _not_found(id)
            behind = "" if after is None else f"AND version {'>' if order == 'asc' else '<'} ?"
            values = () if after is None else (after,)
            direction = "asc" if order == "asc" else "desc"
            query = f"SELECT {_VERSION} FROM versions WHERE skill = ? {behind} ORDER BY version {direction} LIMIT ?"
            return connection.execute(query, (id, *values, limit + 1)).fetchall()

        rows = await reached(self._rows.read(read))
        return [Version(*row) for row in rows[:limit]], len(rows) > limit

    async def choose(self, owner: str, id: str, number: int) -> Skill:
        """Make a version the default one. Raises `SkillNotFound`."""

        def write(connection: sqlite3.Connection) -> None:
            change = (
                "UPDATE skills SET chosen = ?1, updated = ?2 WHERE owner = ?3 AND id = ?4 "
                "AND EXISTS (SELECT 1 FROM versions WHERE skill = ?4 AND version = ?1)"
            )
            if not connection.execute(change, (number, time.time(), owner, id)).rowcount:
                raise _not_found(id, number)

        await reached(self._rows.write(write))
        return await self.get(owner, id)

    async def version(self, owner: str, id: str, number: int | None = None) -> Version:
        """A version of a skill, by default the default one. Raises `SkillNotFound`."""

        def read(connection: sqlite3.Connection) -> Any:
            query = (
                f"SELECT {_VERSION.replace('created', 'versions.created')} FROM versions "
                "JOIN skills ON skills.id = versions.skill "
                "WHERE owner = ? AND skill = ? AND version = coalesce(?, chosen)"
            )
            return connection.execute(query, (owner, id, number)).fetchone()

        row = await reached(self._rows.read(read))
        if row is None:
            raise _not_found(id, number)
        return Version(*row)

    async def open(self, owner: str, id: str, number: int | None = None) -> OpenSkill:
        """The files of a version, by default of the default one. Raises `SkillNotFound`."""
        version = await self.version(owner, id, number)
        descriptor = await self.packed(version)
        try:
            files = await in_thread(_in_memory, descriptor, version.nbytes)
        finally:
            os.close(descriptor)
        return OpenSkill(version.name, version.description, files)

    async def packed(self, version: Version) -> int:
        """A descriptor to read the zip of a version from, which the caller closes. Raises `SkillNotFound`."""
        try:
            return await self._contents.open(version.content, version.nbytes)
        except FileNotFoundError as error:
            raise _not_found(version.skill, version.number) from error

    async def delete_version(self, owner: str, id: str, number: int) -> None:
        """Delete a version, and the skill with its last version. Raises `SkillNotFound`."""

        def write(connection: sqlite3.Connection) -> list[str]:
            owned = connection.execute(_OWNED, (owner, id)).fetchone()
            values = (id, number)
            query = "SELECT content FROM versions WHERE skill = ? AND version = ?"
            row = connection.execute(query, values).fetchone() if owned else None
            if row is None:
                raise _not_found(id, number)
            connection.execute("DELETE FROM versions WHERE skill = ? AND version = ?", values)
            query = "SELECT max(version) FROM versions WHERE skill = ?"
            (newest,) = connection.execute(query, (id,)).fetchone()
            if newest is None:
                connection.execute("DELETE FROM skills WHERE id = ?", (id,))
            else:
                change = "UPDATE skills SET chosen = iif(chosen = ?1, ?2, chosen), updated = ?3 WHERE id = ?4"
                connection.execute(change, (number, newest, time.time(), id))
            return list(row)

        await self._delete(write)

    async def delete(self, owner: str, id: str) -> None:
        """Delete a skill with its versions. Raises `SkillNotFound`."""

        def write(connection: sqlite3.Connection) -> list[str]:
            if not connection.execute("DELETE FROM skills WHERE owner = ? AND id = ?", (owner, id)).rowcount:
                raise _not_found(id)
            rows = connection.execute("SELECT content FROM versions WHERE skill = ?", (id,)).fetchall()
            connection.execute("DELETE FROM versions WHERE skill = ?", (id,))
            return [content for (content,) in rows]

        await self._delete(write)

    async def _delete(self, write: Callable[[sqlite3.Connection], list[str]]) -> None:
        """Delete rows by `write`, then the contents that they named."""

        async def deleted() -> None:
            await self._contents.delete(await reached(self._rows.write(write)))

        await completed(deleted())

    async def sweep(self) -> None:
        """Delete contents without a row."""
        if self._rows.exists():
            await self._contents.sweep(self._named)

    async def _named(self, names: Collection[str]) -> set[str]:
        def read(connection: sqlite3.Connection) -> set[str]:
            query = "SELECT 1 FROM versions WHERE content = ?"
            return {name for name in names if connection.execute(query, (name,)).fetchone()}

        return await reached(self._rows.read(read))


def _not_found(id_: str, number: int | None = None) -> SkillNotFound:
    version = "" if number is None else f" with the version {number}"
    return SkillNotFound(f"no skill with the id {id_[:100]!a}{version} is stored")


def _in_memory(descriptor: int, nbytes: int) -> list[tuple[str, int]]:
    """The files of a zip, each in a memory file."""
    opened: list[tuple[str, int]] = []
    try:
        for path, data in unpacked(os.pread(descriptor, nbytes, 0)).items():
            copy = os.memfd_create("skill", os.MFD_CLOEXEC)
            opened.append((path, copy))
            with os.fdopen(os.dup(copy), "wb") as target:
                target.write(data)
            os.lseek(copy, 0, os.SEEK_SET)
    except BaseException:
        for _, copy in opened:
            os.close(copy)
        raise
    return opened
