"""What a worker tells of itself: metrics for everybody, and `Stats` for those who watch.

1. Twice a second, and at every change of a model's state, `Reporter` turns the worker's state into metrics.
2. While a frontend watches, `Statistics` sends a message five times a second; the device is asked twice a second.

`GenerationCounts` writes the metrics of models that generate, from the numbers of their engines:

1. Gauges take the present numbers, by model, and summed over all models under the names of mistral.rs.
2. Counters grow by the difference to the last report. An engine that was loaded anew counts from zero again.
3. A model that is no longer loaded falls to zero.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ipc.memory import copies
from ipc.metrics.families import GENERATION_STATES, SEQUENCE_STATES, STATES
from ipc.metrics.registry import WorkerMetrics
from ipc.wire.messages import LANES, ModelStatus
from ipc.wire.stats import GenerationStats, QueueState, Stats, models_ready
from workers.device.devices import Device, Monitor
from workers.lifecycle.models import ModelTable
from workers.scheduling.context import Context
from workers.scheduling.executor import Executor
from workers.strategies.sequence import Sequences

_COUNTERS = {
    "prefix_lookups": "rs_lookups",
    "prefix_hits": "rs_hits",
    "prefix_evictions": "rs_evictions",
    "preemptions": "rs_preemptions",
}
"""Rising numbers, which are also the names of families by model, and the families of the same sum over all models."""
_SEEN = ("pictures", "feature_lookups", "feature_hits", "feature_evictions")
"""Rising numbers of models that see, which are also the names of families by model."""
_SUMS = {
    "running": "rs_running",
    "waiting": "rs_waiting",
    "capacity": "rs_capacity",
    "blocks_used": "rs_blocks_used",
    "blocks_total": "rs_blocks",
}
_DIRECTIONS = {"prompt_tokens": "in", "output_tokens": "out"}
EVERY_S = 0.5
DEVICE_EVERY_S = 5.0
SEND_EVERY_S = 0.19
"""Two ticks of the endpoint, whose distance is a little over a tenth of a second."""
ASK_DEVICE_EVERY_S = 0.5
SHARE_LOOKS = 10
"""Shares are over this many looks, some two seconds, so that long batches do not make them jump."""


class Reporter:
    """Samples queue, arena, models and device into gauges."""

    def __init__(
        self, context: Context, executor: Executor, sequences: Sequences, models: ModelTable, device: Device
    ) -> None:
        self._context, self._metrics = context, context.metrics
        self._batches, self._sequences = executor.batches, sequences
        self._models, self._device = models, device
        self.monitor = Monitor(device)
        self._next = self._next_device = 0.0
        self._reclaimed, self._busy_s = 0, 0.0
        self._copied = copies.Reported()
        self._shown: set[str] = set()
        """Models whose gauges tell of work."""
        self._sequenced: set[str] = set()
        self._generations = GenerationCounts(context.metrics)

    def tick(self, revoked: int) -> None:
        """Sample what is due; `revoked` leases were taken back since the last call."""
        if revoked:
            self._metrics.revoked.labels(self._metrics.worker, "age").inc(revoked)
        leases = self._context.endpoint.leases
        reclaimed = leases.reclaimed - self._reclaimed
        if reclaimed:
            self._reclaimed += reclaimed
            self._metrics.revoked.labels(self._metrics.worker, "session").inc(reclaimed)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_S
        self._report_queue()
        self._report_sequences()
        self._generations.report(generations(self._models))
        self._copied.report(self._metrics.copied, self._metrics.worker)
        busy_s = self._batches.busy_s
        self._metrics.busy.labels(self._metrics.worker).inc(busy_s - self._busy_s)
        self._busy_s = busy_s
        worker = self._metrics.worker
        self._metrics.shm_used.labels(worker).set(leases.used_nbytes)
        self._metrics.shm_total.labels(worker).set(leases.capacity_nbytes)
        self._metrics.shm_leases.labels(worker).set(leases.leases)
        if now >= self._next_device:
            self._next_device = now + DEVICE_EVERY_S
            self._look()

    def _look(self) -> None:
        """What the device says of itself."""
        metrics, monitor = self._metrics, self.monitor
        key = metrics.worker, self._device.uuid
        used, total = monitor.memory()
        drawn, limit = monitor.power_w()
        metrics.gpu_memory.labels(*key).set(used)
        metrics.gpu_memory_total.labels(*key).set(total)
        metrics.gpu_utilization.labels(*key).set(monitor.utilization() or 0.0)
        metrics.gpu_temperature.labels(*key).set(monitor.temperature_c() or 0.0)
        metrics.gpu_power.labels(*key).set(drawn)
        metrics.gpu_power_limit.labels(*key).set(limit)
        metrics.gpu_energy.labels(*key).set(monitor.energy_j())

    def _report_queue(self) -> None:
        """Queues and batches of the models that have any, or had some at the last look: a catalog may be long."""
        totals: dict[tuple[str, str], tuple[int, int, float]] = {}
        for model, lane, items, tokens, age in self._context.queue.snapshot():
            known = totals.get((model, lane), (0, 0, 0.0))
            totals[model, lane] = (known[0] + items, known[1] + tokens, max(known[2], age))
        active = {model for model, _ in totals} | self._batches.models()
        shown, self._shown = self._shown | active, active
        for model in shown:
            pending = 0
            for lane in LANES:
                items, tokens, age = totals.get((model, lane), (0, 0, 0.0))
                pending += items
                self._metrics.queue_depth.labels(model, lane).set(items)
                self._metrics.queue_tokens.labels(model, lane).set(tokens)
                self._metrics.queue_oldest.labels(model, lane).set(age)
            self._metrics.sie_queue_depth.labels(model).set(pending)
            self._metrics.sie_request_queue.labels(model).set(pending)
            self._report_batches(model)

    def _report_sequences(self) -> None:
        totals = dict.fromkeys(self._sequenced, (0, 0))
        for model, active, waiting in self._sequences.numbers():
            known = totals.get(model, (0, 0))
            totals[model] = (known[0] + active, known[1] + waiting)
        self._sequenced = set(totals)
        for model, counts in totals.items():
            for state, count in zip(SEQUENCE_STATES, counts, strict=True):
                self._metrics.sequences.labels(model, self._metrics.worker, state).set(count)

    def _report_batches(self, model: str) -> None:
        """Budget, pace and fill of a model's batches; `sie_adaptive_batch_wait_ms` stays 0, nothing waits here."""
        self._budget(model)
        metrics, (p50_ms, fill) = self._metrics, self._batches.pace_of(model)
        metrics.sie_adaptive_p50.labels(model).set(p50_ms)
        metrics.sie_adaptive_fill.labels(model).set(fill)

    def _budget(self, model: str) -> None:
        budget = self._context.budgets.tokens_of(model)
        self._metrics.budget.labels(model, self._metrics.worker).set(budget)
        self._metrics.sie_adaptive_cost.labels(model).set(budget)

    def models(self, changed: Iterable[ModelStatus], gone: Iterable[str]) -> None:
        """States, load times and memory of these models; those that the catalog lost count as available."""
        lost = [ModelStatus(name, "available") for name in gone]
        self._metrics.model_budget.labels(self._metrics.worker).set(self._models.budget_bytes)
        for status in (*changed, *lost):
            for state in STATES:
                self._metrics.state.labels(status.name, self._metrics.worker, state).set(
                    status.state == state
                )
            self._metrics.load_progress.labels(status.name, self._metrics.worker).set(status.progress)
            self._metrics.load_seconds.labels(status.name, self._metrics.worker).set(status.load_s)
            self._metrics.memory.labels(status.name, self._metrics.worker).set(status.memory_bytes)
            self._budget(status.name)
            self._metrics.sie_loaded.labels(status.name, self._device.uuid).set(status.state == "loaded")
            self._metrics.sie_memory.labels(status.name, self._device.uuid).set(status.memory_bytes)

    def models_ready(self) -> str:
        """How many of this worker's models are loaded, for a supervisor."""
        return models_ready(self._models.statuses())


