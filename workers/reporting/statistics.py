"""What a worker tells those who watch it: its device, its queue, its last batches.

1. The device thread notes every batch in the `BatchLog`.
2. The runtime's tick calls `Statistics.tick`, which does nothing unless a frontend watches.
3. Five times a second a `Stats` message goes to the frontends that watch; the device is asked twice a second.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from ipc.wire.stats import BatchRecord, QueueState, Stats
from workers.device.devices import Monitor

if TYPE_CHECKING:
    from workers.runtime import Runtime

EVERY_S = 0.19
"""Two ticks of the endpoint, whose distance is a little over a tenth of a second."""
DEVICE_EVERY_S = 0.5
SHOWN_BATCHES = 48
SHARE_LOOKS = 10
"""Shares are over this many looks, some two seconds, so that long batches do not make them jump."""


class BatchLog:
    """The last batches, and the time spent in all of them. The device thread writes, the endpoint's thread reads."""

    def __init__(self) -> None:
        self._records: deque[BatchRecord] = deque(maxlen=SHOWN_BATCHES)
        self.busy_s = 0.0

    def note(self, model: str, items: int, tokens: int, budget: int, seconds: float) -> None:
        """A batch has ended."""
        self._records.append(BatchRecord(time.monotonic_ns(), seconds, model, items, tokens, budget))
        self.busy_s += seconds

    def models(self) -> set[str]:
        """Whose batches are among the last ones."""
        return {record.model for record in self.records()}

    def pace_of(self, model: str) -> tuple[float, float]:
        """(median milliseconds, mean fill of the budget from 0 to 1) of a model's recent batches; 0 for none."""
        recent = [record for record in self.records() if record.model == model]
        if not recent:
            return 0.0, 0.0
        fills = [min(1.0, record.tokens / record.budget) for record in recent if record.budget]
        return statistics.median(record.seconds for record in recent) * 1e3, statistics.fmean(fills or [0.0])

    def records(self) -> list[BatchRecord]:
        """Oldest first."""
        return list(self._records)


class Statistics:
    """Builds `Stats` and sends them to the sessions that watch. Endpoint thread only."""

    def __init__(self, runtime: Runtime, monitor: Monitor, batches: BatchLog) -> None:
        self._runtime, self._monitor, self._batches = runtime, monitor, batches
        self._next = self._next_device = 0.0
        self._device: tuple[int, int, int, float | None, float | None] = (0, 0, 0, None, None)
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=SHARE_LOOKS)

    def tick(self) -> None:
        """Send what is due."""
        endpoint, now = self._runtime.endpoint, time.monotonic()
        if now < self._next:
            return
        if not any(session.watching for session in endpoint.sessions):
            self._marks.clear()
            return
        self._next = now + EVERY_S
        endpoint.show(self._stats(now))

    def _stats(self, now: float) -> Stats:
        if now >= self._next_device:
            self._next_device = now + DEVICE_EVERY_S
            self._device = self._look()
        used, total, resident, utilization, temperature = self._device
        cpu, busy = self._shares(now)
        runtime, leases = self._runtime, self._runtime.leases
        return Stats(
            memory_used=used,
            memory_total=total,
            resident=resident,
            cpu=cpu,
            busy=busy,
            utilization=utilization,
            temperature_c=temperature,
            budget=runtime.executor.budgets.configured,
            admitted=runtime.queue.admitted,
            bound=runtime.queue.limit,
            arena_used=leases.used_nbytes,
            arena_total=leases.capacity_nbytes,
            leases=leases.leases,
            queues=self._queues(),
            batches=self._batches.records(),
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
        found: dict[str, QueueState] = {}
        for model, _, items, tokens, age_s in self._runtime.queue.snapshot():
            known = found.get(model, QueueState(model, 0, 0, 0.0))
            found[model] = QueueState(
                model, known.items + items, known.tokens + tokens, max(known.oldest_s, age_s)
            )
        return [state for state in found.values() if state.items]
