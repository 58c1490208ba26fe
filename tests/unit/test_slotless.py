"""Room for large results of sequences: one that waits for a slot holds none that those before it need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching
from ipc.memory.arena import BLOCKS_OFFSET, Arena
from ipc.memory.leases import LeaseTable
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Step, TensorOutput
from tests.fakes.program import FakeProgram
from tests.fakes.tensors import tensor
from workers.adapters.base import Prepared
from workers.runtime import Runtime
from workers.scheduling.job import Job
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import WorkQueue

WIDTH = 65_536
_ids = count(1)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """Only the parts that place jobs, with an arena for two results; `preparer` is a list of jobs."""
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + 2 * (4 * WIDTH + 4096), "e" * 16)
    made = Runtime.__new__(Runtime)
    made._settings, made._arena, made.leases = Settings(), arena, LeaseTable(arena)
    made.queue = WorkQueue(made._settings)
    endpoint: Any = SimpleNamespace(leases=made.leases, post=lambda work: None)
    made.book = JobBook(made.queue, lambda: endpoint)
    placed: list[Job] = []
    made.preparer = SimpleNamespace(put=placed.append, prepare_now=placed.append, placed=placed)  # type: ignore[assignment]
    made.executor = SimpleNamespace(idle=False)  # type: ignore[assignment]
    made._parked, made._uncopied, made._slotless = [], [], []
    yield made
    made.leases.verify()
    arena.close()


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


def ask(runtime: Runtime, adapter: FakeProgram, name: int, **flags: bool) -> Job:
    """A request of a sequence, taken in as `Runtime.submit` does."""
    call = InferCall([], [TensorOutput("OUTPUT0")], step=Step(name, **flags))
    job = Job(b"s", 1, next(_ids), "m", call, 2**62, "req", False, 16)
    job.adapter, job.prepared, job.open_items = adapter, [Prepared(None, 16)], 1
    runtime.queue.admit(job.cost)
    runtime.queue.sequencer.enrol(job)
    runtime.book.open(job)
    runtime._place(job)
    return job


def test_sequences_in_the_backlog_leave_the_arena_to_those_with_a_slot(runtime: Runtime) -> None:
    adapter = program()
    placed: list[Job] = runtime.preparer.placed  # type: ignore[attr-defined]
    first = ask(runtime, adapter, 1, start=True)
    waiting = [ask(runtime, adapter, name, start=True, end=True) for name in (2, 3, 4)]
    last = ask(runtime, adapter, 1, end=True)
    assert placed == [first, last] and all(job.output is None for job in waiting)
    runtime.book.cancel(waiting[1])
    for job in (first, last):
        runtime.book.cancel(job)
    runtime.released()
    assert placed == [first, last, waiting[0]] and waiting[0].output is not None
    runtime.book.cancel(waiting[0])
    runtime.released()
    assert placed == [first, last, waiting[0], waiting[2]]
    runtime.book.cancel(waiting[2])
    assert runtime.leases.used_nbytes == 0 and not runtime._slotless and not runtime._parked
