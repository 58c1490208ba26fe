"""The models of one worker, as its runtime sees them: find one, say which states they are in, load and unload.

1. A model is loaded when a frontend asks for it, or at the start when the settings name it (`catalog.preload`).
2. It is unloaded when somebody asks for that, when memory is short (the one that was used longest ago goes), when it
   was idle for long, or when its catalog entry changed. What is there is finished first; no request is lost.
3. Models that differ only in options read from each call share one instance.

States are in `lifecycle.model_states`, threads in `lifecycle.maintenance`, the files of the catalog in
`lifecycle.catalog_following`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ipc.catalog.entries import Catalog
from ipc.catalog.model_config import ROW_COST
from ipc.errors import PenstockError
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from ipc.wire import codec
from ipc.wire.catalogs import Entries, Replied, Reread
from ipc.wire.messages import ModelStatus
from workers.device.devices import Device
from workers.lifecycle import grouping
from workers.lifecycle.catalog_following import CatalogFollower, ToldEntries
from workers.lifecycle.maintenance import Maintenance
from workers.lifecycle.memory_budget import budget_of, keep_freed_memory
from workers.lifecycle.model_states import ModelStates
from workers.scheduling.table import JobTable

log = logging.getLogger(__name__)


class ModelTable:
    """All models of the catalog on this worker."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Settings,
        slot: int,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        changed: Callable[[], None],
        jobs: JobTable,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread; `changed` is told of every new state."""
        self._device = device
        self._told: dict[str, ModelStatus] = {}
        self.entries = ToldEntries()
        self._states = ModelStates(settings, budget_of(settings, device), jobs, metrics, changed)
        self._follower = CatalogFollower(self._states, settings, catalog)
        self._maintenance = Maintenance(
            self._states, settings, slot, self._follower, device, run, jobs, metrics
        )
        workers = settings.worker_count
        self._states.offers = lambda entry: grouping.offers(entry, slot, device.torch, workers)
        self._states.serve(catalog)
        self._states.untried = {i.serial for i in self._states.instances() if self._states.is_preloaded(i)}
        self.find, self.touch = self._states.find, self._states.touch
        self.require_lora = self._maintenance.loras.require

    def start(self) -> None:
        """Begin to load what is loaded at the start."""
        if self._device.torch.type == "cpu":
            keep_freed_memory()
        with self._states.lock:
            for instance in self._states.instances():
                if self._states.is_preloaded(instance) or instance.entry.error:
                    self._states.enqueue(instance, demanded=False)
        self._maintenance.start()

    def close(self) -> None:
        """Load nothing more."""
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
        """States, as `told`, that are others than at the last call, and names of models that are gone since."""
        waiting, names = self._states.changed, set[str]()
        while waiting:
            names.add(waiting.popleft())
        device, served = str(self._device.torch), self._states.served
        found = [served[name].status(device) for name in names if name in served]
        changed = [status for status in found if self._told.get(status.name) != status]
        gone = [name for name in names if name not in served and self._told.pop(name, None) is not None]
        self._told.update({status.name: status for status in changed})
        return [codec.sayable(status) for status in changed], gone

    @property
    def catalog(self) -> Catalog:
        """What the files said when they were read last."""
        return self._follower.catalog

    def all_entries(self) -> Entries:
        """All that frontends have been told of the catalog."""
        return self.entries.all()

    def reread(self, message: Reread, done: Callable[[Replied], None]) -> None:
        """Look at the files, or at the draft of an override, in the maintenance thread.

        That thread calls `done` with the answer, after it has announced what has changed.
        """

        def work() -> None:
            try:
                replied = Replied(message.id, self._follower.reread(message.draft))
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
        """Whether everything that is loaded at the start has been tried."""
        return not self._states.untried

    @property
    def free_bytes(self) -> int:
        """What the memory budget has left."""
        return max(0, self._states.budget.nbytes - self._states.used_bytes())

    @property
    def budget_bytes(self) -> int:
        """What models may take together."""
        return self._states.budget.nbytes

    def engines(self) -> list[tuple[str, Any]]:
        """(name of the model, `generation.engine.Engine`) of all loaded models that generate."""
        return [
            (instance.name, instance.adapter.engine)
            for instance in self._states.instances()
            if instance.adapter is not None and instance.adapter.engine is not None
        ]

    def batch_tokens(self, name: str, configured: int) -> int:
        """Most tokens of a batch: those of the rows that the model takes, else what is configured for it or all."""
        model = self.find(name)
        if model is None:
            return configured
        config = model.adapter.config if model.adapter is not None else None
        if config is not None:
            return ROW_COST * max(1, config.max_batch_size)
        return min(configured, model.entry.max_batch_tokens or configured)

    def load(self, name: str, explicit: bool = False) -> None:
        """A request waits for this model, or (`explicit`) somebody wants it loaded whatever happened before."""
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

        Whether that happened within `wait_s`. `name`, pinned models and busy ones stay. The device thread may call it:
        nobody who holds the lock waits for that thread.
        """
        states, until = self._states, time.monotonic() + wait_s
        if not states.lock.acquire(timeout=wait_s):
            return False
        try:
            going = states.evict_idle(self.find(name))
            if going is None:
                return False
            return states.lock.wait_for(lambda: going.state != "unloading", until - time.monotonic())
        finally:
            states.lock.release()

    def unload(self, name: str) -> None:
        """Somebody wants this model unloaded."""
        states = self._states
        with states.lock:
            model = self.find(name)
            for instance in [each.instance for each in (model, model and model.next) if each is not None]:
                states.forgo(instance)
                if instance.state == "loaded":
                    states.begin_unload(instance, "admin")
                elif instance.state == "loading":
                    states.abandon(instance)
                else:
                    instance.wanted = False
