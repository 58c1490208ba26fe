"""The thread that looks after the models of a worker, and the threads that load.

1. It begins what is due, `worker.load_threads` at a time, each in a thread of its own.
2. It ends drains: the memory is given back once no request uses the model, or when `worker.unload_drain_s` is over.
3. Once a second it tries again what failed for a while, unloads what is idle or too much, and follows the files of the
   catalog.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ipc.catalog.repository.layout import ModelRefused
from ipc.catalog.watch import EVERY_S
from ipc.errors import ModelNotLoaded, ProtocolError
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.device.devices import Device
from workers.device.threads import vital_thread
from workers.lifecycle import memory_budget
from workers.lifecycle.catalog_following import CatalogFollower
from workers.lifecycle.crashes import LoadCrashes
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import LoadAbandoned, Loaded, Loader, NoRoom
from workers.lifecycle.loras import LoraLoader
from workers.lifecycle.model_states import ModelStates
from workers.loading import failure
from workers.loading.source import DownloadFailed, SourceError
from workers.scheduling.jobs import JobBook

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02


class Maintenance:
    """Owns the maintenance thread and the loading threads of one worker."""

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        slot: int,
        follower: CatalogFollower,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        book: JobBook,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread."""
        self._states, self._settings, self._device = states, settings, device
        self._book, self._metrics, self._follower = book, metrics, follower
        self._loader = Loader(settings, device, run)
        self.loras = LoraLoader(states, settings, slot, run, book)
        self._crashes = LoadCrashes(settings.paths.root / "loading", slot)
        self._loading = 0
        self._heap = memory_budget.Heap()
        self._next_look = 0.0
        self._closed = False
        self._thread = vital_thread("maintenance", self._run)

    def start(self) -> None:
        """Begin with what is due."""
        self._thread.start()

    def close(self) -> None:
        """Begin nothing more; loads that run end soon."""
        with self._states.lock:
            self._closed = True
            for instance in self._states.instances():
                instance.abandoned = True
            self._states.lock.notify_all()
        self._crashes.close()
        self.loras.close()

    def _run(self) -> None:
        while not self._closed:
            self._finish_drains()
            self._look()
            with self._states.lock:
                self._start_loads()
                draining = any(instance.state == "unloading" for instance in self._states.instances())
                if not self._closed:
                    self._states.lock.wait(DRAIN_LOOK_S if draining else EVERY_S)

    def _start_loads(self) -> None:
        most = self._settings.worker.load_threads
        while self._loading < most and (instance := self._states.next_due(self._may_begin)) is not None:
            verdict = self._crashes.verdict(instance.name)
            if verdict is not None:
                log.error("model %s is not loaded: %s", instance.name, verdict.message)
                self._states.end(instance, partial(instance.fail, verdict, time.monotonic()))
                continue
            self._loading += 1
            self._crashes.begin(instance.name)
            # PERF: a thread of its own, whose OpenMP team ends with it: idle teams would make the device thread's team
            # sleep between its steps.
            vital_thread(f"load-{instance.name}", partial(self._load, instance)).start()

    def _may_begin(self, instance: Instance) -> bool:
        return self._crashes.may_begin(instance.name)

    def _load(self, instance: Instance) -> None:
        """One load, in a thread of its own."""
        began = time.monotonic()
        failed: failure.LoadFailure | None = None
        try:
            loaded = self._loader.load(instance, self._room, partial(self._states.progressed, instance))
            self.loras.load_first(instance, loaded.adapter)
        except (LoadAbandoned, NoRoom) as reason:
            log.info("model %s is not loaded: %s", instance.name, reason)
        except Exception as error:
            failed = failure.classify(error)
            text = "model %s failed to load: %s: %s"
            unknown = failed.error_class == "UNKNOWN" and not isinstance(
                error, SourceError | DownloadFailed | ModelRefused | ProtocolError
            )
            log.warning(text, instance.name, failed.error_class, failed.message, exc_info=unknown)
        else:
            self._loaded(instance, loaded, time.monotonic() - began)
            return
        # NOTE: only here, after the exception with all that its frames held is gone, memory can be given back.
        memory_budget.give_back()
        self._not_loaded(instance, failed)

    def _loaded(self, instance: Instance, loaded: Loaded, seconds: float) -> None:
        log.info("model %s loaded on %s in %.1f s", instance.name, self._device.name, seconds)
        self._metrics.loads.labels(instance.name, self._metrics.worker, "loaded").inc()
        with self._states.lock:
            self._settle(instance)
            how = partial(instance.succeed, loaded.adapter, loaded.memory_bytes, seconds, time.monotonic())
            self._states.end(instance, how)
            # NOTE: a start reads which models were unloaded by name before it can be told of another unload.
            unwanted = not instance.demanded and self._states.was_unloaded(instance.entry)
            if (instance.abandoned or unwanted) and not self._closed:
                self._states.begin_unload(instance, "admin")

    def _not_loaded(self, instance: Instance, failed: failure.LoadFailure | None) -> None:
        with self._states.lock:
            self._settle(instance)
            if failed is None:
                self._states.end(instance, instance.rest)
                return
            self._metrics.loads.labels(instance.name, self._metrics.worker, "failed").inc()
            if failed.error_class == "OOM" and not (instance.relieved or instance.abandoned):
                instance.relieved = True
                if self._states.make_way(instance) or self._states.evict(1, "oom", last_may_go=True):
                    self._states.again(instance)
                    return
            self._states.end(instance, partial(instance.fail, failed, time.monotonic()))

    def _settle(self, instance: Instance) -> None:
        self._crashes.end(instance.name)
        self._loading -= 1

    def _room(self, instance: Instance, nbytes: int) -> None:
        """Wait until the budget has room for a load, and make it; see `Loader.load`."""
        states = self._states
        with states.lock:
            instance.reserved_bytes = nbytes
            while not (self._closed or instance.abandoned):
                leaving = any(other.state == "unloading" for other in states.instances())
                excess = states.used_bytes() - states.budget.nbytes
                if excess <= 0 and not (instance.relieved and leaving):
                    return
                if not leaving and not states.make_way(instance):
                    if not instance.demanded and not states.is_pinned(instance):
                        raise NoRoom("it does not fit beside the others and no request has asked for it")
                    if not states.evict(excess, "memory", last_may_go=self._last_may_go(instance)):
                        return
                states.lock.wait(EVERY_S)
        raise LoadAbandoned("nobody wants it any more")

    def _last_may_go(self, instance: Instance) -> bool:
        """The last loaded model gives way when there would not be enough memory at all, or when another one comes."""
        coming = (i for i in self._states.instances() if i is not instance and i.state == "loading")
        return self._states.used_bytes() > self._states.budget.total_nbytes or any(
            i.reserved_bytes for i in coming
        )

    def _finish_drains(self) -> None:
        """Give back what nobody uses any more, and fail what is left when the time is up."""
        now, done = time.monotonic(), []
        with self._states.lock:
            busy = self._book.adapters()
            for instance in self._states.instances():
                if instance.state != "unloading":
                    continue
                if id(instance.adapter) in busy and now < instance.drained_by:
                    continue
                self._book.fail_all(
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
        if not self._loading:
            self._heap.look()
        self._follower.look()

    def _try_again(self, now: float) -> None:
        """Failures whose time has come: models of the start, and those for which others still serve, are loaded again.

        All others are when somebody asks.
        """
        states = self._states
        for instance in states.instances():
            if instance.state == "failed" and instance.retry_at is not None and now >= instance.retry_at:
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
