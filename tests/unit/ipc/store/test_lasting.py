"""State that survives the server: look-ups of the event loop, and openings beside openings that stand still."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from ipc.processes.starting import TOP
from ipc.store import lasting
from ipc.store.lasting import LastingStore
from ipc.store.store import StoreUnreadable

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER);"
STOPS_IN_ITS_TURN = """
import asyncio, os, signal, sys
from pathlib import Path
from ipc.store import lasting
def stop(self):
    os.kill(os.getpid(), signal.SIGSTOP)
    return prepared(self)
prepared, lasting.LastingStore._prepared = lasting.LastingStore._prepared, stop
path = Path(sys.argv[1])
asyncio.run(lasting.LastingStore(path, "CREATE TABLE numbers (number INTEGER);").write(lambda each: None))
"""


@contextmanager
def stopped_in_its_turn(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that makes the file `path`, and stands still with its turn."""
    with subprocess.Popen([sys.executable, "-c", STOPS_IN_ITS_TURN, str(path)], cwd=TOP) as other:
        try:
            _, status = os.waitpid(other.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            yield other
        finally:
            other.kill()


async def add(store: LastingStore) -> int:
    """Write a row; returns how many rows there are."""
    await store.write(lambda each: each.execute("INSERT INTO numbers VALUES (1)"))
    rows: list[tuple[int]] = await store.read(lambda each: each.execute("SELECT * FROM numbers").fetchall())
    return len(rows)


def test_a_process_that_stands_still_with_its_turn_keeps_nobody_from_a_file_with_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "WAIT_S", 0.05)
    path = tmp_path / "lasting.db"

    async def act() -> None:
        assert await add(LastingStore(path, SCHEMA)) == 1
        with stopped_in_its_turn(tmp_path / "other.db"):
            late = LastingStore(path, SCHEMA)
            assert await late.find(lambda each: each.execute("SELECT * FROM numbers").fetchall()) == [(1,)]
            assert await late.version() and await add(late) == 2

    asyncio.run(act())


def test_who_cannot_make_a_file_tells_the_process_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting, "WAIT_S", 0.05)
    mine = LastingStore(tmp_path / "lasting.db", SCHEMA)

    async def act() -> None:
        with stopped_in_its_turn(tmp_path / "lasting.db") as other:
            with pytest.raises(StoreUnreadable, match="another process is opening"):
                await add(mine)
            assert f"process {other.pid} (stopped) has kept files of {tmp_path} locked" in caplog.text
            monkeypatch.setattr(lasting, "WAIT_S", 60.0)
            os.kill(other.pid, signal.SIGCONT)
            assert await add(mine) == 1

    asyncio.run(act())


def test_a_look_up_on_the_event_loop_sees_each_commit_and_waits_for_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "lasting.db"
    mine = LastingStore(path, SCHEMA)
    threads = list[int]()

    def count(connection: sqlite3.Connection) -> int:
        threads.append(threading.get_ident())
        (number,) = connection.execute("SELECT count(*) FROM numbers").fetchone()
        return int(number)

    async def act() -> None:
        assert await mine.find(count) == 0
        await LastingStore(path, "").write(lambda each: each.execute("INSERT INTO numbers VALUES (1)"))
        assert await mine.find(count) == 1
        assert set(threads) == {threading.get_ident()}
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("INSERT INTO numbers VALUES (2)")
            assert await mine.find(count) == 1
            other.execute("COMMIT")
        assert await mine.find(count) == 2
        assert set(threads) == {threading.get_ident()}

    asyncio.run(act())


def test_a_look_up_in_a_file_that_is_locked_leaves_the_event_loop_free(tmp_path: Path) -> None:
    mine = LastingStore(tmp_path / "lasting.db", "")
    threads = list[int]()

    def look(_: sqlite3.Connection) -> str:
        threads.append(threading.get_ident())
        if threads == [threading.get_ident()]:
            locked = sqlite3.OperationalError("database is locked")
            locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise locked
        return "read"

    assert asyncio.run(mine.find(look)) == "read"
    assert len(threads) == 2 and threads[0] != threads[1]


def test_a_version_leaves_the_event_loop_free_while_another_process_opens_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, waits = LastingStore(tmp_path / "lasting.db", ""), threading.Event()
    threads = set[int]()
    is_taken = lasting.is_taken

    def observed(lock: int) -> bool:
        threads.add(threading.get_ident())
        taken = is_taken(lock)
        if not taken:
            waits.set()
        return taken

    monkeypatch.setattr(lasting, "is_taken", observed)
    other = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)

    async def act() -> None:
        assert is_taken(other)
        version = asyncio.ensure_future(mine.version())
        assert await asyncio.to_thread(waits.wait, 60)
        os.close(other)
        assert await version == await mine.version()
        assert threads and threading.get_ident() not in threads

    asyncio.run(act())


@pytest.mark.parametrize("before", [None, b"this is no database" * 100], ids=["no file", "a broken file"])
def test_processes_that_open_the_file_at_once_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None
) -> None:
    path = tmp_path / "lasting.db"
    if before is not None:
        path.write_bytes(before)
    first, second = LastingStore(path, SCHEMA), LastingStore(path, SCHEMA)
    opens, goes_on = threading.Event(), threading.Event()
    connect, is_taken = lasting.connect, lasting.is_taken

    def slow(path: Path, timeout_s: float) -> sqlite3.Connection:
        """Let `first` stand still with the file open, and locked if the file can be, until `second` waits or ends."""
        connection = connect(path, timeout_s)
        if timeout_s != lasting.WAIT_S:
            # The look whether the file has its tables.
            return connection
        if not opens.is_set():
            with suppress(sqlite3.DatabaseError):
                connection.execute("BEGIN IMMEDIATE")
            opens.set()
            assert goes_on.wait(60)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return connection

    def observed(lock: int) -> bool:
        taken = is_taken(lock)
        if not taken:
            goes_on.set()
        return taken

    monkeypatch.setattr(lasting, "connect", slow)
    monkeypatch.setattr(lasting, "is_taken", observed)

    async def act() -> None:
        writes = [
            asyncio.create_task(
                first.write(lambda each: each.execute("INSERT INTO numbers VALUES (1)").rowcount)
            )
        ]
        assert await asyncio.to_thread(opens.wait, 60)
        writes.append(
            asyncio.create_task(
                second.write(lambda each: each.execute("INSERT INTO numbers VALUES (2)").rowcount)
            )
        )
        writes[1].add_done_callback(lambda _: goes_on.set())
        assert await asyncio.gather(*writes) == [1, 1]
        for each in (first, second):
            found = await each.read(
                lambda connection: connection.execute("SELECT number FROM numbers").fetchall()
            )
            assert sorted(found) == [(1,), (2,)]

    asyncio.run(act())
    broken = path.with_suffix(".broken")
    assert (broken.read_bytes() if broken.exists() else None) == before
