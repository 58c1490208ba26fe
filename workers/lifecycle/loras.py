"""LoRA adapters of loaded models: children of a model, in the life cycle that models have.

1. Adapters that a profile names are loaded with the model (`load_first`). The model serves even if one of them fails.
2. `require` is asked for every request that names an adapter. An adapter that is not there lines up for a load, and
   the request is told to come again.
3. A model holds `worker.max_loras` of them, so an adapter in line begins when there is a place. The adapter used
   longest ago that no open request needs is unloaded for the next one. While all are needed, the adapter loaded
   longest ago takes no new requests after `TURN_S`, so that its turn comes to an end.
4. A failed load is remembered and answered at once, until the files change or, for lack of memory or network or after
   deaths of the process, its time has come.
5. An adapter that the catalog names no more is unloaded: its file names others now, or a request has unloaded it.

Adapters are put to use and taken away on the device thread, between two batches. Only the endpoint's thread opens
requests, and only that thread calls `require` and `leave_unnamed`, where every unloading begins. So an adapter that is
unloading gets no more requests, and is dropped once no open request needs it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ipc.catalog.entries import ModelEntry
from ipc.errors import InferenceFailed, InvalidInput, LoraLoading
from ipc.settings import Settings
from ipc.wire.messages import Call
from workers.adapters.base import Adapter
from workers.adapters.shared.lora import FittedLora, LoraLayers
from workers.lifecycle import memory_budget
from workers.lifecycle.instance import Instance, LoadAbandoned, LoraAdapter
from workers.lifecycle.loads import LoadCrashes, Loads
from workers.lifecycle.model_states import LoadLine, ModelStates
from workers.lifecycle.proof import prove
from workers.loading import lora_files
from workers.loading.failure import LoadFailure
from workers.scheduling.job_table import JobTable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
TURN_S = 1.0
"""Seconds for which an adapter with open requests keeps its place while another one waits."""


class LoraLoads(Loads[LoraAdapter, FittedLora]):
    """The LoRA adapters of all models of one worker."""

    expected = (Exception,)

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        crashes: LoadCrashes,
        run: Callable[[Callable[[], Any]], Any],
        post: Callable[[Callable[[], None]], object],
        jobs: JobTable,
    ) -> None:
        """`run` executes a function on the device thread and waits for its end, `post` does not wait."""
        super().__init__(states, LoadLine(), crashes, settings.worker.load_threads)
        self._run_on_device, self._post, self._jobs = run, post, jobs
        self._dirs, self._places = settings.catalog.lora_dirs, settings.worker.max_loras

    def require(self, instance: Instance, call: Call) -> None:
        """Return when the adapter that a call names is loaded. Endpoint thread only.

        Raises `InvalidInput` for an unknown one, `LoraLoading` when it is not loaded yet, and `InferenceFailed` when
        its load failed.
        """
        known, named = instance.loras.get(call.lora), instance.entry.loras.get(call.lora)
        if known is not None and known.state == "loaded" and known.named == named:
            known.last_used = time.monotonic()
            return
        source = lora_files.find(instance.entry, self._dirs, call.lora)
        if source is None:
            before = call.names.options
            raise InvalidInput(
                f"{before}lora, {before}lora_id: this model has no LoRA adapter {call.lora[:64]!a}"
            )
        files = lora_files.state_of(source)
        with self.states.lock:
            known = instance.loras.get(call.lora)
            if known is not None and known.failure is not None:
                waits = known.retry_at is None or time.monotonic() < known.retry_at
                if known.files == files and known.named == named and waits:
                    raise InferenceFailed(f"LoRA load failed: {known.failure.message}")
                known = None
            if known is None and instance.adapter is not None:
                known = LoraAdapter(instance, call.lora, source, files, named)
                instance.loras[call.lora] = known
                self.line.add(known, first=True)
            elif known is not None and known.state == "loaded" and known.named != named:
                self._unload_for_another_source(known)
            self._make_place(instance)
            self.start()
            self.states.lock.notify_all()
        raise LoraLoading(f"LoRA {call.lora!a} is loading", retry_after_s=RETRY_AFTER_S)

    def _unload_for_another_source(self, lora: LoraAdapter) -> None:
        """Unload an adapter whose catalog entry names another source, once no open request needs the old weights."""
        if lora.key not in self._needed(lora.parent):
            log.info("%s has another source now", lora.title)
            self._unload(lora, "catalog")

    def _needed(self, instance: Instance) -> set[str]:
        """Keys of the LoRA adapters that open requests of a model need."""
        return {job.work.call.lora for job in self._jobs.jobs() if job.adapter is instance.adapter}

    def _unload(self, lora: LoraAdapter, reason: str) -> None:
        lora.drain(reason, math.inf)
        self._drop_drained(lora.parent)
        self.states.announce(lora.parent)

    def _make_place(self, instance: Instance) -> None:
        """Begin to unload an adapter if another one waits for a place. Endpoint thread only; wants the lock."""
        self._drop_drained(instance)
        waits = any(lora.state == "available" for lora in instance.loras.values())
        if not waits or self._has_place(instance):
            return
        loaded = {lora.serial: lora for lora in instance.loras.values() if lora.state == "loaded"}
        if not loaded or any(lora.state == "unloading" for lora in instance.loras.values()):
            return
        needed = self._needed(instance)
        residents = [
            memory_budget.Resident(lora.serial, lora.nbytes, lora.last_used, busy=lora.key in needed)
            for lora in loaded.values()
        ]
        first = memory_budget.order(residents)[0]
        oldest = min(loaded.values(), key=lambda lora: lora.since)
        if not first.busy:
            log.info("%s leaves for another one", loaded[first.serial].title)
            self._unload(loaded[first.serial], "memory")
        elif time.monotonic() - oldest.since >= TURN_S:
            self._unload(oldest, "memory")

    def _has_place(self, instance: Instance) -> bool:
        return self._held(instance) < self._places

    @staticmethod
    def _held(instance: Instance) -> int:
        return sum(lora.state in ("loading", "loaded", "unloading") for lora in instance.loras.values())

    def finish_drains(self) -> bool:
        """Drop draining adapters that no open request needs; returns whether others are needed. Wants the lock."""
        draining = [self._drop_drained(each) for each in self.states.instances() if each.loras]
        return any(draining)

    def _drop_drained(self, instance: Instance) -> bool:
        draining = [lora for lora in instance.loras.values() if lora.state == "unloading"]
        if not draining:
            return False
        needed = self._needed(instance)
        ended = [lora for lora in draining if lora.key not in needed]
        for lora in ended:
            lora.rest()
            instance.drop_lora(lora)
        if ended:
            self.remove_dropped()
            self.states.announce(instance)
        return len(ended) < len(draining)

    def may_begin(self, item: LoraAdapter) -> bool:
        """Whether the model has a place for an adapter. Adapters of a model that has gone leave the line."""
        parent = item.parent
        if parent.loras.get(item.key) is not item:
            self.line.withdraw(item)
            return False
        return parent.state == "loaded" and self._has_place(parent) and super().may_begin(item)

    def start(self) -> None:
        """Begin the loads that are due, and announce adapters that wait for nothing but a thread. Wants the lock."""
        super().start()
        for instance in self.states.instances():
            waiting = [lora for lora in instance.loras.values() if lora.state == "available"]
            free = self._places - self._held(instance)
            due = waiting[: max(0, free)] if instance.state == "loaded" else []
            if any(lora.due != (lora in due) for lora in waiting):
                for lora in waiting:
                    lora.due = lora in due
                self.states.announce(instance)

    def begin(self, item: LoraAdapter) -> None:
        """Give an adapter a place, as its load begins. Wants the lock."""
        item.begin(demanded=True)
        self.states.announce(item.parent)

    def carry_out(self, item: LoraAdapter) -> FittedLora:
        """Load an adapter: read, install and prove it, in the place of those that have left."""
        self._run_on_device(partial(self._remove_dropped, item.parent))
        adapter = item.parent.adapter
        if adapter is None:
            raise LoadAbandoned("its model has gone")
        return self._fit(adapter, item)

    def remove_dropped(self) -> None:
        """Have the device thread give the memory of adapters back that have gone. Wants the lock, and does not wait."""
        for instance in self.states.instances():
            if instance.dropped_loras:
                self._post(partial(self._remove_dropped, instance))

    def _remove_dropped(self, instance: Instance) -> None:
        """Remove the weights of dropped adapters from the layers of a model. Device thread only."""
        with self.states.lock:
            adapter, dropped = instance.adapter, instance.dropped_loras
            instance.dropped_loras = []
        layers = None if adapter is None else adapter.loras
        if layers is not None:
            for key, fitted in dropped:
                layers.remove(key, fitted)

    def leave_unnamed(self) -> None:
        """Unload the adapters that the catalog named and names no more. Endpoint thread only."""
        for instance in self.states.instances():
            known = list(instance.loras.values())
            gone = [lora for lora in known if lora.named is not None and lora.key not in instance.entry.loras]
            if not gone:
                continue
            with self.states.lock:
                for lora in gone:
                    if lora.state == "loaded":
                        self._unload(lora, "catalog")
                    elif lora.state in ("available", "failed"):
                        # NOTE: `may_begin` takes an adapter that was in line out of the line.
                        instance.loras.pop(lora.key, None)

    def load_first(self, instance: Instance, adapter: Adapter) -> None:
        """Load the adapters that profiles of a model name; on its loading thread, before anybody can use the model."""
        if adapter.loras is None:
            return
        for key in _named(instance.entries)[: self._places]:
            source = lora_files.find(instance.entry, self._dirs, key)
            if source is None:
                log.warning("model %s: a profile names the LoRA %s, which does not exist", instance.name, key)
                continue
            files, named = lora_files.state_of(source), instance.entry.loras.get(key)
            lora = LoraAdapter(instance, key, source, files, named)
            lora.begin(demanded=False)
            # NOTE: the maintenance thread goes through the adapters of all models, those included that are loading.
            with self.states.lock:
                instance.loras[key] = lora
            self.run_here(lora, partial(self._fit, adapter, lora))

    def _fit(self, adapter: Adapter, lora: LoraAdapter) -> FittedLora:
        """Read, install and prove: the canned inferences run all its layers and give finite values."""
        layers = adapter.loras
        assert layers is not None
        fitted = layers.fit(lora_files.fetch(lora.source))
        self._run_on_device(partial(_install, layers, adapter, lora.parent.entry, lora.key, fitted))
        return fitted

    def succeeded(self, item: LoraAdapter, result: FittedLora, seconds: float) -> None:
        """The adapter takes requests, if its model is still there."""
        log.info("%s loaded in %.1f s", item.title, seconds)
        item.succeed(result, time.monotonic())
        self.states.announce(item.parent)

    def failed(self, item: LoraAdapter, reason: LoadFailure | None) -> None:
        """The adapter is failed, or is forgotten if its load was given up."""
        if reason is not None:
            item.fail(reason, time.monotonic())
        elif item.parent.loras.get(item.key) is item:
            item.rest()
            item.parent.drop_lora(item)
        self.states.announce(item.parent)


def _install(layers: LoraLayers, adapter: Adapter, entry: ModelEntry, name: str, fitted: FittedLora) -> None:
    layers.install(name, fitted)
    try:
        with layers.traced(name):
            prove(adapter, entry, name)
    except BaseException:
        layers.remove(name, fitted)
        raise


def _named(entries: list[ModelEntry]) -> list[str]:
    """Names of the adapters that runtime options of these entries name, each once."""
    names = [entry.runtime.get("lora") or entry.runtime.get("lora_id") for entry in entries]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))
