"""Room for large results of sequences: one that waits for a slot holds none that those before it need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Step, TensorOutput
from tests.fakes.jobs import make_job
from tests.fakes.pipeline import Placed, ask, placing
from tests.fakes.program import FakeProgram
from tests.fakes.tensors import tensor
from workers.scheduling.job import Job

WIDTH = 65_536
_ids = count(1)


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Placed]:
    """With an arena for two results."""
    with placing(tmp_path, Settings(), 2 * (4 * WIDTH + 4096)) as found:
        yield found


def program() -> FakeProgram:
    """Sequences in one slot, with a result of 256 KiB each."""
    start = (Control("START", "START", "INT32", (0, 1)), Control("READY", "READY", "INT32", (0, 1)))
    config = ModelConfig(
        "m",
        max_batch_size=1,
        inputs=(tensor("INPUT0", "INT32", 1),),
        outputs=(tensor("OUTPUT0", "INT32", WIDTH),),
        sequence_batching=SequenceBatching(controls=start),
    )
    return FakeProgram(config, "totals")


def request(pipeline: Placed, adapter: FakeProgram, name: int, **flags: bool) -> Job:
    """A request of a sequence is taken in."""
    call = InferCall([], [TensorOutput("OUTPUT0")], step=Step(name, **flags))
    return ask(pipeline, make_job(call, number=next(_ids), of=adapter, strategy=pipeline.kinds.of(adapter)))


def numbers(jobs: list[Job]) -> list[int]:
    """Ids of jobs."""
    return [job.id for job in jobs]


def test_sequences_in_the_backlog_leave_the_arena_to_those_with_a_slot(pipeline: Placed) -> None:
    adapter = program()
    first = request(pipeline, adapter, 1, start=True)
    waiting = [request(pipeline, adapter, name, start=True, end=True) for name in (2, 3, 4)]
    last = request(pipeline, adapter, 1, end=True)
    assert pipeline.placed == numbers([first, last]) and all(job.output is None for job in waiting)
    pipeline.jobs.cancel(waiting[1])
    for job in (first, last):
        pipeline.jobs.cancel(job)
    pipeline.released()
    assert pipeline.placed == numbers([first, last, waiting[0]]) and waiting[0].output is not None
    pipeline.jobs.cancel(waiting[0])
    pipeline.released()
    assert pipeline.placed == numbers([first, last, waiting[0], waiting[2]])
    pipeline.jobs.cancel(waiting[2])
    assert pipeline.leases.used_nbytes == 0 and not len(pipeline.line)
