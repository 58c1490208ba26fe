"""The pipeline of a worker without its threads of the device: jobs go as far as `placed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ipc.memory.arena import BLOCKS_OFFSET, Arena
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.pipeline import Pipeline
from workers.scheduling.job import Job


class Placed(Pipeline):
    """`placed` are the ids of the jobs that were sent on to be prepared, in order; it keeps no job alive."""

    placed: list[int]


@contextmanager
def placing(tmp_path: Path, settings: Settings, arena_nbytes: int, **endpoint: Any) -> Iterator[Placed]:
    """A pipeline with an arena for so many bytes of blocks; `endpoint` replaces its calls, or `models`."""
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + arena_nbytes, "e" * 16)
    calls: dict[str, Any] = {
        "post": lambda work, wake=True: None,
        "fail": lambda *of: None,
        "unread": lambda *of: None,
        "wake": lambda: None,
        **endpoint,
    }
    models: Any = calls.pop("models", None) or SimpleNamespace(batch_tokens=lambda model, tokens: tokens)
    found: Any = SimpleNamespace(**calls)
    metrics = WorkerMetrics("worker-0")
    pipeline = Placed(settings, arena, 1 << 14, torch.device("cpu"), metrics, lambda: found, lambda: models)
    pipeline.preparer.close()
    found.leases, pipeline.placed = pipeline.leases, []

    def place(job: Job) -> None:
        pipeline.placed.append(job.id)

    preparer: Any = SimpleNamespace(put=place, prepare_now=place, close=lambda: None)
    pipeline.preparer = pipeline.intake.preparer = preparer
    try:
        yield pipeline
        pipeline.leases.verify()
    finally:
        arena.close()


def ask(pipeline: Pipeline, job: Job) -> Job:
    """Take a job in."""
    pipeline.intake.take_in(job)
    return job
