"""What the device thread learns of the pace of a model: from what ran, and not from what ended early or failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem
from tests.fakes.adapter import FakeAdapter
from tests.fakes.jobs import make_job, replan
from workers.adapters.base import ItemFailure, Prepared
from workers.device import stepping
from workers.device.stepping import LEAST_STEP_S
from workers.scheduling.context import Context
from workers.scheduling.executor import Executor
from workers.scheduling.job import Batch, Job, Piece
from workers.strategies.one_shot import OneShot

TEXT = "a text that is read in some parts"


class InParts(FakeAdapter):
    """Reads every batch in three parts; all callers leave after the first when the text says so."""

    def __init__(self) -> None:
        super().__init__({}, 1 << 20)
        self.room: Callable[[], bool] = lambda: True
        self.jobs: list[Job] = []

    def run(self, texts: Sequence[str], tokens: int) -> None:
        for number in stepping.each(range(3), [tokens] * 3):
            super().run(texts, tokens)
            if "#full" in texts[0] and not self.room():
                raise MemoryError("the rest of the memory is that of a suspended batch")
            if number == 0 and "#leave" in texts[0]:
                for job in self.jobs:
                    job.state = "cancelled"

    def extract(self, batch: Any) -> list[Extraction | ItemFailure]:
        """As families that write do: items that nobody waits for are failures, and the batch is not."""
        texts = [text for text, _ in batch[0]]
        left = ItemFailure("DEADLINE_EXCEEDED", "writing ended before the text was whole")
        return [left if "#leave" in text else Extraction() for text in texts]


@pytest.fixture
def executor() -> Executor:
    """Without its threads: a test runs the batches."""
    settings, metrics = Settings(), WorkerMetrics("worker-0")
    table: Any = SimpleNamespace(
        claim_pieces=list,
        complete=lambda job, items, errors, wake=True: job.errors.update({e.index: e for e in errors}),
        wake_endpoint=lambda: None,
        unclaim_pieces=lambda pieces: None,
    )
    arena: Any = SimpleNamespace(record_flight=lambda flight: None, record_forming=lambda flight: None)
    endpoint: Any = None
    context = replace(Context.make(settings, metrics, arena, endpoint, 1 << 20), jobs=table)
    STRATEGY.clear()
    STRATEGY.append(OneShot(context, lambda model, wait_s: False))
    return Executor(context, lambda model: None)


STRATEGY: list[OneShot] = []
"""The strategy of the executor under test."""


def batch_of(*texts: str, extract: bool = False) -> Batch:
    """A batch of one job with these texts."""
    items, adapter = [InputItem(text) for text in texts], InParts()
    call: Call = ExtractCall(items) if extract else EncodeCall(items, ["dense"])
    job = make_job(call, of=adapter, strategy=STRATEGY[0])
    job.prepared = [item for item in adapter.prepare(items, call) if isinstance(item, Prepared)]
    job.group = "m"
    adapter.jobs.append(job)
    pieces = [Piece(job, at, item) for at, item in enumerate(job.prepared)]
    return Batch(pieces, None, sum(item.cost for item in job.prepared), 0.0)


def run(executor: Executor, batch: Batch) -> tuple[float, float]:
    """The paces of the model and of the device after this batch."""
    with torch.inference_mode():
        executor.run_turn(batch)
    return executor._queue.paces.tokens_per_s("m"), executor._queue.rate.tokens_per_s


@pytest.mark.parametrize("text", [TEXT + "#leave", TEXT + "#raise"])
def test_a_batch_that_ends_early_or_fails_leaves_the_pace_as_it_was(executor: Executor, text: str) -> None:
    assert run(executor, batch_of(text * 100)) == (0.0, 0.0)
    known = run(executor, whole := batch_of(TEXT))
    assert min(known) > 0
    assert run(executor, batch_of(text * 100)) == known
    assert [record.tokens for record in executor.batches.records()] == [0, whole.tokens, 0]


def test_of_a_batch_in_halves_what_ran_counts(executor: Executor) -> None:
    batch = batch_of(TEXT, "#raise", TEXT)
    assert min(run(executor, batch)) > 0
    failed = batch.pieces[1].prepared.cost
    assert [record.tokens for record in executor.batches.records()] == [batch.tokens - failed]


def test_items_that_the_adapter_left_do_not_count(executor: Executor) -> None:
    assert run(executor, batch_of(TEXT + "#leave", extract=True)) == (0.0, 0.0)
    batch = batch_of(TEXT, "#leave", extract=True)
    assert min(run(executor, batch)) > 0
    left = batch.pieces[1].prepared.cost
    assert executor.batches.records()[-1].tokens == batch.tokens - left


def test_a_batch_that_makes_way_is_suspended_and_counts_for_itself(executor: Executor) -> None:
    long, waiting = batch_of(TEXT * 100), batch_of(TEXT)
    waiting.first.group = "another"
    executor._queue.put(waiting.first, 0, 1)
    run(executor, long)
    assert executor._queue.suspended and not executor.batches.records()
    assert not executor._activity.busy and not executor.idle
    clock, turns = time.monotonic_ns(), []
    while (batch := executor.next.take()) is not None:
        turns.append(batch)
        run(executor, batch)
    assert turns[0] is not long and turns.count(long) <= 3, "the waiting batch did not come first"
    tokens = {record.tokens for record in executor.batches.records()}
    assert tokens == {waiting.tokens, long.tokens} and executor.idle
    assert 0 < long.paused_ns <= time.monotonic_ns() - clock
    assert 0 < long.first.device_ns <= long.seconds * 1e9


def test_what_does_not_fit_beside_a_suspended_batch_runs_after_its_end(executor: Executor) -> None:
    long, large = batch_of(TEXT * 100), batch_of("#full" + TEXT)
    large.first.group = "another"
    large.first.adapter.room = lambda: not executor._queue.suspended and long.turn is None
    executor._queue.put(large.first, 0, 1)
    run(executor, long)
    assert executor._queue.suspended
    taken = executor.next.take()
    assert taken is not None and taken.first is large.first
    before_s = long.seconds
    run(executor, taken)
    assert not large.first.errors and executor.idle, (
        "the item failed for want of memory that was to come back"
    )
    assert [record.tokens for record in executor.batches.records()] == [long.tokens, large.tokens]
    assert taken.paused_ns >= (long.seconds - before_s) * 1e9 > 0, (
        "its own time on the device is not that of the other batch"
    )


def test_an_item_that_fits_in_no_case_fails_after_the_suspended_batches_have_ended(
    executor: Executor,
) -> None:
    long, large = batch_of(TEXT * 100), batch_of("#full" + TEXT)
    large.first.group = "another"
    large.first.adapter.room = lambda: False
    executor._queue.put(large.first, 0, 1)
    run(executor, long)
    taken = executor.next.take()
    assert taken is not None
    run(executor, taken)
    assert large.first.errors[0].code == "RESOURCE_EXHAUSTED" and not long.first.errors and executor.idle


def test_what_ends_while_a_batch_is_suspended_is_closed_before_the_batch_goes_on(executor: Executor) -> None:
    long = batch_of(TEXT * 100)
    closing: Any = object()
    executor._queue.ask(closing)
    run(executor, long)
    assert executor._queue.suspended and executor._queue.take_asking() == [closing]
    assert executor.next.take() is long
    run(executor, long)
    assert executor.idle and len(executor.batches.records()) == 1


def test_a_batch_may_take_until_its_last_deadline_but_no_longer_than_any_step(executor: Executor) -> None:
    run(executor, batch_of(TEXT))
    run(executor, batch_of(TEXT))
    assert executor._activity.limit_s == Settings().worker.hang_timeout_s == 60.0, (
        "the pace is known and short"
    )
    soon = batch_of(TEXT)
    replan(soon.first, deadline_ns=time.monotonic_ns() + 30_000_000_000)
    run(executor, soon)
    assert LEAST_STEP_S < executor._activity.limit_s <= 30.0


def test_a_call_that_comes_while_calls_run_lets_a_batch_go_first(executor: Executor) -> None:
    later: list[Future[str]] = []

    def first() -> str:
        later.append(executor._queue.call(lambda: "second"))
        return "first"

    called = executor._queue.call(first)
    executor._between_batches()
    assert called.result(0) == "first" and not later[0].done()
    executor._between_batches()
    assert later[0].result(0) == "second"
