"""What runs do now: told by their frontends in places of a small file, read by all, gone with the run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from frontend.records import recent
from frontend.records.recent import (
    MAX_ARGUMENTS_NBYTES,
    PLACE_NBYTES,
    PLACES,
    LiveRun,
    LiveRuns,
    RunReader,
    cut,
)
from ipc.processes.paths import RunPaths, prepare_run_dir

RUN = LiveRun("r1", "org/model", "key", 5.0, "model", 5.0)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run", "test")
    prepare_run_dir(found)
    return found


def taken(board: LiveRuns) -> int:
    place = board.take()
    assert place is not None
    return place


def test_readers_see_the_runs_of_all_frontends_until_they_end(paths: RunPaths) -> None:
    first, second = (LiveRuns(paths, f"frontend-{slot}") for slot in range(2))
    assert RunReader(paths).read() == [] and not list(paths.metrics().iterdir()), "no file without a run"
    at, other = taken(first), taken(second)
    first.show(at, RUN)
    second.show(other, msgspec.structs.replace(RUN, request_id="r0", began=4.0))
    assert [run.request_id for run in RunReader(paths).read()] == ["r0", "r1"]
    first.show(at, msgspec.structs.replace(RUN, doing="tool", since=6.0, tool="Python code", arguments="6*7"))
    now = RunReader(paths).read()[1]
    assert (now.doing, now.since, now.tool, now.arguments) == ("tool", 6.0, "Python code", "6*7")
    first.give_back(at)
    assert [run.request_id for run in RunReader(paths).read()] == ["r0"]
    assert b"6*7" not in (paths.metrics() / "frontend-0.runs").read_bytes(), "arguments do not outlive a run"
    second.close()
    assert RunReader(paths).read() == [] and [path.name for path in paths.metrics().iterdir()] == [
        "frontend-0.runs"
    ]


def test_a_frontend_that_was_killed_has_no_runs(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    identity = recent.own_identity().replace(f" {os.getpid()} ", f" {ended.pid} ")
    monkeypatch.setattr(recent, "own_identity", lambda: identity)
    board = LiveRuns(paths, "frontend-0")
    board.show(taken(board), RUN)
    assert RunReader(paths).read() == []
    LiveRuns(paths, "frontend-0")
    assert not list(paths.metrics().iterdir()), "the next life of the slot begins without the file"


def test_a_run_may_end_after_its_frontend(paths: RunPaths) -> None:
    board = LiveRuns(paths, "frontend-0")
    place = taken(board)
    board.close()
    board.show(place, RUN)
    board.give_back(place)
    assert board.take() is None and not list(paths.metrics().iterdir())


def test_more_runs_than_places_go_on_without_a_place(paths: RunPaths) -> None:
    board = LiveRuns(paths, "frontend-0")
    places = [taken(board) for _ in range(PLACES)]
    assert len(set(places)) == PLACES and board.take() is None
    board.give_back(places[7])
    assert board.take() == places[7]


def test_without_room_on_the_disk_no_run_is_shown(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    board = LiveRuns(paths, "frontend-0")
    assert board.take() is None and board.take() is None


def test_a_record_that_is_being_written_is_left_out(paths: RunPaths) -> None:
    board = LiveRuns(paths, "frontend-0")
    for number in range(2):
        board.show(taken(board), msgspec.structs.replace(RUN, request_id=f"r{number}"))
    file = paths.metrics() / "frontend-0.runs"
    torn = bytearray(file.read_bytes())
    torn[PLACE_NBYTES + 40] ^= 0xFF
    file.write_bytes(torn)
    assert [run.request_id for run in RunReader(paths).read()] == ["r0"]


@pytest.mark.parametrize("nbytes", [0, 100, PLACE_NBYTES])
def test_a_file_that_is_being_made_has_no_runs(paths: RunPaths, nbytes: int) -> None:
    board = LiveRuns(paths, "frontend-1")
    board.show(taken(board), RUN)
    (paths.metrics() / "frontend-0.runs").write_bytes(b"\1" * nbytes)
    assert [run.request_id for run in RunReader(paths).read()] == ["r1"]


def test_the_longest_record_fits_and_arguments_are_cut_within_a_character(paths: RunPaths) -> None:
    board = LiveRuns(paths, "frontend-0")
    name = "\U0001f40e" * 500
    arguments = cut("🐎" * 5000 + "\ud800")
    assert len(arguments.encode()) == MAX_ARGUMENTS_NBYTES and set(arguments) == {"🐎"}
    longest = LiveRun(
        "r" * 128, name, "k" * 64, 1e9, "approval", 1e9, 1 << 31, 1 << 31, name, arguments, 1 << 40
    )
    board.show(taken(board), msgspec.structs.replace(longest, approval_id="appr_" + "f" * 32))
    [shown] = RunReader(paths).read()
    assert (shown.arguments, shown.arguments_chars) == (arguments, 1 << 40)
    assert shown.model == shown.tool == name[: recent.MAX_NAME]
