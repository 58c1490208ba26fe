"""The models of one worker, as its runtime sees them: find one, say which states they are in, load and unload.

1. A model is loaded when a frontend asks for it, or at the start when the settings name it (`catalog.preload`).
2. It is unloaded when somebody asks for that, when memory is short (the one that was used longest ago goes), when it
   was idle for long, or when its catalog entry changed. What is there is finished first; no request is lost.
3. Models that differ only in options read from each call share one instance.

States are in `lifecycle.shelf`, threads in `lifecycle.keeper`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ipc.catalog.entries import Catalog
from ipc.catalog.model_config import ROW_COST
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from ipc.wire import codec
from ipc.wire.messages import ModelStatus
from workers.device.devices import Device
from workers.lifecycle import instance_groups
from workers.lifecycle.keeper import Keeper
from workers.lifecycle.memory import budget_of
from workers.lifecycle.shelf import Shelf
from workers.scheduling.jobs import JobBook


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
        book: JobBook,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread; `changed` is told of every new state."""
        self._device = device
        self._told: dict[str, ModelStatus] = {}
        self._shelf = Shelf(settings, budget_of(settings, device), book, metrics, changed)
        self._keeper = Keeper(self._shelf, settings, slot, catalog, device, run, book, metrics)
        workers = settings.worker_count
        self._shelf.takes = lambda entry: instance_groups.takes(entry, slot, device.torch, workers)
        self._shelf.take(catalog)
        self._shelf.untried = {i.serial for i in self._shelf.instances() if self._shelf.is_preloaded(i)}
        self.find, self.touch = self._shelf.find, self._shelf.touch
        self.require_lora = self._keeper.loras.require

    def start(self) -> None:
        """Begin to load what is loaded at the start."""
        with self._shelf.lock:
            for instance in self._shelf.instances():
                if self._shelf.is_preloaded(instance) or instance.entry.error:
                    self._shelf.enqueue(instance, demanded=False)
        self._keeper.start()

    def close(self) -> None:
        """Load nothing more."""
        self._keeper.close()

    def statuses(self) -> list[ModelStatus]:
        """States of all models."""
        name = str(self._device.torch)
        return [host.status(name) for host in list(self._shelf.hosts.values())]

    def told(self) -> list[ModelStatus]:
        """States of all models at the last call of `changes`, as frontends can read them.

        A state that breaks the schema is told as a failed one.
        """
        return [codec.sayable(status) for status in self._told.values()]

    def changes(self) -> tuple[list[ModelStatus], list[str]]:
        """States, as `told`, that are others than at the last call, and names of models that are gone since."""
        waiting, names = self._shelf.changed, set[str]()
        while waiting:
            names.add(waiting.popleft())
        device, hosts = str(self._device.torch), self._shelf.hosts
        found = [hosts[name].status(device) for name in names if name in hosts]
        changed = [status for status in found if self._told.get(status.name) != status]
        gone = [name for name in names if name not in hosts and self._told.pop(name, None) is not None]
        self._told.update({status.name: status for status in changed})
        return [codec.sayable(status) for status in changed], gone

    @property
    def preloaded(self) -> bool:
        """Whether everything that is loaded at the start has been tried."""
        return not self._shelf.untried

    @property
    def free_bytes(self) -> int:
        """What the memory budget has left."""
        return max(0, self._shelf.budget.nbytes - self._shelf.used_bytes())

    @property
    def budget_bytes(self) -> int:
        """What models may take together."""
        return self._shelf.budget.nbytes

    def batch_tokens(self, name: str, configured: int) -> int:
        """Most tokens of a batch: those of the rows that the model takes, else what is configured for it or all."""
        host = self.find(name)
        if host is None:
            return configured
        config = host.adapter.config if host.adapter is not None else None
        if config is not None:
            return ROW_COST * max(1, config.max_batch_size)
        return min(configured, host.entry.max_batch_tokens or configured)

    def load(self, name: str, explicit: bool = False) -> None:
        """A request waits for this model, or (`explicit`) somebody wants it loaded whatever happened before."""
        shelf = self._shelf
        with shelf.lock:
            host = self.find(name)
            if host is None or not (explicit or shelf.was_unloaded(host.entry) is False):
                return
            instance = (host.next if explicit and host.next is not None else host).instance
            if instance.state == "available" or (instance.state == "failed" and explicit):
                shelf.enqueue(instance, demanded=True)
            elif instance.state == "loading":
                shelf.promote(instance)
            elif instance.state == "unloading":
                instance.wanted = True

    def unload_idle(self, name: str, wait_s: float) -> bool:
        """Unload the model that has no work and was used longest ago, and wait until its memory has come back.

        Whether that happened within `wait_s`. `name`, pinned models and busy ones stay. The device thread may call it:
        nobody who holds the lock waits for that thread.
        """
        shelf, until = self._shelf, time.monotonic() + wait_s
        if not shelf.lock.acquire(timeout=wait_s):
            return False
        try:
            going = shelf.evict_idle(self.find(name))
            if going is None:
                return False
            return shelf.lock.wait_for(lambda: going.state != "unloading", until - time.monotonic())
        finally:
            shelf.lock.release()

    def unload(self, name: str) -> None:
        """Somebody wants this model unloaded."""
        shelf = self._shelf
        with shelf.lock:
            host = self.find(name)
            for instance in [each.instance for each in (host, host and host.next) if each is not None]:
                shelf.forgo(instance)
                if instance.state == "loaded":
                    shelf.begin_unload(instance, "admin")
                elif instance.state == "loading":
                    shelf.abandon(instance)
                else:
                    instance.wanted = False
