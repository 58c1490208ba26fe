"""The store of a server: what every process sees, and what the death or standstill of a writer may not do."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from ipc import deadline
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.processes.starting import TOP
from ipc.store.shared import SharedStruct
from ipc.store.store import Change, Store, StoreUnreadable, begin

OPEN = """
import signal, sys
from pathlib import Path
from ipc.processes.paths import RunPaths
from ipc.store.store import Store
store = Store(RunPaths(Path(sys.argv[1]), "t"))
"""
WRITES_FOR_EVER = """
def how(change):
    last = int(change.get("k", "a").value)
    change.put("k", "a", b"%d" % (last + 1))
    change.put("k", "b", b"%d" % (last + 1))
print("begun", flush=True)
while True:
    store.write_now(how)
"""
STAYS_IN_A_CHANGE = """
def how(change):
    change.put("k", "a", b"half a change")
    print("begun", flush=True)
    signal.pause()
store.write_now(how)
"""


class Count(msgspec.Struct, frozen=True):
    """A number that frontends share."""

    number: int = 0


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


def put(store: Store, key: str, value: bytes, kind: str = "k") -> None:
    """Write one row."""
    store.write_now(lambda change: change.put(kind, key, value))


def values(store: Store, kind: str = "k") -> dict[str, bytes]:
    """The values of a kind by key."""
    return {key: row.value for key, row in store.rows(kind).items()}


def test_what_one_process_writes_every_other_sees_at_its_next_read(paths: RunPaths) -> None:
    here, elsewhere = Store(paths), Store(paths)
    assert values(here) == values(elsewhere) == {}
    put(here, "a", b"1")
    assert values(here) == values(elsewhere) == {"a": b"1"}
    put(elsewhere, "a", b"2")
    put(elsewhere, "b", b"3")
    assert values(here) == values(elsewhere) == {"a": b"2", "b": b"3"}
    here.write_now(lambda change: change.remove("k", "a"))
    assert values(here) == values(elsewhere) == {"b": b"3"}


def test_rows_are_read_again_only_when_their_kind_has_changed(paths: RunPaths) -> None:
    store = Store(paths)
    put(store, "a", b"1")
    before = store.rows("k")
    put(store, "a", b"1", kind="other")
    assert store.rows("k") is before
    put(store, "a", b"1")
    assert store.rows("k") is not before


def test_every_write_has_a_greater_generation_than_all_before_it(paths: RunPaths) -> None:
    store, seen = Store(paths), list[int]()
    for round_ in range(3):
        for kind in ("k", "other"):
            put(store, f"row {round_}", b"", kind)
            seen.append(max(row.generation for row in store.rows(kind).values()))
    begin(paths)
    put(store, "a", b"")
    seen.append(store.rows("k")["a"].generation)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("key", ["../../x", "org/name", "\ud800", "x" * 5000, "", "nul\0"])
def test_any_text_is_a_key(paths: RunPaths, key: str) -> None:
    put(Store(paths), key, b"1")
    assert values(Store(paths)) == {key: b"1"}


def test_only_this_user_can_read_any_of_it(paths: RunPaths) -> None:
    store = Store(paths)
    put(store, "a", b"1")
    assert values(store) == {"a": b"1"}
    assert stat.S_IMODE(paths.store().stat().st_mode) == 0o700
    files = [path for path in paths.store().iterdir() if not path.is_symlink()]
    assert len(files) == 3 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_change_that_raises_changes_nothing(paths: RunPaths) -> None:
    store = Store(paths)
    put(store, "a", b"1")

    def refuse(change: Change) -> None:
        change.put("k", "a", b"2")
        raise InvalidInput("no")

    with pytest.raises(InvalidInput):
        asyncio.run(store.write(refuse))
    assert values(store) == {"a": b"1"}


def test_the_next_start_finds_nothing_and_processes_that_outlive_the_server_follow(paths: RunPaths) -> None:
    outliving = Store(paths)
    put(outliving, "a", b"1")
    assert values(outliving) == {"a": b"1"}
    begin(paths)
    assert values(outliving) == values(Store(paths)) == {}
    put(Store(paths), "b", b"2")
    assert values(outliving) == {"b": b"2"}
    assert sum(path.suffix == ".db" for path in paths.store().iterdir()) == 1


def test_a_worker_that_starts_before_the_server_finds_nothing_and_makes_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "t")
    prepare_run_dir(paths)
    store = Store(paths)
    assert values(store) == {} and not list(paths.store().iterdir())
    begin(paths)
    put(Store(paths), "a", b"1")
    assert values(store) == {"a": b"1"}


def test_a_file_that_is_damaged_is_told_and_gone_at_the_next_start(
    paths: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    knowing = Store(paths)
    put(knowing, "a", b"1")
    assert values(knowing) == {"a": b"1"}
    knowing.close()
    file = (paths.store() / "current").resolve()
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnreadable, match="cannot be read"):
        Store(paths).rows("k")
    with pytest.raises(StoreUnreadable, match="file is not a database"):
        put(Store(paths), "a", b"1")
    begin(paths)
    put(Store(paths), "a", b"2")
    assert values(knowing) == {"a": b"2"}


def test_a_writer_killed_at_any_moment_leaves_whole_changes_only(paths: RunPaths) -> None:
    store = Store(paths)
    store.write_now(lambda change: (change.put("k", "a", b"0"), change.put("k", "b", b"0")))
    for _ in range(2):
        before = int(values(store)["a"])
        with process(paths, WRITES_FOR_EVER) as one, process(paths, WRITES_FOR_EVER) as other:
            while int(values(store)["a"]) < before + 20:
                assert len(set(values(store).values())) == 1
            one.kill()
            other.kill()
        found = set(values(store).values())
        assert len(found) == 1 and found == set(values(Store(paths)).values())
        put(store, "written after the deaths", b"0", kind="other")


def test_a_writer_that_stands_still_keeps_readers_and_the_loop_going_and_other_writers_waiting(
    paths: RunPaths,
) -> None:
    store = Store(paths)
    put(store, "a", b"1")

    async def write_in_vain() -> int:
        writing = asyncio.create_task(
            store.write(lambda change: change.put("k", "b", b"2"), deadline.after(0.3))
        )
        turns = 0
        while not writing.done():
            assert values(store) == values(Store(paths)) == {"a": b"1"}
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="before another process had ended its change"):
            await writing
        return turns

    with process(paths, STAYS_IN_A_CHANGE) as standing:
        os.kill(standing.pid, signal.SIGSTOP)
        assert asyncio.run(write_in_vain()) > 10
        begin(paths)
        assert values(store) == {}, "the next start does not wait either"
        put(store, "a", b"3")
        os.kill(standing.pid, signal.SIGCONT)
        standing.kill()
    assert values(store) == values(Store(paths)) == {"a": b"3"}


def test_a_writer_that_dies_in_its_change_delays_nobody(paths: RunPaths) -> None:
    store = Store(paths)
    put(store, "a", b"1")
    with process(paths, STAYS_IN_A_CHANGE) as dying:
        dying.kill()
        dying.wait()
        assert values(store) == {"a": b"1"}
        put(store, "b", b"2")
    assert values(store) == values(Store(paths)) == {"a": b"1", "b": b"2"}


def test_changes_of_one_struct_by_many_at_once_are_all_there(paths: RunPaths) -> None:
    frontends = [SharedStruct(Store(paths), "count", Count()) for _ in range(4)]

    async def count() -> None:
        changes = (
            each.change(lambda known: Count(known.number + 1), deadline.after(30)) for each in frontends * 5
        )
        await asyncio.gather(*changes)

    asyncio.run(count())
    assert {each.read().number for each in frontends} == {20}
    assert len({each.generation for each in frontends}) == 1
