"""The table of open jobs: what an ended job is given goes back at once, and who waits for too long."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ipc.errors import InferenceFailed, PenstockError
from ipc.memory.arena import Arena, LeaseTable
from ipc.settings import Settings
from tests.fakes.jobs import replan
from tests.unit.workers.scheduling.test_batcher import job
from workers.endpoint.endpoint import Endpoint
from workers.scheduling.job import Job, Output, Piece
from workers.scheduling.job_table import JobTable
from workers.scheduling.queue import WorkQueue

HOUR_NS = 3600 * 10**9


def ended(table: JobTable, how: str) -> Job:
    """A job that has ended before its output was there."""
    made = job([1])
    table.enter(made)
    if how == "cancelled":
        table.cancel(made)
    else:
        table.fail(made, InferenceFailed("no"))
    return made


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_block_that_comes_for_an_ended_job_is_given_back(tmp_path: Path, how: str) -> None:
    arena = Arena(tmp_path / "arena", 1 << 20, "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint = SimpleNamespace(leases=leases, post=lambda work, wake=True: None)
        table = JobTable(WorkQueue(Settings()), cast("Endpoint", endpoint))
        late = ended(table, how)
        block = leases.reserve(10_000)
        assert block is not None and leases.used_nbytes > 0
        table.attach(late, Output(block, leases.data(block), {}))
        assert leases.used_nbytes == 0 and late.output is None
        leases.verify()
    finally:
        arena.close()


def test_a_block_of_an_open_job_stays(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 1 << 20, "e" * 16)
    try:
        leases = LeaseTable(arena)
        endpoint = SimpleNamespace(leases=leases, post=lambda work, wake=True: None)
        table = JobTable(WorkQueue(Settings()), cast("Endpoint", endpoint))
        waiting = job([1])
        table.enter(waiting)
        block = leases.reserve(10_000)
        assert block is not None
        table.attach(waiting, Output(block, leases.data(block), {}))
        assert leases.used_nbytes > 0 and waiting.output is not None
        table.cancel(waiting)
        assert leases.used_nbytes == 0
    finally:
        arena.close()


def taken(table: JobTable, how: str) -> list[Piece]:
    """Pieces of a job that may wait for as long as `how` says, on their way to the device."""
    made = job([1, 1])
    now_ns = time.monotonic_ns()
    deadline_ns = now_ns + HOUR_NS
    start_by_ns = {"at ease": 0, "in time": deadline_ns - 1, "running": 1, "late": 1}[how]
    replan(made, deadline_ns=deadline_ns, start_by_ns=start_by_ns)
    made.first_run_ns = now_ns if how == "running" else 0
    table.enter(made)
    return [Piece(made, index, made.prepared[index]) for index in (0, 1)]


@pytest.mark.parametrize("how", ["at ease", "in time", "running", "late"])
def test_what_has_waited_for_too_long_does_not_go_to_the_device_and_what_runs_goes_on(how: str) -> None:
    told: list[str] = []

    def fail(session: bytes, number: int, error: PenstockError) -> None:
        told.append(error.code)

    endpoint = SimpleNamespace(fail=fail, post=lambda work, wake=True: work())
    table = JobTable(WorkQueue(Settings()), cast("Endpoint", endpoint))
    pieces = taken(table, how)
    made = pieces[0].job
    late = how == "late"
    assert table.claim_pieces(pieces) == ([] if late else pieces)
    assert (made.state, made.claims) == (("failed", 0) if late else ("open", 2))
    assert table.expire() == [] and told == ["DEADLINE_EXCEEDED"] * late


@pytest.mark.parametrize(("how", "ends"), [("in time", False), ("running", False), ("late", True)])
def test_waiting_ends_without_a_free_device(how: str, ends: bool) -> None:
    endpoint = SimpleNamespace(fail=lambda *of: None, post=lambda work, wake=True: work())
    table = JobTable(WorkQueue(Settings()), cast("Endpoint", endpoint))
    made = taken(table, how)[0].job
    assert table.expire() == [made] * ends
