"""Request numbers rise by one over all processes, and no process can keep another one from its number."""

from __future__ import annotations

import fcntl
import multiprocessing
from pathlib import Path

import pytest

from frontend.protocols.trtis_v1 import statuses
from frontend.protocols.trtis_v1.requests import one_line
from frontend.protocols.trtis_v1.statuses import FILE_NAME, RequestNumbers
from ipc import sweep
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import load


def paths_of(tmp_path: Path) -> RunPaths:
    """The run directory of a server in `tmp_path`."""
    paths = load(None, {"run.dir": str(tmp_path)}, {}).paths
    prepare_run_dir(paths)
    return paths


def _take(paths: RunPaths, count: int, queue: multiprocessing.Queue[list[int]]) -> None:
    given = RequestNumbers(paths)
    queue.put([given.next() for _ in range(count)])


def test_numbers_begin_at_one_and_rise_by_one(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    given = RequestNumbers(paths)
    assert [given.next() for _ in range(3)] == [1, 2, 3]
    other = RequestNumbers(paths)
    assert other.next() == 4 and given.next() == 5
    given.close()
    other.close()


def test_no_number_is_lost_or_given_twice_when_processes_compete(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[int]] = context.Queue()
    paths = paths_of(tmp_path)
    workers = [context.Process(target=_take, args=(paths, 500, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    taken = [number for _ in workers for number in queue.get(timeout=60)]
    for worker in workers:
        worker.join(timeout=30)
    assert sorted(taken) == list(range(1, 2001))


def test_a_process_that_holds_every_lock_on_the_file_keeps_nobody_waiting(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    RequestNumbers(paths).next()
    queue = multiprocessing.get_context("fork").Queue()
    with (paths.control() / FILE_NAME).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fcntl.lockf(held, fcntl.LOCK_EX)
        other = multiprocessing.get_context("fork").Process(target=_take, args=(paths, 2, queue))
        other.start()
        try:
            assert queue.get(timeout=60) == [2, 3]
        finally:
            other.kill()
            other.join()


def test_numbers_begin_at_one_when_the_server_starts_again(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    before = RequestNumbers(paths)
    assert [before.next(), before.next()] == [1, 2]
    sweep.forget(paths)
    assert RequestNumbers(paths).next() == 1


def test_the_file_takes_no_room_for_numbers_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statuses, "KEPT_NBYTES", 64 << 10)
    paths = paths_of(tmp_path)
    path = paths.control() / FILE_NAME
    path.write_bytes(bytes((64 << 10) - 1))
    given = RequestNumbers(paths)
    assert given.next() == 64 << 10
    assert path.stat().st_blocks == 0
    assert given.next() == (64 << 10) + 1


def test_a_number_that_cannot_be_written_costs_no_request_its_answer(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    (paths.control() / FILE_NAME).mkdir()
    assert RequestNumbers(paths).next() == 0


@pytest.mark.parametrize("server_id", ["penstock", 'a "quoted" näme'])
def test_the_line_of_a_success_is_the_printed_status_with_the_next_number(
    server_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths_of(tmp_path)
    made = statuses.Statuses(load(None, {"run.dir": str(tmp_path), "trtis.server_id": server_id}, {}))
    monkeypatch.setattr(made.numbers, "next", lambda: 7)
    assert made.success_line() == one_line(made.success())
    monkeypatch.setattr(made.numbers, "next", lambda: 0)
    assert made.success_line() == one_line(made.success()), "a number that could not be drawn is not printed"
