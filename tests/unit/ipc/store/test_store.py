"""The store of a server: what every process sees, and what the death or standstill of a writer may not do."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ipc import deadline
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.processes.starting import TOP
from ipc.store.store import Store, StoreUnreadable, Table, begin

OPEN = """
import signal, sys
from pathlib import Path
from ipc.processes.paths import RunPaths
from ipc.store.store import Store, Table
table = Table(Store(RunPaths(Path(sys.argv[1]), "t")), "k", str)
"""
WRITES_FOR_EVER = """
def how(rows):
    rows["a"] = rows["b"] = str(int(rows["a"]) + 1)
print("begun", flush=True)
while True:
    table.change_now(how)
"""
STAYS_IN_A_CHANGE = """
def how(rows):
    rows["a"] = "half a change"
    print("begun", flush=True)
    signal.pause()
table.change_now(how)
"""

FINDS_NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
print("begun", flush=True)
try:
    table.change_now(lambda rows: rows.update(a="x" * 100_000))
except OSError as error:
    print(error.strerror, flush=True)
"""


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """The run directory of a server that has just started."""
    found = RunPaths(tmp_path, "t")
    prepare_run_dir(found)
    begin(found)
    return found


@contextmanager
def process(paths: RunPaths, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of the server, which has said that it has begun."""
    command = [sys.executable, "-c", OPEN + program, str(paths.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TOP) as found:
        try:
            assert found.stdout is not None and found.stdout.readline() == b"begun\n"
            yield found
        finally:
            found.kill()


def table(paths: RunPaths, kind: str = "k") -> Table[str]:
    """A table as one more process has it."""
    return Table(Store(paths), kind, str)


def put(table: Table[str], key: str, value: str) -> None:
    """Write one row."""
    table.change_now(lambda rows: rows.update({key: value}))


def test_what_one_process_writes_every_other_sees_at_its_next_read(paths: RunPaths) -> None:
    here, elsewhere = table(paths), table(paths)
    assert here.rows() == elsewhere.rows() == {}
    put(here, "a", "1")
    assert here.rows() == elsewhere.rows() == {"a": "1"}
    put(elsewhere, "a", "2")
    put(elsewhere, "b", "3")
    assert here.rows() == elsewhere.rows() == {"a": "2", "b": "3"}
    here.change_now(lambda rows: rows.pop("a"))
    assert here.rows() == elsewhere.rows() == {"b": "3"}


def test_rows_are_read_again_only_when_their_kind_has_changed(paths: RunPaths) -> None:
    store = Store(paths)
    one, other = Table(store, "k", str), Table(store, "other", str)
    put(one, "a", "1")
    before = one.rows()
    put(other, "a", "1")
    put(one, "a", "1")
    assert one.rows() is before and other.rows() == {"a": "1"}
    put(one, "a", "2")
    assert one.rows() is not before


@pytest.mark.parametrize("key", ["../../x", "org/name", "\ud800", "x" * 5000, "", "nul\0"])
def test_any_text_is_a_key(paths: RunPaths, key: str) -> None:
    put(table(paths), key, "1")
    assert table(paths).rows() == {key: "1"}


def test_only_this_user_can_read_any_of_it(paths: RunPaths) -> None:
    state = table(paths)
    put(state, "a", "1")
    assert state.rows() == {"a": "1"}
    assert stat.S_IMODE(paths.store().stat().st_mode) == 0o700
    files = [path for path in paths.store().iterdir() if not path.is_symlink()]
    assert len(files) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_change_that_raises_changes_nothing(paths: RunPaths) -> None:
    state = table(paths)
    put(state, "a", "1")

    def refuse(rows: dict[str, str]) -> None:
        rows["a"] = "2"
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        asyncio.run(state.change(refuse))
    assert state.rows() == {"a": "1"}


def test_the_next_start_finds_nothing_and_processes_that_outlive_the_server_follow(paths: RunPaths) -> None:
    outliving = table(paths)
    put(outliving, "a", "1")
    assert outliving.rows() == {"a": "1"}
    begin(paths)
    assert outliving.rows() == table(paths).rows() == {}
    put(table(paths), "b", "2")
    assert outliving.rows() == {"b": "2"}
    assert sum(path.suffix == ".db" for path in paths.store().iterdir()) == 1


def test_what_a_start_that_was_killed_left_is_gone_after_the_next(paths: RunPaths) -> None:
    (paths.store() / "0123.db").write_bytes(b"not finished")
    (paths.store() / "0123.db.link").symlink_to("0123.db")
    begin(paths)
    found = (paths.store() / "current").resolve()
    assert sorted(paths.store().iterdir()) == sorted([found, paths.store() / "current"])


def test_a_worker_that_starts_before_the_server_finds_nothing_and_makes_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "t")
    prepare_run_dir(paths)
    store = table(paths)
    assert store.rows() == {} and not list(paths.store().iterdir())
    begin(paths)
    put(table(paths), "a", "1")
    assert store.rows() == {"a": "1"}


def test_a_file_that_is_damaged_is_told_and_gone_at_the_next_start(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    knowing = table(paths)
    put(knowing, "a", "1")
    assert knowing.rows() == {"a": "1"}
    knowing._store.close()
    file = (paths.store() / "current").resolve()
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnreadable, match="cannot be read"):
        table(paths).rows()
    with pytest.raises(StoreUnreadable, match="file is not a database"):
        put(table(paths), "a", "1")
    begin(paths)
    put(table(paths), "a", "2")
    assert knowing.rows() == {"a": "2"}


def test_a_writer_killed_at_any_moment_leaves_whole_changes_only(paths: RunPaths) -> None:
    store = table(paths)
    store.change_now(lambda rows: rows.update(a="0", b="0"))
    for _ in range(2):
        before = int(store.rows()["a"])
        with process(paths, WRITES_FOR_EVER) as one, process(paths, WRITES_FOR_EVER) as other:
            while int(store.rows()["a"]) < before + 20:
                assert len(set(store.rows().values())) == 1
            one.kill()
            other.kill()
        found = set(store.rows().values())
        assert len(found) == 1 and found == set(table(paths).rows().values())
        put(table(paths, "other"), "written after the deaths", "0")


def test_a_writer_that_stands_still_keeps_readers_and_the_loop_going_and_other_writers_waiting(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = table(paths)
    put(store, "a", "1")
    threads, began, attempt = set[threading.Thread](), threading.Event(), Store.attempt

    def seen(self: Store, how: Any) -> Any:
        threads.add(threading.current_thread())
        began.set()
        return attempt(self, how)

    async def write_in_vain() -> None:
        writing = asyncio.create_task(store.change(lambda rows: rows.update(b="2"), deadline.after(600)))
        assert await asyncio.to_thread(began.wait, 20)
        for _ in range(20):
            assert store.rows() == table(paths).rows() == {"a": "1"}
            await asyncio.sleep(0)
        assert not writing.done()
        writing.cancel()
        with pytest.raises(DeadlineExceeded, match="before another process had ended its change"):
            await store.change(lambda rows: rows.update(b="3"), deadline.after(0))

    monkeypatch.setattr(Store, "attempt", seen)
    with process(paths, STAYS_IN_A_CHANGE) as standing:
        os.kill(standing.pid, signal.SIGSTOP)
        asyncio.run(write_in_vain())
        assert threading.main_thread() not in threads
        begin(paths)
        assert store.rows() == {}, "the next start does not wait either"
        put(store, "a", "3")
        os.kill(standing.pid, signal.SIGCONT)
        standing.kill()
    assert store.rows() == table(paths).rows() == {"a": "3"}


def test_a_change_whose_caller_hangs_up_ends_after_its_attempt(paths: RunPaths) -> None:
    store, inside, may_end = table(paths), threading.Event(), threading.Event()

    def change(rows: dict[str, str]) -> None:
        inside.set()
        assert may_end.wait(20)
        rows["a"] = "1"

    async def hang_up() -> None:
        writing = asyncio.create_task(store.change(change))
        assert await asyncio.to_thread(inside.wait, 20)
        writing.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not writing.done(), "the thread still writes"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert store.rows() == {"a": "1"}, "what undoes the change finds it"

    asyncio.run(hang_up())


def test_a_writer_that_dies_in_its_change_delays_nobody(paths: RunPaths) -> None:
    store = table(paths)
    put(store, "a", "1")
    with process(paths, STAYS_IN_A_CHANGE) as dying:
        dying.kill()
        dying.wait()
        assert store.rows() == {"a": "1"}
        put(store, "b", "2")
    assert store.rows() == table(paths).rows() == {"a": "1", "b": "2"}


def test_a_change_without_room_on_the_disk_is_told_as_such_and_changes_nothing(paths: RunPaths) -> None:
    mine = table(paths)
    put(mine, "a", "before")
    with process(paths, FINDS_NO_ROOM) as other:
        assert other.stdout is not None
        told = other.stdout.read().decode()
    assert "disk I/O error" in told or "disk is full" in told
    assert mine.rows() == {"a": "before"}
    put(mine, "a", "after")
    assert mine.rows() == {"a": "after"}


def test_changes_of_one_row_by_many_at_once_are_all_there(paths: RunPaths) -> None:
    frontends = [Table(Store(paths), "count", int) for _ in range(4)]

    def count(rows: dict[str, int]) -> None:
        rows[""] = rows.get("", 0) + 1

    async def work() -> None:
        await asyncio.gather(*(each.change(count, deadline.after(30)) for each in frontends * 5))

    asyncio.run(work())
    assert [each.rows() for each in frontends] == [{"": 20}] * 4


def test_a_change_by_hand_is_seen(paths: RunPaths) -> None:
    state = table(paths)
    put(state, "a", "1")
    assert state.rows() == {"a": "1"}
    with closing(sqlite3.connect(paths.store() / "current", isolation_level=None)) as operator:
        for change, expected in (
            ("UPDATE state SET value = '\"2\"'", {"a": "2"}),
            ("DELETE FROM state WHERE kind = 'k'", {}),
        ):
            operator.execute(change)
            assert state.rows() == expected


@pytest.mark.parametrize(("key", "value"), [(b"odd", b"[1]"), (b"odd", b"{"), (b"\xff\xfe", b'"v"')])
def test_a_row_of_another_form_is_told_passed_over_and_deleted_by_the_next_change(
    paths: RunPaths, caplog: pytest.LogCaptureFixture, key: bytes, value: bytes
) -> None:
    """A process of another version may have written the row."""
    mine = table(paths)
    put(mine, "a", "1")
    file = paths.store() / (paths.store() / "current").readlink()
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("INSERT INTO state VALUES ('k', ?, ?)", (key, value))
        assert mine.rows() == {"a": "1"}
        assert "passed over" in caplog.text
        put(mine, "b", "2")
        assert other.execute("SELECT key FROM state WHERE kind = 'k'").fetchall() == [(b"a",), (b"b",)]
    assert mine.rows() == {"a": "1", "b": "2"}
