"""The statistics of runs and those of requests tell of the same work, whatever becomes of batches.

Triton defines them: `inference_count` are rows computed for answered requests, `execution_count` runs that succeeded,
`batch_stats` those runs by their rows; a run has the times of its requests, counted once.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from frontend.records.statistics import Times
from ipc.settings import Settings
from ipc.wire.messages import EncodeCall, InputItem, Timing
from tests.fakes.adapter import FakeAdapter
from tests.fakes.clock import Clock
from tests.fakes.jobs import make_job
from tests.fakes.pipeline import Placed, placing
from workers.adapters.base import Prepared
from workers.scheduling.job import Batch, Job, Piece
from workers.strategies import one_shot

Run = tuple[str, int, int, int, int]


class Troubled(FakeAdapter):
    """Fails every batch that holds `bad`, gives no finite value for `nan`; each phase takes a time of its own."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        super().__init__({}, 512)
        self._clock, self._chance = clock, chance

    def _pass(self) -> None:
        self._clock.now += self._chance.randint(1, 1000) * 1e-6

    def collate(self, prepared: Any) -> Any:
        self._pass()
        return [item.payload for item in prepared]

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        self._pass()
        if "bad" in batch:
            raise RuntimeError("bad")
        rows = torch.zeros(len(batch), 4)
        rows[[text == "nan" for text in batch]] = torch.nan
        return {"dense": rows}


def job_of(pipeline: Placed, model: Troubled, number: int, texts: list[str], tensors: bool) -> Job:
    """A prepared job with an item for each text."""
    call = EncodeCall([InputItem(text) for text in texts], ["dense"])
    strategy = pipeline.kinds.one_shot
    job = make_job(call, number=number, of=model, strategy=strategy, tensors=tensors)
    job.prepared = [Prepared(text, 16) for text in texts]
    pipeline.queue.admit(job)
    pipeline.jobs.enter(job)
    return job


def times_of(job: Job) -> Times:
    """The phases of an answered request."""
    timing = Timing(job.prepare_ns, 0, job.device_ns, job.copy_ns, job.batches, job.collate_ns)
    return Times.of(timing, 0)


def batches_of(pieces: list[Piece], chance: random.Random) -> list[list[Piece]]:
    """The pieces in their order, cut into batches anywhere."""
    cuts = sorted(chance.sample(range(1, len(pieces)), chance.randint(0, len(pieces) - 1)))
    return [pieces[a:b] for a, b in itertools.pairwise([0, *cuts, len(pieces)])]


def play(
    pipeline: Placed, monkeypatch: pytest.MonkeyPatch, seed: int, alone: bool
) -> tuple[list[Job], list[Run]]:
    """Run random requests in random batches: the jobs, and the runs that were counted.

    `alone`: every batch has items of one request only, and all succeed.
    """
    chance, runs = random.Random(seed), list[Run]()
    clock = Clock.of(one_shot, monkeypatch)
    strategy, model = pipeline.kinds.one_shot, Troubled(clock, chance)
    monkeypatch.setattr(pipeline.context.counts, "note_run", lambda *run: runs.append(run))
    kinds = ["good"] if alone or seed % 2 else ["good"] * 6 + ["nan", "bad"]
    jobs = [
        job_of(pipeline, model, number, chance.choices(kinds, k=chance.randint(1, 4)), chance.random() < 0.7)
        for number in range(1, 8)
    ]
    pieces = [Piece(job, at, job.prepared[at]) for job in jobs for at in range(len(job.prepared))]
    if alone:
        groups = [[piece for piece in pieces if piece.job is job] for job in jobs]
    else:
        chance.shuffle(pieces)
        groups = [pieces]
    for batch in [batch for group in groups for batch in batches_of(group, chance)]:
        for job in {piece.job.id: piece.job for piece in batch}.values():
            # NOTE: items are prepared in chunks, some of them while others run already.
            job.prepare_ns += chance.randint(1, 1000)
        claimed = pipeline.jobs.claim_pieces(batch)
        if claimed:
            strategy.run(Batch(claimed, None, 16 * len(claimed), 0.0))
            pipeline.jobs.unclaim_pieces(claimed)
    return jobs, runs


@pytest.mark.parametrize("seed", range(25))
def test_rows_and_times_of_runs_are_those_of_their_requests(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with placing(tmp_path, Settings(), 1 << 20, post=lambda work, wake=True: work()) as pipeline:
        jobs, runs = play(pipeline, monkeypatch, seed, alone=False)
    counted = [job for job in jobs if job.work.tensors]
    succeeded = sum(len(job.prepared) - len(job.errors) for job in counted)
    rows = [run[1] for run in runs]
    assert sum(rows) == succeeded and all(rows), "a run without a row that succeeded is no execution"
    answered = [times_of(job) for job in counted if not job.errors]
    if len(answered) == len(counted):
        for phase, name in ((2, "input_ns"), (3, "infer_ns"), (4, "output_ns")):
            assert sum(run[phase] for run in runs) <= sum(getattr(times, name) for times in answered)


@pytest.mark.parametrize("seed", range(10))
def test_a_run_of_one_request_has_the_times_of_the_request(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with placing(tmp_path, Settings(), 1 << 20, post=lambda work, wake=True: work()) as pipeline:
        jobs, runs = play(pipeline, monkeypatch, seed, alone=True)
    answered = [times_of(job) for job in jobs if job.work.tensors]
    assert sum(run[1] for run in runs) == sum(len(job.prepared) for job in jobs if job.work.tensors)
    for phase, name in ((2, "input_ns"), (3, "infer_ns"), (4, "output_ns")):
        assert sum(run[phase] for run in runs) == sum(getattr(times, name) for times in answered)
