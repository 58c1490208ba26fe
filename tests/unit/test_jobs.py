"""The book of open jobs: what an ended job is given goes back at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ipc.arena import Arena
from ipc.endpoint import Endpoint
from ipc.errors import InferenceFailed
from ipc.leases import LeaseTable
from ipc.settings import Settings
from tests.unit.test_batcher import job
from workers.job import Job, Output
from workers.jobs import JobBook
from workers.queue import WorkQueue


def ended(book: JobBook, how: str) -> Job:
    """A job that has ended before its output was there."""
    made = job([1])
    book.open(made)
    if how == "cancelled":
        book.cancel(made)
    else:
        book.fail(made, InferenceFailed("no"))
    return made


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_block_that_comes_for_an_ended_job_is_given_back(tmp_path: Path, how: str) -> None:
    arena = Arena(tmp_path / "arena", 1 << 20, "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint = SimpleNamespace(leases=leases, post=lambda work: None)
        book = JobBook(WorkQueue(Settings()), lambda: cast("Endpoint", endpoint))
        late = ended(book, how)
        block = leases.reserve(10_000)
        assert block is not None and leases.used_nbytes > 0
        book.attach(late, Output(block, leases.data(block), {}))
        assert leases.used_nbytes == 0 and late.output is None
        leases.verify()
    finally:
        arena.close()


def test_a_block_of_an_open_job_stays(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 1 << 20, "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint = SimpleNamespace(leases=leases, post=lambda work: None)
        book = JobBook(WorkQueue(Settings()), lambda: cast("Endpoint", endpoint))
        waiting = job([1])
        book.open(waiting)
        block = leases.reserve(10_000)
        assert block is not None
        book.attach(waiting, Output(block, leases.data(block), {}))
        assert leases.used_nbytes > 0 and waiting.output is not None
        book.cancel(waiting)
        assert leases.used_nbytes == 0
    finally:
        arena.close()
