"""Request numbers rise by one over all processes, and a killed holder of the lock blocks nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from frontend.protocols.trtis_v1.numbers import FILE_NAME, RequestNumbers


def _take(root: Path, count: int, queue: multiprocessing.Queue[list[int]]) -> None:
    numbers = RequestNumbers(root)
    queue.put([numbers.next() for _ in range(count)])


def test_numbers_begin_at_one_and_rise_by_one(tmp_path: Path) -> None:
    numbers = RequestNumbers(tmp_path)
    assert [numbers.next() for _ in range(3)] == [1, 2, 3]
    other = RequestNumbers(tmp_path)
    assert other.next() == 4 and numbers.next() == 5
    numbers.close()
    other.close()


def test_no_number_is_lost_or_given_twice_when_processes_compete(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[int]] = context.Queue()
    workers = [context.Process(target=_take, args=(tmp_path, 500, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    taken = [number for _ in workers for number in queue.get(timeout=30)]
    for worker in workers:
        worker.join(timeout=30)
    assert sorted(taken) == list(range(1, 2001))


def test_the_lock_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    import fcntl

    RequestNumbers(tmp_path).next()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        fd = os.open(tmp_path / FILE_NAME, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert RequestNumbers(tmp_path).next() == 2
    os.close(read)
    os.close(write)


def test_a_file_cut_short_starts_again(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"abc")
    assert RequestNumbers(tmp_path).next() == 1
