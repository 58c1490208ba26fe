"""Decisions about calls of tools, which may come to another frontend than the one whose run waits.

1. `announce` writes a row before a client is asked. `decide` fills the row in, `wait` takes the row away.
2. A row belongs to an owner and to the process whose run waits. Once the process is dead or the time is over nobody
   waits, and a decision finds nothing.
3. A decision may come before its wait begins: the wait then finds the decision.
4. The process that decides rings a `Bell`, which wakes the one look that a process has for all of its waits. Rings may
   be lost, so a process that waits also asks SQLite every `LOOK_EVERY_S` whether another connection has written, in
   microseconds, and every `LOOK_WITHOUT_BELL_S` where the process cannot hear the bell. Without waits nothing looks.
5. An approval that is remembered holds for later calls of its session, and releases other waits of the session. It is
   forgotten `state.session_idle_s` after its last use, and with its session.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from frontend.state.content import completed
from frontend.state.errors import reached
from frontend.state.places import Place
from ipc import settings
from ipc.store.store import StoreUnreadable

FILE = "approvals-1.db"
"""The number rises when the tables change."""
TABLES = {"remembered": ("owner", "session"), "approvals": ("id",)}
BELL = "approvals.bell"
LOOK_EVERY_S, LOOK_WITHOUT_BELL_S = 2.0, 0.025
"""Pauses between two looks, with and without a bell to hear."""
MAX_MESSAGE = 4096
"""Characters of a message that are kept."""
_GRACE_S = 60.0
"""How long a row outlives the time for its decision."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS approvals (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, runner TEXT NOT NULL, until REAL NOT NULL,
    waits INTEGER NOT NULL DEFAULT 0, approve INTEGER, message TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_session ON approvals (owner, session);
CREATE TABLE IF NOT EXISTS remembered (
    owner TEXT NOT NULL, session TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (owner, session)
) WITHOUT ROWID;
"""
_ANNOUNCE = "INSERT INTO approvals (id, owner, session, runner, until) VALUES (?, ?, ?, ?, ?)"
_OPEN = "SELECT owner, session, runner, waits FROM approvals WHERE id = ? AND approve IS NULL AND until > ?"
_DECIDE = "UPDATE approvals SET approve = ?, message = ? WHERE id = ?"
_OF_SESSION = (
    "UPDATE approvals SET approve = ?, message = ? WHERE owner = ? AND session = ? AND approve IS NULL"
)
_REMEMBER = (
    "INSERT INTO remembered VALUES (?, ?, ?) ON CONFLICT (owner, session) DO UPDATE SET used = excluded.used"
)
_BEGIN_WAIT = "UPDATE approvals SET waits = 1 WHERE id = ? AND approve IS NULL"
_OPEN_HERE = "SELECT id FROM approvals WHERE runner = ? AND approve IS NULL"
_DECIDED = "SELECT approve, message FROM approvals WHERE id = ? AND approve IS NOT NULL"
_DELETED = "the session was deleted"

Told = Literal["resolved", "queued", "not_found"]
"""What became of a decision: a wait was released, a wait will find the decision, or nobody waits."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a call may run; `message` is for the model."""

    approve: bool
    message: str | None = None
    timed_out: bool = False


