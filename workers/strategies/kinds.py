"""The kinds of jobs of one worker, and which of them a model has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.adapters.base import Adapter
from workers.device.oom import ModelBudgets
from workers.device.stepping import Activity, batch_limit_s
from workers.scheduling.batch_counts import BatchCounts
from workers.scheduling.intake import WaitingLine
from workers.scheduling.queue import WorkQueue
from workers.scheduling.strategy import Strategy
from workers.scheduling.table import JobTable
from workers.strategies.generation import Generations
from workers.strategies.named_outputs import Placer
from workers.strategies.one_shot import OneShot
from workers.strategies.sequence import Sequences
from workers.strategies.stream import Streams


class Kinds:
    """One strategy for each kind of job."""

    def __init__(
        self,
        settings: Settings,
        queue: WorkQueue,
        table: JobTable,
        line: WaitingLine,
        record_flight: Callable[[list[tuple[int, int]]], None],
        activity: Activity,
        budgets: ModelBudgets,
        counts: BatchCounts,
        metrics: WorkerMetrics,
        unload_idle: Callable[[str, float], bool],
        make_way: Callable[[Any], None],
        free_memory: Callable[[Any], bool],
    ) -> None:
        """`record_flight` is that of the arena, `unload_idle` that of `oom.Eviction`, `make_way` that of `OneShot`."""
        placer, hang_timeout_s = Placer(table, settings.arena.inline_bytes), settings.worker.hang_timeout_s
        shared = (table, queue, budgets, activity, placer, counts, metrics, hang_timeout_s)
        self.one_shot = OneShot(*shared, unload_idle, make_way, free_memory)
        self.sequences = Sequences(
            settings.queue.max_waiting_sequences, *shared, unload_idle=unload_idle, make_way=make_way
        )
        self.streams = Streams(
            table,
            queue,
            line,
            activity,
            placer,
            counts,
            # NOTE: steps of one model take milliseconds or seconds; nothing that is known of it tells which comes next.
            batch_limit_s(hang_timeout_s, 0.0),
            settings.queue.max_resting_streams,
            record_flight,
        )
        # NOTE: the first step of a model takes long on some devices, and nothing is known of its pace before.
        self.generations = Generations(
            table,
            queue,
            activity,
            batch_limit_s(hang_timeout_s, 0.0),
            settings.generation.max_waiting,
            record_flight,
        )
        self.patient: tuple[Strategy, ...] = (self.streams, self.generations)
        """The kinds whose jobs may wait for something else than the device."""

    def of(self, adapter: Adapter, *, on_device: bool = True) -> Strategy:
        """The strategy of all jobs of a model, but of those that end before the device."""
        if not on_device:
            return self.one_shot
        if adapter.engine is not None:
            return self.generations
        if adapter.streams:
            return self.streams
        if adapter.config is not None and adapter.config.sequence_batching is not None:
            return self.sequences
        return self.one_shot