class Statistics:
    """Builds `Stats` and sends them to the sessions that watch. Endpoint thread only."""

    def __init__(self, context: Context, executor: Executor, models: ModelTable, monitor: Monitor) -> None:
        self._context, self._models, self._monitor = context, models, monitor
        self._batches = executor.batches
        self._next = self._next_device = 0.0
        self._device: tuple[int, int, int, float | None, float | None] = (0, 0, 0, None, None)
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=SHARE_LOOKS)

    def tick(self) -> None:
        """Send what is due."""
        endpoint, now = self._context.endpoint, time.monotonic()
        if now < self._next:
            return
        if not any(session.watching for session in endpoint.sessions):
            self._marks.clear()
            return
        self._next = now + SEND_EVERY_S
        endpoint.show(self._stats(now))

    def now(self) -> Stats:
        """Present figures."""
        return self._stats(time.monotonic())

    def _stats(self, now: float) -> Stats:
        if now >= self._next_device:
            self._next_device = now + ASK_DEVICE_EVERY_S
            self._device = self._look()
        used, total, resident, utilization, temperature = self._device
        cpu, busy = self._shares(now)
        queue, leases = self._context.queue, self._context.endpoint.leases
        return Stats(
            memory_used=used,
            memory_total=total,
            resident=resident,
            cpu=cpu,
            busy=busy,
            utilization=utilization,
            temperature_c=temperature,
            budget=self._context.budgets.configured,
            admitted=queue.admitted,
            bound=queue.limit,
            arena_used=leases.used_nbytes,
            arena_total=leases.capacity_nbytes,
            leases=leases.leases,
            queues=self._queues(),
            batches=self._batches.records(),
            generations=generations(self._models),
        )

    def _look(self) -> tuple[int, int, int, float | None, float | None]:
        monitor = self._monitor
        used, total = monitor.memory()
        return used, total, monitor.resident_bytes(), monitor.utilization(), monitor.temperature_c()

    def _shares(self, now: float) -> tuple[float, float]:
        """(processor seconds per second, share of time in batches) over the last looks."""
        times = os.times()
        self._marks.append((now, times.user + times.system, self._batches.busy_s))
        began, cpu_s, busy_s = self._marks[0]
        elapsed_s = now - began
        if not elapsed_s:
            return 0.0, 0.0
        return (self._marks[-1][1] - cpu_s) / elapsed_s, min(1.0, (self._marks[-1][2] - busy_s) / elapsed_s)

    def _queues(self) -> list[QueueState]:
        by_model: dict[str, QueueState] = {}
        for model, _, items, tokens, age_s in self._context.queue.snapshot():
            known = by_model.get(model, QueueState(model, 0, 0, 0.0))
            by_model[model] = QueueState(
                model, known.items + items, known.tokens + tokens, max(known.oldest_s, age_s)
            )
        return [state for state in by_model.values() if state.items]


