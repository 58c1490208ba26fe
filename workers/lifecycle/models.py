"""The models of one worker, as its runtime sees them: find one, say which states they are in, load and unload.

1. A model is loaded when a frontend asks for the model, or at the start when the settings name it (`catalog.preload`).
2. A model is unloaded when somebody asks, when memory is short (the model used longest ago goes), when the model was
   idle for long, or when its catalog entry changed. Requests that the worker has are finished first.
3. Models that differ only in options read from each call share one instance.

A load has five stops: `ModelTable.want` asks for the model. `ModelStates.enqueue` puts the load in line. `Loads.start`
gives the load a thread. `Loader.load` reads files and makes room. `loading.build_proven` builds the adapter and proves
its numbers. Then `ModelLoads.succeeded` has the model serve.

States are in `lifecycle.model_states`, the files of the catalog in `lifecycle.catalog_following`. One thread
(`Maintenance`) looks after the models and their LoRA adapters:

1. The thread begins the loads that are due (`lifecycle.loads`, `lifecycle.loras`).
2. The thread ends drains: memory is given back once no request uses the model, or after `worker.unload_drain_s`.
3. Once a second the thread loads again models whose failure has expired, unloads models that are idle or too large, and
   follows the files of the catalog.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ipc.catalog.entries import Catalog
from ipc.catalog.model_config import ROW_COST
from ipc.errors import ModelNotLoaded, PenstockError
from ipc.metrics.registry import WorkerMetrics
from ipc.processes.starting import ended_by
from ipc.settings import Settings
from ipc.wire import codec
from ipc.wire.catalogs import Entries, Replied, Reread
from ipc.wire.messages import ModelStatus
from workers.device.devices import Device
from workers.device.stepping import vital_thread
from workers.lifecycle import memory_budget, model_states
from workers.lifecycle.catalog_following import CatalogFollower, ToldEntries
from workers.lifecycle.loads import LoadCrashes, ModelLoads
from workers.lifecycle.loras import LoraLoads
from workers.lifecycle.memory_budget import budget_of, keep_freed_memory
from workers.lifecycle.model_states import ModelStates
from workers.repository.catalog_files import EVERY_S
from workers.scheduling.context import Context
from workers.scheduling.job_table import JobTable

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
        post: Callable[[Callable[[], None]], object],
        jobs: JobTable,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread and waits for its end, `post` does not wait."""
        self._states, self._settings, self._device = states, settings, device
        self._jobs, self._follower = jobs, follower
        self._crashes = LoadCrashes(settings.paths.root / "loading", slot, ended_by())
        self.loras = LoraLoads(states, settings, self._crashes, run, post, jobs)
        self.models = ModelLoads(states, settings, self._crashes, device, run, self.loras.load_first, metrics)
        self._heap = memory_budget.Heap()
        self._next_look = 0.0
        self._asked: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = vital_thread("maintenance", self._run)

    def start(self) -> None:
        """Start the maintenance thread, which begins the loads that are due."""
        self._thread.start()

    def close(self) -> None:
        """Begin no further load; loads that run end soon."""
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
        """Free the memory of unloading models without requests; fail requests that are left when the time is up."""
        now, drained = time.monotonic(), []
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
                drained.append(instance)
        if not drained:
            return
        memory_budget.give_back()
        with self._states.lock:
            for instance in drained:
                log.info("model %s is unloaded", instance.name)
                self._states.end(instance, instance.rest)

    def _look(self) -> None:
        """Once a second look at failed loads, idle models, memory and files."""
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
        """Load failed models again whose time has come: those of the start, pinned ones, and replacements.

        All other failed models become available, and are loaded when somebody asks.
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
        """Unload the model used longest ago if models exceed the budget, or the device is full and no budget is set."""
        if any(instance.state in ("loading", "unloading") for instance in self._states.instances()):
            return
        worker = self._settings.worker
        by_hand, share = worker.memory_budget_bytes > 0, worker.memory_pressure_percent / 100
        excess = self._states.used_bytes() - self._states.budget.nbytes
        if excess > 0 or (not by_hand and memory_budget.device_share(self._device) > share):
            self._states.evict(max(1, excess), "memory")


class ModelTable:
    """All models of the catalog on this worker."""

    def __init__(
        self,
        catalog: Catalog,
        slot: int,
        device: Device,
        context: Context,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is told of every new state."""
        settings, jobs, metrics = context.settings, context.jobs, context.metrics
        self._device, self._budgets = device, context.budgets
        self._told: dict[str, ModelStatus] = {}
        self.entries = ToldEntries()
        self._states = ModelStates(settings, budget_of(settings, device), jobs, metrics, changed)
        self._follower = CatalogFollower(self._states, settings, catalog)
        self._maintenance = Maintenance(
            self._states,
            settings,
            slot,
            self._follower,
            device,
            lambda work: context.queue.call(work).result(),
            context.queue.call,
            jobs,
            metrics,
        )
        workers = settings.worker_count
        self._states.offers = lambda entry: model_states.offers(entry, slot, device.torch, workers)
        self._states.serve(catalog)
        self._states.untried = {i.serial for i in self._states.instances() if self._states.is_preloaded(i)}
        self.find, self.touch = self._states.find, self._states.touch
        self.require_lora = self._maintenance.loras.require

    def start(self) -> None:
        """Begin the loads of the start."""
        if self._device.torch.type == "cpu":
            keep_freed_memory()
        with self._states.lock:
            for instance in self._states.instances():
                if self._states.is_preloaded(instance) or instance.entry.error:
                    self._states.enqueue(instance, demanded=False)
        self._maintenance.start()

    def close(self) -> None:
        """End the maintenance thread; no model is loaded any more."""
        self._maintenance.close()

    def statuses(self) -> list[ModelStatus]:
        """States of all models."""
        name = str(self._device.torch)
        return [model.status(name) for model in list(self._states.served.values())]

    def told(self) -> list[ModelStatus]:
        """States of all models at the last call of `changes`, as frontends can read them.

        A state that breaks the schema is told as a failed one.
        """
        return [codec.sayable(status) for status in self._told.values()]

    def changes(self) -> tuple[list[ModelStatus], list[str]]:
        """States that changed since the last call, as `told` gives them, and names of models that are gone since."""
        self._maintenance.loras.leave_unnamed()
        queue, names = self._states.changed, set[str]()
        while queue:
            names.add(queue.popleft())
        for name in names:
            self._limit_batches(name)
        device, served = str(self._device.torch), self._states.served
        statuses = [served[name].status(device) for name in names if name in served]
        changed = [status for status in statuses if self._told.get(status.name) != status]
        gone = [name for name in names if name not in served and self._told.pop(name, None) is not None]
        self._told.update({status.name: status for status in changed})
        return [codec.sayable(status) for status in changed], gone

    @property
    def catalog(self) -> Catalog:
        """The content of the files at the last reading."""
        return self._follower.catalog

    def all_entries(self) -> Entries:
        """The entries that frontends have been told."""
        return self.entries.all()

    def reread(self, message: Reread, done: Callable[[Replied], None]) -> None:
        """Look at the files, or at the draft of a load, in the maintenance thread.

        That thread calls `done` with the answer, after the announcement of all changes.
        """

        def work() -> None:
            try:
                replied = Replied(message.id, self._follower.reread(message))
            except PenstockError as error:
                replied = Replied(message.id, code=error.code, message=error.message)
            except Exception:
                # NOTE: a client's configuration may be wrong in unforeseen ways, which must not end the worker.
                log.exception("looking at the files of models failed")
                replied = Replied(
                    message.id, code=PenstockError.code, message="the files could not be looked at"
                )
            done(replied)

        self._maintenance.ask(work)

    @property
    def preloaded(self) -> bool:
        """Whether all models of the start were tried."""
        return not self._states.untried

    @property
    def free_bytes(self) -> int:
        """Bytes that the memory budget has left."""
        return max(0, self._states.budget.nbytes - self._states.used_bytes())

    @property
    def budget_bytes(self) -> int:
        """Bytes that models may take together."""
        return self._states.budget.nbytes

    def engines(self) -> list[tuple[str, Any]]:
        """(name of the model, `generation.engine.Engine`) of all loaded models that generate."""
        return [
            (instance.name, instance.adapter.engine)
            for instance in self._states.instances()
            if instance.adapter is not None and instance.adapter.engine is not None
        ]

    def _limit_batches(self, name: str) -> None:
        """Most tokens of a batch: `ROW_COST` for each row of a program, else the bound of the entry or of all."""
        limits, model = self._budgets.limits, self.find(name)
        config = model.adapter.config if model is not None and model.adapter is not None else None
        if config is not None:
            limits[name] = ROW_COST * max(1, config.max_batch_size)
        elif model is not None and model.entry.max_batch_tokens:
            limits[name] = min(self._budgets.configured, model.entry.max_batch_tokens)
        else:
            limits.pop(name, None)

    def want(self, name: str, explicit: bool = False) -> None:
        """Ask for a load: a request waits for the model, or (`explicit`) an operator orders the load.

        An order also tries again a load that has failed, and loads a model that was unloaded by name.
        """
        states = self._states
        with states.lock:
            model = self.find(name)
            if model is None or not (explicit or states.was_unloaded(model.entry) is False):
                return
            instance = (model.next if explicit and model.next is not None else model).instance
            if instance.state == "available" or (instance.state == "failed" and explicit):
                states.enqueue(instance, demanded=True)
            elif instance.state == "loading":
                states.promote(instance)
            elif instance.state == "unloading":
                instance.wanted = True

    def unload_idle(self, name: str, wait_s: float) -> bool:
        """Unload the model that has no work and was used longest ago, and wait until its memory has come back.

        Returns whether that happened within `wait_s`. `name`, pinned models and busy ones stay. The device thread may
        call: nobody who holds the lock waits for that thread.
        """
        states, until = self._states, time.monotonic() + wait_s
        if not states.lock.acquire(timeout=wait_s):
            return False
        try:
            leaving = states.evict_idle(self.find(name))
            if leaving is None:
                return False
            return states.lock.wait_for(lambda: leaving.state != "unloading", until - time.monotonic())
        finally:
            states.lock.release()

    def unload(self, name: str) -> None:
        """Unload a model, or give up its load, by order of an operator."""
        with self._states.lock:
            self._states.unload(name)
