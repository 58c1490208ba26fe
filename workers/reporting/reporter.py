"""Turns a worker's state into metrics: twice a second from the tick, and at every change of a model's state."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ipc.memory import copies
from ipc.metrics.registry import SEQUENCE_STATES, STATES, WorkerMetrics
from ipc.wire.messages import LANES, ModelStatus
from workers.device.devices import Device, Monitor

if TYPE_CHECKING:
    from workers.runtime import Runtime

EVERY_S = 0.5
DEVICE_EVERY_S = 5.0


class Reporter:
    """Samples queue, arena, models and device into gauges."""

    def __init__(self, runtime: Runtime, metrics: WorkerMetrics, device: Device) -> None:
        self._runtime, self._metrics, self._device = runtime, metrics, device
        self.monitor = Monitor(device)
        self._next = self._next_device = 0.0
        self._reclaimed = 0
        self._copied = copies.Reported()
        self._shown: set[str] = set()
        """Models whose gauges tell of work."""
        self._sequenced: set[str] = set()

    def tick(self, revoked: int) -> None:
        """Sample what is due; `revoked` leases were taken back since the last call."""
        if revoked:
            self._metrics.revoked.labels(self._metrics.worker, "age").inc(revoked)
        reclaimed = self._runtime.leases.reclaimed - self._reclaimed
        if reclaimed:
            self._reclaimed += reclaimed
            self._metrics.revoked.labels(self._metrics.worker, "session").inc(reclaimed)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_S
        self._queue()
        self._sequences()
        self._copied.report(self._metrics.copied, self._metrics.worker)
        worker, leases = self._metrics.worker, self._runtime.leases
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

    def _queue(self) -> None:
        """Queues and batches of the models that have any, or had some at the last look: a catalog may be long."""
        totals: dict[tuple[str, str], tuple[int, int, float]] = {}
        for model, lane, items, tokens, age in self._runtime.queue.snapshot():
            known = totals.get((model, lane), (0, 0, 0.0))
            totals[model, lane] = (known[0] + items, known[1] + tokens, max(known[2], age))
        active = {model for model, _ in totals} | self._runtime.executor.batches.models()
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
            self._batches(model)

    def _sequences(self) -> None:
        totals = dict.fromkeys(self._sequenced, (0, 0))
        for model, active, waiting in self._runtime.queue.sequencer.counts():
            known = totals.get(model, (0, 0))
            totals[model] = (known[0] + active, known[1] + waiting)
        self._sequenced = set(totals)
        for model, counts in totals.items():
            for state, count in zip(SEQUENCE_STATES, counts, strict=True):
                self._metrics.sequences.labels(model, self._metrics.worker, state).set(count)

    def _batches(self, model: str) -> None:
        """Budget, pace and fill of a model's batches; `sie_adaptive_batch_wait_ms` stays 0, nothing waits here."""
        self._budget(model)
        metrics, (p50_ms, fill) = self._metrics, self._runtime.executor.batches.pace_of(model)
        metrics.sie_adaptive_p50.labels(model).set(p50_ms)
        metrics.sie_adaptive_fill.labels(model).set(fill)

    def _budget(self, model: str) -> None:
        budget = self._runtime.executor.budgets.tokens_of(model)
        self._metrics.budget.labels(model, self._metrics.worker).set(budget)
        self._metrics.sie_adaptive_cost.labels(model).set(budget)

    def models(self, changed: Iterable[ModelStatus], gone: Iterable[str]) -> None:
        """States, load times and memory of these models; those that the catalog lost count as available."""
        lost = [ModelStatus(name, "available") for name in gone]
        self._metrics.model_budget.labels(self._metrics.worker).set(self._runtime.models.budget_bytes)
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
