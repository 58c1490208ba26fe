"""The thread that looks after the models of a worker and their LoRA adapters.

1. It begins the loads that are due (`lifecycle.loads`).
2. It ends drains: the memory is given back once no request uses the model, or when `worker.unload_drain_s` is over.
3. Once a second it tries again what failed for a while, unloads what is idle or too much, and follows the files of the
   catalog.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ipc.errors import ModelNotLoaded
from ipc.metrics.registry import WorkerMetrics
from ipc.processes.starting import ended_by
from ipc.settings import Settings
from workers.device.devices import Device
from workers.device.stepping import vital_thread
from workers.lifecycle import memory_budget
from workers.lifecycle.catalog_following import CatalogFollower
from workers.lifecycle.crashes import LoadCrashes
from workers.lifecycle.loras import LoraLoads
from workers.lifecycle.model_loads import ModelLoads
from workers.lifecycle.model_states import ModelStates
from workers.repository.watch import EVERY_S
from workers.scheduling.table import JobTable

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02


class Maintenance:
    """Owns the maintenance thread and the loads of one worker."""

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        slot: int,
        follower: CatalogFollower,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        jobs: JobTable,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread."""
        self._states, self._settings, self._device = states, settings, device
        self._jobs, self._follower = jobs, follower
        self._crashes = LoadCrashes(settings.paths.root / "loading", slot, ended_by())
        self.loras = LoraLoads(states, settings, self._crashes, run, jobs)
        self.models = ModelLoads(states, settings, self._crashes, device, run, self.loras, metrics)
        self._heap = memory_budget.Heap()
        self._next_look = 0.0
        self._asked: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = vital_thread("maintenance", self._run)

    def start(self) -> None:
        """Begin with what is due."""
        self._thread.start()

    def close(self) -> None:
        """Begin nothing more; loads that run end soon."""
        with self._states.lock:
            self._closed = True
            self.models.close()
            self._states.lock.notify_all()
        self._crashes.close()

    def ask(self, work: Callable[[], None]) -> None:
        """Run `work` in the maintenance thread, soon; from any thread."""
        with self._states.lock:
            self._asked.append(work)
            self._states.lock.notify_all()

    def _run(self) -> None:
        while not self._closed:
            while self._asked:
                self._asked.popleft()()
            self._finish_drains()
            self._look()
            with self._states.lock:
                draining = self.loras.finish_drains()
                self.models.start()
                self.loras.start()
                draining |= any(instance.state == "unloading" for instance in self._states.instances())
                if not self._closed:
                    wait_s = DRAIN_LOOK_S if draining else EVERY_S
                    self._states.lock.wait(0.0 if self._asked else wait_s)

    def _finish_drains(self) -> None:
        """Give back what nobody uses any more, and fail what is left when the time is up."""
        now, done = time.monotonic(), []
        with self._states.lock:
            busy = self._jobs.adapters()
            for instance in self._states.instances():
                if instance.state != "unloading":
                    continue
                if id(instance.adapter) in busy and now < instance.drained_by:
                    continue
                self._jobs.fail_all(
                    instance.adapter, ModelNotLoaded("the model was unloaded", retry_after_s=1)
                )
                instance.adapter = None
                done.append(instance)
        if not done:
            return
        memory_budget.give_back()
        with self._states.lock:
            for instance in done:
                log.info("model %s is unloaded", instance.name)
                self._states.end(instance, instance.rest)

    def _look(self) -> None:
        """Once a second: what to try again, what is idle, memory, files."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + EVERY_S
        with self._states.lock:
            self._try_again(now)
            self._unload_idle(now)
            self._relieve()
        if not (self.models.running or self.loras.running):
            self._heap.look()
        self._follower.look()

    def _try_again(self, now: float) -> None:
        """Failures whose time has come: models of the start, and those for which others still serve, are loaded again.

        All others are when somebody asks.
        """
        states = self._states
        for instance in states.instances():
            if instance.state != "failed" or instance.retry_at is None:
                continue
            if now >= instance.retry_at or self._crashes.forgiven(instance.name):
                awaited = states.is_preloaded(instance) or states.is_pinned(instance)
                if awaited or states.replaced_by(instance):
                    states.enqueue(instance, demanded=False)
                else:
                    states.end(instance, instance.rest)

    def _unload_idle(self, now: float) -> None:
        limit_s = self._settings.worker.idle_unload_s
        if not limit_s:
            return
        unused = [r for r in self._states.residents() if not (r.pinned or r.busy)]
        idle = {resident.serial for resident in unused if now - resident.last_used > limit_s}
        for instance in self._states.instances():
            if instance.serial in idle:
                self._states.begin_unload(instance, "idle")

    def _relieve(self) -> None:
        """Over the budget, or (when it is not set by hand) over its share of the device: the oldest one goes."""
        if any(instance.state in ("loading", "unloading") for instance in self._states.instances()):
            return
        worker = self._settings.worker
        by_hand, share = worker.memory_budget_bytes > 0, worker.memory_pressure_percent / 100
        excess = self._states.used_bytes() - self._states.budget.nbytes
        if excess > 0 or (not by_hand and memory_budget.device_share(self._device) > share):
            self._states.evict(max(1, excess), "memory")
