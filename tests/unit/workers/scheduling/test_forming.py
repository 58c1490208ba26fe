"""Batches formed ahead: a query that comes later passes one, and passes it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from ipc.settings import Settings
from tests.unit.workers.scheduling.test_batcher import job
from workers.scheduling.bound import ModelBudgets
from workers.scheduling.executor import NextBatch
from workers.scheduling.job import Batch, Job, Piece
from workers.scheduling.queue import WorkQueue


class Table:
    """A table of jobs that are all open."""

    def claim_pieces(self, pieces: list[Piece]) -> list[Piece]:
        """All of them."""
        return pieces


class Collating:
    """An adapter that collates nothing."""

    gathering = batch_tokens = None

    def collate(self, prepared: Sequence[Any]) -> list[Any]:
        """The items as they are."""
        return list(prepared)


def unrecorded(entries: list[tuple[int, int]]) -> None:
    """No flight record."""


def former(
    *jobs: Job, record: Callable[[list[tuple[int, int]]], None] = unrecorded
) -> tuple[WorkQueue, NextBatch]:
    """A queue with these jobs, and what forms its batches of at most ten tokens."""
    work = WorkQueue(Settings())
    for one in jobs:
        put(work, one)
    return work, NextBatch(work, cast(Any, Table()), ModelBudgets(10), 512, record)


def put(work: WorkQueue, one: Job) -> None:
    """All items of a job wait for the device."""
    one.adapter, one.queued_ns = Collating(), 0
    work.put(one, 0, len(one.prepared))


def lanes(batch: Batch | None) -> set[str]:
    """Lanes of a batch's items."""
    assert batch is not None
    return {piece.job.work.lane for piece in batch.pieces}


def test_a_batch_formed_ahead_runs_next_when_nothing_urgent_came() -> None:
    _, forming = former(job([5] * 4, lane="bulk"))
    forming.form_ahead()
    assert forming.ahead
    assert lanes(forming.take()) == {"bulk"} and not forming.ahead


def test_a_query_passes_a_bulk_batch_that_was_formed_ahead_but_only_once() -> None:
    work, forming = former(job([5] * 4, lane="bulk"))
    forming.form_ahead()
    put(work, job([1], caller=b"b"))
    assert lanes(forming.take()) == {"interactive"} and forming.ahead
    put(work, job([1], caller=b"b"))
    assert lanes(forming.take()) == {"bulk"} and not forming.ahead
    assert "interactive" in lanes(forming.take())


def test_forming_ahead_twice_loses_no_batch() -> None:
    _, forming = former(job([5] * 4, lane="bulk"))
    forming.form_ahead()
    forming.form_ahead()
    taken = [forming.take() for _ in range(2)]
    assert [batch.tokens for batch in taken if batch] == [10, 10]


def test_the_flight_record_names_a_batch_while_code_of_its_model_collates() -> None:
    recorded: list[list[tuple[int, int]]] = []
    one, seen = job([5]), []

    class Noting(Collating):
        def collate(self, prepared: Sequence[Any]) -> list[Any]:
            seen.append(list(recorded))
            return super().collate(prepared)

    work, forming = former(record=recorded.append)
    put(work, one)
    one.adapter = Noting()
    assert forming.take() is not None
    assert seen == [[[(one.tag, one.id)]]] and recorded[-1] == []
