"""What the parts of one worker share. Made once, before all parts that read it."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.memory.arena import Arena
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.device.stepping import Activity
from workers.endpoint.endpoint import Endpoint
from workers.scheduling.bound import ModelBudgets
from workers.scheduling.job import BatchCounts
from workers.scheduling.job_table import JobTable
from workers.scheduling.queue import WaitingLine, WorkQueue


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Settings, metrics, memory and the places where jobs stand.

    queue     jobs that wait for the device; `line` has those that wait for anything else
    jobs      all open jobs
    budgets   tokens of a batch, by model
    activity  what the device thread does now
    """

    settings: Settings
    metrics: WorkerMetrics
    arena: Arena
    endpoint: Endpoint
    budgets: ModelBudgets
    activity: Activity
    counts: BatchCounts
    queue: WorkQueue
    jobs: JobTable
    line: WaitingLine

    @classmethod
    def make(
        cls, settings: Settings, metrics: WorkerMetrics, arena: Arena, endpoint: Endpoint, batch_tokens: int
    ) -> Context:
        """`batch_tokens` is what a batch of any model may hold."""
        budgets = ModelBudgets(batch_tokens)
        queue = WorkQueue(settings, batch_tokens, budgets.tokens_of)
        return cls(
            settings,
            metrics,
            arena,
            endpoint,
            budgets,
            Activity(settings.worker.hang_timeout_s),
            BatchCounts(metrics),
            queue,
            JobTable(queue, endpoint),
            WaitingLine(),
        )
