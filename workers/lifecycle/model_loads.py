"""Loads of models: room for them within the memory budget, and what their outcome means for other models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ipc.errors import ProtocolError
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.device.devices import Device
from workers.lifecycle.crashes import LoadCrashes
from workers.lifecycle.instance import Instance, LoadAbandoned, NoRoom
from workers.lifecycle.loading import Loaded, Loader
from workers.lifecycle.loads import Loads
from workers.lifecycle.loras import LoraLoads
from workers.lifecycle.model_states import ModelStates
from workers.loading.failure import LoadFailure
from workers.loading.source import DownloadFailed, SourceError
from workers.repository.layout import ModelRefused
from workers.repository.watch import EVERY_S

log = logging.getLogger(__name__)


class ModelLoads(Loads[Instance, Loaded]):
    """The loads of models on one worker."""

    expected = (SourceError, DownloadFailed, ModelRefused, ProtocolError)

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        crashes: LoadCrashes,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        loras: LoraLoads,
        metrics: WorkerMetrics,
    ) -> None:
        """`run` executes a function on the device thread."""
        super().__init__(states, states.due, crashes, settings.worker.load_threads)
        self._loader, self._loras = Loader(settings, device, run), loras
        self._device, self._metrics = device, metrics
        self._closed = False

    def close(self) -> None:
        """Loads that run end soon, and what they loaded stays. Wants the lock."""
        self._closed = True
        for instance in self.states.instances():
            instance.abandoned = True

    def load(self, item: Instance) -> Loaded:
        """One model, and the LoRA adapters that its profiles name."""
        loaded = self._loader.load(item, self._room, partial(self.states.progressed, item))
        self._loras.load_first(item, loaded.adapter)
        return loaded

    def succeeded(self, item: Instance, result: Loaded, seconds: float) -> None:
        """The model serves, unless somebody has unloaded it meanwhile."""
        log.info("%s loaded on %s in %.1f s", item.title, self._device.name, seconds)
        self._metrics.loads.labels(item.name, self._metrics.worker, "loaded").inc()
        how = partial(item.succeed, result.adapter, result.memory_bytes, seconds, time.monotonic())
        self.states.end(item, how)
        # NOTE: a start reads which models were unloaded by name before it can be told of another unload.
        unwanted = not item.demanded and self.states.was_unloaded(item.entry)
        if (item.abandoned or unwanted) and not self._closed:
            self.states.begin_unload(item, "admin")

    def failed(self, item: Instance, reason: LoadFailure | None) -> None:
        """The model is failed; after lack of memory another model goes first, and the load is tried once more."""
        if reason is None:
            self.states.end(item, item.rest)
            return
        self._metrics.loads.labels(item.name, self._metrics.worker, "failed").inc()
        if reason.error_class == "OOM" and not (item.relieved or item.abandoned):
            item.relieved = True
            if self.states.make_way(item) or self.states.evict(1, "oom", last_may_go=True):
                self.states.again(item)
                return
        self.states.end(item, partial(item.fail, reason, time.monotonic()))

    def refused(self, item: Instance, verdict: LoadFailure) -> None:
        """The model is failed for a while; that counts as no load."""
        self.states.end(item, partial(item.fail, verdict, time.monotonic()))

    def _room(self, instance: Instance, nbytes: int) -> None:
        """Wait until the budget has room for a load, and make it; see `Loader.load`."""
        states = self.states
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
        coming = (i for i in self.states.instances() if i is not instance and i.state == "loading")
        return self.states.used_bytes() > self.states.budget.total_nbytes or any(
            i.reserved_bytes for i in coming
        )
