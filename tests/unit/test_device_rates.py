"""What the device thread learns of the pace of a model: from what ran, and not from what ended early or failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ipc.settings import Settings
from ipc.wire.extraction import Extraction
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem
from tests.fakes.adapter import FakeAdapter
from workers.adapters.base import ItemFailure, Prepared
from workers.device import oom
from workers.device.executor import Executor
from workers.device.watchdog import LEAST_STEP_S
from workers.scheduling.forming import Batch
from workers.scheduling.job import Job, Piece
from workers.scheduling.queue import WorkQueue
from workers.strategies import stepping

TEXT = "a text that is read in some parts"


class InParts(FakeAdapter):
    """Reads every batch in three parts; all callers leave after the first when the text says so."""

    def __init__(self) -> None:
        super().__init__({}, 1 << 20)
        self.jobs: list[Job] = []

    def run(self, texts: Sequence[str], tokens: int) -> None:
        for number in stepping.each(range(3), [tokens] * 3):
            super().run(texts, tokens)
            if number == 0 and "#leave" in texts[0]:
                for job in self.jobs:
                    job.state = "cancelled"

    def extract(self, batch: Any) -> list[Extraction | ItemFailure]:
        """As families that write do: items that nobody waits for are failures, and the batch is not."""
        texts = [text for text, _ in batch[0]]
        left = ItemFailure("DEADLINE_EXCEEDED", "writing ended before the text was whole")
        return [left if "#leave" in text else Extraction() for text in texts]


class Metric:
    """Any family of metrics, and any series of it."""

    def __getattr__(self, name: str) -> Any:
        return Metric()

    def __call__(self, *_: Any, **__: Any) -> Metric:
        return self


@pytest.fixture
def executor() -> Executor:
    """Without its threads: a test runs the batches."""
    book: Any = SimpleNamespace(
        board=list, complete=lambda job, items, errors: None, land=lambda pieces: None, over=[]
    )
    arena: Any = SimpleNamespace(record_flight=lambda flight: None)
    metrics: Any = Metric()
    return Executor(WorkQueue(Settings()), book, arena, Settings(), oom.ModelBudgets(1 << 20), metrics)


def batch_of(*texts: str, extract: bool = False) -> Batch:
    """A batch of one job with these texts."""
    items, adapter = [InputItem(text) for text in texts], InParts()
    call: Call = ExtractCall(items) if extract else EncodeCall(items, ["dense"])
    job = Job(b"a", 1, 1, "m", call, 1 << 62, "req", False, 1)
    job.prepared = [item for item in adapter.prepare(items, call) if isinstance(item, Prepared)]
    job.adapter, job.group, job.open_items = adapter, "m", len(items)
    adapter.jobs.append(job)
    pieces = [Piece(job, at, item) for at, item in enumerate(job.prepared)]
    return Batch(pieces, None, sum(item.cost for item in job.prepared), 0.0)


def run(executor: Executor, batch: Batch) -> tuple[float, float]:
    """The paces of the model and of the device after this batch."""
    with torch.inference_mode():
        executor._run_batch(batch)
    return executor._pace("m"), executor._queue.rate.tokens_per_s


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


def test_a_batch_between_two_parts_counts_for_itself(executor: Executor) -> None:
    long, short = batch_of(TEXT * 100), batch_of(TEXT)
    between = iter([short])
    executor._former = SimpleNamespace(beside=lambda adapter, most_s: next(between, None))  # type: ignore[assignment]
    run(executor, long)
    assert [record.tokens for record in executor.batches.records()] == [short.tokens, long.tokens]


def test_a_batch_may_take_until_its_last_deadline_but_no_longer_than_any_step(executor: Executor) -> None:
    run(executor, batch_of(TEXT))
    run(executor, batch_of(TEXT))
    assert executor.activity.limit_s == Settings().worker.hang_timeout_s == 60.0, (
        "the pace is known and short"
    )
    soon = batch_of(TEXT)
    soon.pieces[0].job.deadline_ns = time.monotonic_ns() + 30_000_000_000
    run(executor, soon)
    assert LEAST_STEP_S < executor.activity.limit_s <= 30.0