def generations(models: ModelTable) -> list[GenerationStats]:
    """The numbers of all engines at this moment."""
    return [engine.statistics(name) for name, engine in models.engines()]


class GenerationCounts:
    """Writes the metrics of all generating models of a worker. One thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[str, GenerationStats] = {}

    def report(self, present: Sequence[GenerationStats]) -> None:
        """The numbers of all models that are loaded now."""
        gone = self._last.keys() - {stats.model for stats in present}
        if not present and not gone:
            return
        for model in gone:
            self._gauges(GenerationStats(model, *(0,) * 11))
        for stats in present:
            self._gauges(stats)
            self._counters(stats, self._last.get(stats.model))
        for field, family in _SUMS.items():
            self._family(family).set(sum(getattr(stats, field) for stats in present))
        self._last = {stats.model: stats for stats in present}

    def _family(self, name: str) -> Any:
        return getattr(self._metrics, name)

    def _gauges(self, stats: GenerationStats) -> None:
        metrics, worker = self._metrics, self._metrics.worker
        for state in GENERATION_STATES:
            metrics.generations.labels(stats.model, worker, state).set(getattr(stats, state))
        metrics.cache_used.labels(stats.model, worker).set(stats.blocks_used)
        metrics.cache_blocks.labels(stats.model, worker).set(stats.blocks_total)
        metrics.feature_bytes.labels(stats.model, worker).set(stats.feature_bytes)

    def _counters(self, stats: GenerationStats, last: GenerationStats | None) -> None:
        for field, total in _COUNTERS.items():
            grown = _growth(field, stats, last)
            self._family(field).labels(stats.model, self._metrics.worker).inc(grown)
            self._family(total).inc(grown)
        for field in _SEEN:
            grown = _growth(field, stats, last)
            self._family(field).labels(stats.model, self._metrics.worker).inc(grown)
        for field, direction in _DIRECTIONS.items():
            grown = _growth(field, stats, last)
            self._metrics.tokens.labels(stats.model, direction).inc(grown)
            self._metrics.rs_tokens.inc(grown)


def _growth(field: str, stats: GenerationStats, last: GenerationStats | None) -> int:
    number: int = getattr(stats, field)
    before: int = getattr(last, field) if last else 0
    return number - before if number >= before else number