class ApprovalStore:
    """The decisions of a server. All methods raise `StateUnavailable`; for one event loop."""

    def __init__(self, place: Place, bounds: settings.State) -> None:
        """Opens nothing yet."""
        self._rows, self._lives = place.rows(FILE, _SCHEMA, TABLES), place.lives
        self._bounds = bounds
        self._bell = place.bell(BELL)
        self._rung = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def announce(self, owner: str, session: str, id: str) -> None:
        """A decision about `id` will be waited for by this process."""
        until = time.time() + self._bounds.approval_wait_s + _GRACE_S
        row = (id, owner, session, self._lives.own(), until)
        await reached(self._rows.write(lambda connection: connection.execute(_ANNOUNCE, row)))

    async def wait(self, id: str, timeout_s: float) -> Decision:
        """The decision; a refusal that has `timed_out` after `timeout_s`. The end of the wait deletes the row."""
        woken = self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            self._look()
            if await reached(self._rows.write(lambda connection: _begin_wait(connection, id))):
                async with asyncio.timeout(timeout_s):
                    await woken
        except TimeoutError:
            pass
        finally:
            self._waiting.pop(id, None)
            if not self._waiting:
                self._rung.set()
            decision = await completed(reached(self._rows.write(lambda connection: _take(connection, id))))
        return decision

    def _look(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        """Wake the waits whose rows are decided, until nobody waits."""
        version = -1
        with self._bell.listening(self._rung.set) as hears:
            while self._waiting:
                self._rung.clear()
                try:
                    if (newer := await self._rows.version()) != version:
                        waiting = list(self._waiting)
                        self._wake(waiting, await self._rows.read(self._open_here))
                        version = newer
                except StoreUnreadable:
                    # The decisions come with a later look, or the waits end by their own time.
                    version = -1
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S if hears else LOOK_WITHOUT_BELL_S):
                        await self._rung.wait()

    def _open_here(self, connection: sqlite3.Connection) -> set[str]:
        """Ids of this process that nobody has decided about."""
        return {id_ for (id_,) in connection.execute(_OPEN_HERE, (self._lives.own(),))}

    def _wake(self, waiting: list[str], still_open: set[str]) -> None:
        """End those waits that have nothing to wait for: their rows are decided or gone."""
        for id_ in set(waiting) - still_open:
            if (waiter := self._waiting.get(id_)) is not None and not waiter.done():
                waiter.set_result(None)

    async def decide(self, owner: str | None, id: str, decision: Decision, *, remember: bool = False) -> Told:
        """Decide about a call once; `owner` None for an operator, who decides for all owners."""

        def write(connection: sqlite3.Connection) -> Told:
            now = time.time()
            row = connection.execute(_OPEN, (id, now)).fetchone()
            if row is None or owner not in (None, row[0]) or not self._lives.is_running(row[2]):
                return "not_found"
            message = None if decision.message is None else decision.message[:MAX_MESSAGE]
            connection.execute(_DECIDE, (decision.approve, message, id))
            if remember and decision.approve and row[1]:
                connection.execute(_REMEMBER, (*row[:2], now))
                connection.execute(_OF_SESSION, (True, None, *row[:2]))
            return "resolved" if row[3] else "queued"

        return await reached(self._rows.write(write, self._bell.ring))

    async def is_remembered(self, owner: str, session: str) -> bool:
        """Whether an approval holds for the whole session; a use lengthens its life."""

        def write(connection: sqlite3.Connection) -> bool:
            now = time.time()
            query = "UPDATE remembered SET used = ? WHERE owner = ? AND session = ? AND used > ?"
            values = (now, owner, session, now - self._bounds.session_idle_s)
            return bool(connection.execute(query, values).rowcount)

        return await reached(self._rows.write(write))

    async def forget(self, owner: str, session: str) -> None:
        """The session is deleted: nothing is remembered for it, and its waits end as refused."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM remembered WHERE owner = ? AND session = ?", (owner, session))
            connection.execute(_OF_SESSION, (False, _DELETED, owner, session))

        await reached(self._rows.write(write, self._bell.ring))

    async def sweep(self) -> None:
        """Delete rows for which nobody waits any more."""

        def write(connection: sqlite3.Connection) -> None:
            now = time.time()
            oldest, latest = now - self._bounds.session_idle_s, now + self._bounds.approval_wait_s + _GRACE_S
            connection.execute("DELETE FROM remembered WHERE used <= ? OR used > ?", (oldest, now + _GRACE_S))
            connection.execute(
                "DELETE FROM approvals WHERE until <= ? OR until > ?", (now, latest + _GRACE_S)
            )
            for (runner,) in connection.execute("SELECT DISTINCT runner FROM approvals").fetchall():
                if not self._lives.is_running(runner):
                    connection.execute("DELETE FROM approvals WHERE runner = ?", (runner,))

        if self._rows.exists():
            await reached(self._rows.write(write))


def _begin_wait(connection: sqlite3.Connection, id_: str) -> bool:
    """Whether there is anything to wait for: nobody has decided yet."""
    return connection.execute(_BEGIN_WAIT, (id_,)).rowcount == 1


def _take(connection: sqlite3.Connection, id_: str) -> Decision:
    """End the wait for a decision."""
    row: Any = connection.execute(_DECIDED, (id_,)).fetchone()
    connection.execute("DELETE FROM approvals WHERE id = ?", (id_,))
    return Decision(False, None, timed_out=True) if row is None else Decision(bool(row[0]), row[1])
