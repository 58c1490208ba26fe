"""The way of a request through a worker, put together: intake, preparing, queue, device, and what waits beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ipc.memory.arena import Arena, LeaseTable
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.device.oom import ModelBudgets
from workers.endpoint.endpoint import Endpoint
from workers.inputs import ClientMemory
from workers.lifecycle.models import ModelTable
from workers.scheduling.executor import Executor
from workers.scheduling.intake import Intake, WaitingLine
from workers.scheduling.preparing import Preparer
from workers.scheduling.queue import WorkQueue
from workers.scheduling.table import JobTable
from workers.strategies.kinds import Kinds


class Pipeline:
    """Everything that a request passes between the endpoint and the device."""

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        batch_tokens: int,
        device: torch.device,
        metrics: WorkerMetrics,
        endpoint: Callable[[], Endpoint],
        models: Callable[[], ModelTable],
    ) -> None:
        """`batch_tokens` is what a batch of any model may hold; `endpoint` and `models` are asked when they exist."""
        self._metrics = metrics
        self.leases = LeaseTable(arena)
        budgets = ModelBudgets(batch_tokens, lambda *of: models().batch_tokens(*of))
        self.queue, self._line = WorkQueue(settings, batch_tokens, budgets.tokens_of), WaitingLine()
        self.jobs = JobTable(self.queue, endpoint)
        self.executor = Executor(
            self.queue, self.jobs, arena, settings, budgets, metrics, lambda model: models().touch(model)
        )
        self.kinds = Kinds(
            settings,
            self.queue,
            self.jobs,
            self._line,
            arena.record_flight,
            self.executor.activity,
            budgets,
            self.executor.counts,
            metrics,
            lambda model, wait_s: models().unload_idle(model, wait_s),
            self.executor.make_way,
            self.executor.free_memory,
        )
        self.executor.strategies = self.kinds.patient
        self.memory = ClientMemory(settings, device, on_room=lambda: endpoint().post(self.released))
        self.intake = Intake(
            settings,
            self.queue,
            self.jobs,
            self._line,
            self.leases,
            models,
            self.memory,
            self.kinds.of,
            lambda: self.executor.idle,
            lambda work: endpoint().post(work),
        )
        self.preparer = self.intake.preparer = Preparer(
            self.queue,
            self.jobs,
            arena,
            settings.worker.prepare_threads,
            settings.limits.max_chunked_tokens,
            self.intake.find_room,
        )

    @property
    def idle(self) -> bool:
        """Whether no job is open and the device has nothing to do."""
        return not len(self.jobs) and self.executor.idle

    def close(self) -> None:
        """Take nothing more, and close what models have begun."""
        self.kinds.streams.cancel_all()
        self.queue.close()
        self.preparer.close()
        self.executor.join()

    def cancel(self, session: bytes, request: int) -> None:
        """The caller of a request has gone. Idempotent."""
        job = self.jobs.find(session, request)
        if job is None:
            return
        stage = "running" if job.first_run_ns else "queued"
        waiting = self.jobs.cancel(job)
        unspent = job.cost if stage == "queued" else job.cost * waiting // len(job.prepared)
        self._metrics.cancelled.labels(job.model, stage).inc()
        self._metrics.saved.labels(job.model, stage).inc(unspent * self.queue.paces.per_token_s(job.model))

    def taken(self, session: bytes, request: int, count: int) -> None:
        """A frontend has taken so many parts of a stream, or bytes of generated text."""
        job = self.jobs.find(session, request)
        if job is not None:
            job.strategy.taken(job, count)

    def released(self) -> None:
        """A lease ended: there may be room for waiting jobs, and for parts of streams."""
        if len(self._line):
            self.intake.fail_late()
            self.intake.retry()
            self.kinds.streams.wake_roomless()

    def tick(self) -> None:
        """Ten times a second: deadlines, and what waits."""
        # NOTE: a waiting job that is late is told what it lacked, and not only that it was late.
        self.intake.fail_late()
        self.jobs.expire()
        for model, count in self.kinds.sequences.expire():
            self._metrics.sequences_expired.labels(model, self._metrics.worker).inc(count)
        self.released()
        self.memory.tick()
