"""The kinds of jobs: which one a model has, and what becomes of a batch that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import PenstockError
from ipc.settings import Settings, load
from ipc.wire.messages import EncodeCall, InputItem
from tests.fakes.adapter import FakeAdapter
from tests.fakes.clock import Clock
from tests.fakes.jobs import adapter, make_job
from tests.fakes.pipeline import Placed, placing
from workers.adapters.base import Prepared
from workers.device import stepping
from workers.device.stepping import UNKNOWN_S
from workers.scheduling.job import Batch, Job, Piece
from workers.scheduling.queue import Reason, WaitingLine
from workers.strategies import one_shot
from workers.strategies.one_shot import Eviction

STATEFUL = ModelConfig("m", sequence_batching=SequenceBatching())


def test_the_model_decides_on_the_kind_of_its_jobs(tmp_path: Path) -> None:
    with placing(tmp_path, Settings(), 1 << 20) as pipeline:
        kinds = pipeline.kinds
        assert kinds.of(adapter(streams=True)) is kinds.streams
        assert kinds.of(adapter(streams=False, config=STATEFUL)) is kinds.sequences
        assert kinds.of(adapter(streams=False, config=ModelConfig("m"))) is kinds.one_shot
        assert kinds.of(adapter(streams=False)) is kinds.one_shot
        assert kinds.of(adapter(streams=False, engine=object())) is kinds.generations
        assert kinds.of(adapter(engine=object()), on_device=False) is kinds.one_shot


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(2.0, 5 * UNKNOWN_S), (600.0, 600.0)])
def test_the_first_step_of_a_stream_and_of_a_text_may_take_long_whatever_a_hang_is(
    tmp_path: Path, hang_timeout_s: float, limit_s: float
) -> None:
    settings = load(None, {"worker.hang_timeout_s": str(hang_timeout_s)}, {})
    with placing(tmp_path, settings, 1 << 20) as pipeline:
        kinds = pipeline.kinds
        assert [kinds.streams._step_limit_s, kinds.generations._step_limit_s] == [limit_s] * 2


def test_a_stop_waits_for_what_models_have_begun(tmp_path: Path) -> None:
    closed: list[str] = []

    class Slow:
        def go_on(self) -> None:
            # The stop that does not wait looks long before this ends, and the stop that waits is as long as this.
            threading.Event().wait(0.05)
            closed.append("finally")

    with placing(tmp_path, Settings(), 1 << 20) as pipeline:
        pipeline.queue.ask(Slow())
        pipeline.queue.close()
        pipeline.executor.start()
        pipeline.close()
        assert closed == ["finally"]


class Failing(FakeAdapter):
    """Fails every batch with a bad text in it; `runs` are the texts of all batches."""

    def __init__(self) -> None:
        super().__init__({}, 512)
        self.runs: list[list[str]] = []

    def collate(self, prepared: Any) -> Any:
        return [item.payload for item in prepared]

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        self.runs.append(list(batch))
        if "bad" in batch:
            raise RuntimeError("bad")
        return {"dense": torch.zeros(len(batch), 4)}


def batch_of(pipeline: Placed, strategy: Any, model: Failing, *texts: str) -> tuple[Batch, list[Job]]:
    """A batch of one job for each text."""
    jobs = []
    for number, text in enumerate(texts):
        call = EncodeCall([InputItem(text)], ["dense"])
        job = make_job(call, number=number, of=model, strategy=strategy, tensors=True)
        job.prepared = [Prepared(text, 16)]
        pipeline.queue.admit(job)
        pipeline.jobs.enter(job)
        jobs.append(job)
    pieces = pipeline.jobs.claim_pieces([Piece(job, 0, job.prepared[0]) for job in jobs])
    return Batch(pieces, None, 16 * len(texts), 0.0), jobs


@pytest.mark.parametrize(
    ("kind", "states", "runs"),
    [
        ("one_shot", ["done", "failed", "done"], [["a", "bad", "b"], ["a"], ["bad", "b"], ["bad"], ["b"]]),
        ("sequences", ["failed", "failed", "failed"], [["a", "bad", "b"]]),
    ],
)
def test_a_failed_batch_runs_again_in_halves_unless_its_model_keeps_state(
    kind: str, states: list[str], runs: list[list[str]], tmp_path: Path
) -> None:
    told: list[tuple[int, PenstockError]] = []
    calls = {
        "post": lambda work, wake=True: work(),
        "fail": lambda key, number, error: told.append((number, error)),
    }
    with placing(tmp_path, Settings(), 1 << 20, **calls) as pipeline:
        strategy, model = getattr(pipeline.kinds, kind), Failing()
        batch, jobs = batch_of(pipeline, strategy, model, "a", "bad", "b")
        ran = strategy.run(batch)
        pipeline.jobs.unclaim_pieces(batch.pieces)
        assert [job.state for job in jobs] == states and model.runs == runs
        assert ran == 16 * states.count("done") and pipeline.queue.admitted == 0
        assert [number for number, _ in told] == [at for at, state in enumerate(states) if state == "failed"]
        assert {error.code for _, error in told} == {"INFERENCE_ERROR"}


class Crowded(Failing):
    """Has no memory for more than `most` texts at a time."""

    most = 0

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("no memory")
        return super().encode(batch, outputs)


@pytest.mark.parametrize(("texts", "most", "shrinks"), [(["a"], 0, False), (["a", "b"], 1, True)])
def test_an_item_that_never_fits_leaves_the_budget_of_batches_as_it_was(
    texts: list[str], most: int, shrinks: bool, tmp_path: Path
) -> None:
    with placing(tmp_path, Settings(), 1 << 20, post=lambda work, wake=True: work()) as pipeline:
        strategy, model = pipeline.kinds.one_shot, Crowded()
        strategy.eviction = Eviction(lambda model, wait_s: False)
        model.most = most
        batch, jobs = batch_of(pipeline, strategy, model, *texts)
        before = pipeline.context.budgets.tokens_of(jobs[0].model)
        strategy.run(batch)
        pipeline.jobs.unclaim_pieces(batch.pieces)
        assert [job.state for job in jobs] == ["done" if most else "failed"] * len(texts)
        assert (pipeline.context.budgets.tokens_of(jobs[0].model) < before) is shrinks


class Timed(Failing):
    """Takes a second to collate and two seconds to compute, by a clock that the test turns."""

    clock: Clock

    def collate(self, prepared: Any) -> Any:
        self.clock.now += 1
        return super().collate(prepared)

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        self.clock.now += 2
        return super().encode(batch, outputs)


def test_the_times_that_are_told_of_a_batch_are_those_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, write = Clock.of(one_shot, monkeypatch), one_shot.write_results
    runs: list[tuple[object, ...]] = []

    def copy(pieces: Any, results: Any) -> None:
        write(pieces, results)
        clock.now += 4

    monkeypatch.setattr(one_shot, "write_results", copy)
    with placing(tmp_path, Settings(), 1 << 20, post=lambda work, wake=True: work()) as pipeline:
        model = Timed()
        model.clock = clock
        batch, jobs = batch_of(pipeline, pipeline.kinds.one_shot, model, "a", "b")
        monkeypatch.setattr(pipeline.context.counts, "note_run", lambda *run: runs.append(run))
        pipeline.kinds.one_shot.run(batch)
        pipeline.jobs.unclaim_pieces(batch.pieces)
        assert runs == [(jobs[0].model, 2, 1_000_000_000, 2_000_000_000, 4_000_000_000)]
        assert [(job.device_ns, job.copy_ns) for job in jobs] == [(3_000_000_000, 4_000_000_000)] * 2


class Deserted(Failing):
    """Runs a batch text by text; everybody leaves while the first runs, by `leave`."""

    leave: Callable[[], None]

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        self.runs.append(list(batch))
        for _ in stepping.each(batch, [16] * len(batch)):
            self.leave()
        raise AssertionError("a batch that nobody waits for came to its end")


def test_a_batch_that_ends_since_nobody_waits_for_it_does_not_run_again_in_halves(tmp_path: Path) -> None:
    told: list[str] = []
    calls = {
        "post": lambda work, wake=True: work(),
        "fail": lambda key, number, error: told.append(error.code),
    }
    with placing(tmp_path, Settings(), 1 << 20, **calls) as pipeline:
        strategy, model = pipeline.kinds.one_shot, Deserted()
        batch, jobs = batch_of(pipeline, strategy, model, "a", "b", "c")

        def leave() -> None:
            for job in jobs[:2]:
                pipeline.jobs.cancel(job)
            jobs[2].work = msgspec.structs.replace(jobs[2].work, deadline_ns=0)

        model.leave = leave
        assert strategy.run(batch) == 0
        pipeline.jobs.unclaim_pieces(batch.pieces)
        assert model.runs == [["a", "b", "c"]]
        assert [job.state for job in jobs] == ["cancelled", "cancelled", "failed"]
        assert told == ["DEADLINE_EXCEEDED"] and pipeline.queue.admitted == 0


def test_the_line_keeps_the_order_of_each_reason_and_drops_what_has_ended() -> None:
    line, jobs = WaitingLine(), [make_job(number=number) for number in range(5)]
    for job, reason in zip(
        jobs, (Reason.ROOM, Reason.COPY, Reason.ROOM, Reason.SLOT, Reason.ROOM), strict=True
    ):
        line.add(job, reason)
    jobs[2].state = "cancelled"
    assert line.has(Reason.COPY) and not line.has(Reason.PART) and line.holds(jobs[3])
    assert line.jobs(Reason.ROOM, Reason.COPY) == [jobs[0], jobs[4], jobs[1]]
    assert line.take(Reason.ROOM) == [jobs[0], jobs[4]] and len(line) == 2
    line.add(jobs[0], Reason.COPY)
    assert (
        line.take(Reason.COPY) == [jobs[1], jobs[0]] and line.take(Reason.SLOT) == [jobs[3]] and not len(line)
    )


def test_who_asks_for_one_reason_looks_at_no_job_of_another() -> None:
    class Unseen:
        @property
        def state(self) -> str:
            raise AssertionError("this job waits for something else")

    line, jobs = WaitingLine(), [make_job(number=number) for number in range(2)]
    for _ in range(3):
        line.add(Unseen(), Reason.ROOM)  # type: ignore[arg-type]
    line.add(jobs[0], Reason.PAUSE, 100)
    line.add(jobs[1], Reason.COPY)
    assert line.next_ns() == 100 and line.has(Reason.COPY) and not line.has(Reason.PART)
    assert line.take_paused(100) == [jobs[0]] and line.take(Reason.COPY) == [jobs[1]] and len(line) == 3


def test_pauses_end_in_their_time() -> None:
    line, first, second = WaitingLine(), make_job(number=1), make_job(number=2)
    assert line.next_ns() is None
    line.add(first, Reason.PAUSE, 200)
    line.add(second, Reason.PAUSE, 100)
    line.add(make_job(number=3), Reason.ROOM)
    assert line.next_ns() == 100
    assert line.take_paused(99) == [] and line.take_paused(100) == [second] and line.next_ns() == 200
    first.state = "failed"
    assert line.next_ns() is None and line.take_paused(300) == []
