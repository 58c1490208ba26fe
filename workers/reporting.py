"""Turns a worker's state into metrics: twice a second from the tick, and at every change of a model's state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ipc.messages import LANES, ModelStatus
from ipc.metrics import STATES, WorkerMetrics
from workers.device import Device, Monitor

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
        self._names: set[str] = set()

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
        worker, leases = self._metrics.worker, self._runtime.leases
        self._metrics.shm_used.labels(worker).set(leases.used_nbytes)
        self._metrics.shm_total.labels(worker).set(leases.capacity_nbytes)
        self._metrics.shm_leases.labels(worker).set(leases.leases)
        if now >= self._next_device:
            self._next_device = now + DEVICE_EVERY_S
            uuid = self._device.uuid
            self._metrics.gpu_memory.labels(worker, uuid).set(self.monitor.memory_bytes())
            self._metrics.gpu_utilization.labels(worker, uuid).set(self.monitor.utilization() or 0.0)
            self._metrics.gpu_temperature.labels(worker, uuid).set(self.monitor.temperature_c() or 0.0)

    def _queue(self) -> None:
        totals: dict[tuple[str, str], tuple[int, int, float]] = {}
        for model, lane, items, tokens, age in self._runtime.queue.snapshot():
            known = totals.get((model, lane), (0, 0, 0.0))
            totals[model, lane] = (known[0] + items, known[1] + tokens, max(known[2], age))
        for status in self._runtime.models.statuses():
            pending = 0
            for lane in LANES:
                items, tokens, age = totals.get((status.name, lane), (0, 0, 0.0))
                pending += items
                self._metrics.queue_depth.labels(status.name, lane).set(items)
                self._metrics.queue_tokens.labels(status.name, lane).set(tokens)
                self._metrics.queue_oldest.labels(status.name, lane).set(age)
            self._metrics.sie_queue_depth.labels(status.name).set(pending)
            self._metrics.sie_request_queue.labels(status.name).set(pending)
            self._metrics.budget.labels(status.name, self._metrics.worker).set(
                self._runtime.executor.budgets.tokens_of(status.name)
            )

    def models(self) -> None:
        """States, load times and memory of all models; those that the catalog lost count as available."""
        statuses = self._runtime.models.statuses()
        names = {status.name for status in statuses}
        lost = [ModelStatus(name, "available") for name in self._names - names]
        self._names = names
        self._metrics.model_budget.labels(self._metrics.worker).set(self._runtime.models.budget_bytes)
        for status in (*statuses, *lost):
            for state in STATES:
                self._metrics.state.labels(status.name, self._metrics.worker, state).set(
                    status.state == state
                )
            self._metrics.load_progress.labels(status.name, self._metrics.worker).set(status.progress)
            self._metrics.load_seconds.labels(status.name, self._metrics.worker).set(status.load_s)
            self._metrics.memory.labels(status.name, self._metrics.worker).set(status.memory_bytes)
            self._metrics.sie_loaded.labels(status.name, self._device.uuid).set(status.state == "loaded")
            self._metrics.sie_memory.labels(status.name, self._device.uuid).set(status.memory_bytes)
