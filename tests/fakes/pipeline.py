"""The pipeline of a worker without its threads of the device: jobs go as far as `placed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ipc.memory.arena import BLOCKS_OFFSET, Arena, LeaseTable
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.runtime import Pipeline
from workers.scheduling.context import Context
from workers.scheduling.job import Job


class Placed(Pipeline):
    """`placed` are the ids of the jobs that were sent on to be prepared, in order; it keeps no job alive."""

    def __init__(self, context: Context, models: Any) -> None:
        super().__init__(context, models, CPU)
        self.queue, self.jobs, self.line = context.queue, context.jobs, context.line
        self.leases = context.endpoint.leases
        self.placed: list[int] = []


CPU: Any = SimpleNamespace(torch=SimpleNamespace(type="cpu"))
MODELS = {"touch": lambda model: None, "unload_idle": lambda model, wait_s: False}
"""What the table of models does for a pipeline."""


@contextmanager
def placing(tmp_path: Path, settings: Settings, arena_nbytes: int, **endpoint: Any) -> Iterator[Placed]:
    """A pipeline with an arena for so many bytes of blocks; `endpoint` replaces its calls, `models` those of models."""
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + arena_nbytes, "e" * 16)
    calls: dict[str, Any] = {
        "post": lambda work, wake=True: None,
        "fail": lambda *of: None,
        "unread": lambda *of: None,
        "wake": lambda: None,
        **endpoint,
    }
    models = SimpleNamespace(**(MODELS | calls.pop("models", {})))
    noting: Any = SimpleNamespace(leases=LeaseTable(arena), **calls)
    context = Context.make(settings, WorkerMetrics("worker-0"), arena, noting, 1 << 14)
    pipeline = Placed(context, models)
    pipeline.intake.preparer.close()

    def place(job: Job) -> None:
        pipeline.placed.append(job.id)

    preparer: Any = SimpleNamespace(put=place, prepare_now=place, close=lambda: None)
    pipeline.intake.preparer = preparer
    try:
        yield pipeline
        pipeline.leases.verify()
    finally:
        arena.close()


def ask(pipeline: Pipeline, job: Job) -> Job:
    """Take a job in."""
    pipeline.intake.take_in(job)
    return job
