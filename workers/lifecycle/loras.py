"""LoRA adapters of loaded models: which are there, which are being loaded, which failed, and who makes room.

1. Those that a profile names are loaded with the model (`load_first`); one that fails does not keep it from serving.
2. `require` is asked for every request that names one. What is not there is loaded in a thread of its own, and the
   request is told to come again.
3. A model holds `worker.max_loras` of them. One more takes the place of the one used longest ago that no open request
   needs. While all are needed, the one loaded longest ago takes no new requests, so that its turn comes to an end.
4. A failed load is remembered and answered at once, until the files change or, for lack of memory or network or after
   deaths of the process, its time has come.

Adapters are put to use and taken away on the device thread, between two batches. Requests are opened in the endpoint's
thread alone, so that a decision made there about what no open request needs stays true.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ipc.catalog.entries import LoraSource, ModelEntry
from ipc.errors import InferenceFailed, InvalidInput, LoraLoading
from ipc.settings import Settings
from ipc.wire.messages import Call
from workers.adapters.base import Adapter
from workers.adapters.shared.lora import FittedLora, LoraLayers
from workers.device.threads import vital_thread
from workers.lifecycle.crashes import LoadCrashes
from workers.lifecycle.instance import Instance, LoraState
from workers.lifecycle.model_states import ModelStates
from workers.lifecycle.proof import prove
from workers.loading import failure, lora_files
from workers.loading.failure import LoadFailure
from workers.scheduling.jobs import JobBook

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
TURN_S = 1.0
"""How long an adapter serves before its turn may end, and how long its place is kept free for another one."""


@dataclass(frozen=True, slots=True, eq=False)
class _Load:
    """One load that is due, and what leaves for it."""

    instance: Instance
    adapter: Adapter
    name: str
    source: LoraSource
    state: LoraState
    evicted: tuple[str, FittedLora] | None


class LoraLoader:
    """The LoRA adapters of all models of one worker."""

    def __init__(
        self,
        states: ModelStates,
        settings: Settings,
        slot: int,
        run: Callable[[Callable[[], Any]], Any],
        book: JobBook,
    ) -> None:
        """`run` executes a function on the device thread."""
        self._states, self._run, self._book = states, run, book
        self._dirs, self._most = settings.catalog.lora_dirs, settings.worker.max_loras
        self._crashes = LoadCrashes(settings.paths.root / "loading-loras", slot)
        self._threads, self._running = settings.worker.load_threads, 0
        self._due: deque[_Load] = deque()

    def close(self) -> None:
        """The process ends in order; loads that still run are no fault of theirs."""
        self._crashes.close()

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
        with self._states.lock:
            known = instance.loras.get(call.lora)
            moved = known is not None and known.named != named
            if known is not None and known.failure is not None:
                if (
                    known.files == files
                    and not moved
                    and (known.retry_at is None or time.monotonic() < known.retry_at)
                ):
                    raise InferenceFailed(f"LoRA load failed: {known.failure.message}")
                known = None
            if known is not None and known.fitted is not None and moved:
                self._replace(instance, call.lora, source, files, known)
            elif known is not None and known.state == "leaving" and time.monotonic() - known.since > TURN_S:
                # Nobody has come for its place.
                known.move("loaded", time.monotonic())
                return
            elif known is None:
                self._enqueue(instance, call.lora, source, files)
        raise LoraLoading(f"LoRA {call.lora!a} is loading", retry_after_s=RETRY_AFTER_S)

    def _replace(
        self, instance: Instance, name: str, source: LoraSource, files: lora_files.Files, known: LoraState
    ) -> None:
        """Load an adapter anew whose source in the catalog entry changed, once no open request needs the old one."""
        adapter, fitted = instance.adapter, known.fitted
        if adapter is None or fitted is None or name in self._needed(adapter):
            return
        log.info("LoRA %s of %s has another source now", name, instance.name)
        del instance.loras[name]
        instance.memory_bytes -= fitted.nbytes
        self._enqueue(instance, name, source, files, (name, fitted))

    def _needed(self, adapter: Adapter) -> set[str]:
        """Names of the LoRA adapters that open requests of a model need."""
        return {job.call.lora for job in self._book.jobs() if job.adapter is adapter}

    def _enqueue(
        self,
        instance: Instance,
        name: str,
        source: LoraSource,
        files: lora_files.Files,
        evicted: tuple[str, FittedLora] | None = None,
    ) -> None:
        """Begin a load, if there is a place for it; `evicted` is what has left for it already."""
        adapter = instance.adapter
        if adapter is None:
            return
        if evicted is None and sum(lora.state != "failed" for lora in instance.loras.values()) >= self._most:
            evicted = self._make_place(instance, adapter)
            if evicted is None:
                return
        state = instance.loras[name] = LoraState(files, instance.entry.loras.get(name))
        self._due.append(_Load(instance, adapter, name, source, state, evicted))
        if self._running < (1 if self._crashes.suspects else self._threads):
            self._running += 1
            # PERF: a thread of its own, whose OpenMP team ends with it.
            vital_thread(f"load-lora-{name}", self._load_due).start()
        self._states.announce(instance)

    def _make_place(self, instance: Instance, adapter: Adapter) -> tuple[str, FittedLora] | None:
        """Forget the adapter that was used longest ago, of those that no open request needs; one that leaves first."""
        needed = self._needed(adapter)
        idle = [
            (lora.state == "loaded", lora.last_used, name, lora.fitted)
            for name, lora in instance.loras.items()
            if lora.fitted is not None and name not in needed
        ]
        if not idle:
            _end_a_turn(instance, time.monotonic())
            return None
        _, _, name, fitted = min(idle, key=lambda each: each[:2])
        log.info("LoRA %s of %s leaves for another one", name, instance.name)
        del instance.loras[name]
        instance.memory_bytes -= fitted.nbytes
        return name, fitted

    def _load_due(self) -> None:
        """Load what is due until nothing is."""
        while True:
            with self._states.lock:
                if not self._due:
                    self._running -= 1
                    return
                load = self._due.popleft()
            self._load(load)
            # NOTE: a thread that waits must not keep the model in memory.
            del load

    def _load(self, load: _Load) -> None:
        layers = load.adapter.loras
        if layers is not None and load.evicted is not None:
            self._run(partial(layers.remove, *load.evicted))
        found = self._attempt(load.adapter, load.instance.entry, load.name, load.source)
        with self._states.lock:
            load.state.end(found, time.monotonic())
            if load.instance.loras.get(load.name) is load.state:
                load.instance.memory_bytes += load.state.nbytes
            self._states.announce(load.instance)

    def load_first(self, instance: Instance, adapter: Adapter) -> None:
        """Load the adapters that profiles of a model name; on its loading thread, before anybody can use it."""
        if adapter.loras is None:
            return
        for name in _named(instance.entries)[: self._most]:
            source = lora_files.find(instance.entry, self._dirs, name)
            if source is None:
                log.warning(
                    "model %s: a profile names the LoRA %s, which does not exist", instance.name, name
                )
                continue
            state = instance.loras[name] = LoraState(
                lora_files.state_of(source), instance.entry.loras.get(name)
            )
            state.end(self._attempt(adapter, instance.entry, name, source), time.monotonic())

    def _attempt(
        self, adapter: Adapter, entry: ModelEntry, name: str, source: LoraSource
    ) -> FittedLora | LoadFailure:
        """One load and its outcome. One that this process died of twice is not tried again for a while."""
        began, mark = time.monotonic(), f"{entry.id} {name}"
        verdict = self._crashes.verdict(mark)
        if verdict is not None:
            return verdict
        self._crashes.begin(mark)
        try:
            fitted = self._fitted(adapter, entry, name, source)
        except Exception as error:
            found = failure.classify(error)
            text = "LoRA %s of %s failed to load: %s: %s"
            log.warning(text, name, entry.id, found.error_class, found.message)
            return found
        finally:
            self._crashes.end(mark)
        log.info("LoRA %s of %s loaded in %.1f s", name, entry.id, time.monotonic() - began)
        return fitted

    def _fitted(self, adapter: Adapter, entry: ModelEntry, name: str, source: LoraSource) -> FittedLora:
        """An adapter that is installed and proven: the canned inferences run all its layers and give finite values."""
        layers = adapter.loras
        assert layers is not None
        fitted = layers.fit(lora_files.fetch(source))
        self._run(partial(_install, layers, adapter, entry, name, fitted))
        return fitted


def _end_a_turn(instance: Instance, now: float) -> None:
    """All adapters are needed: the one that came first takes nothing new, unless one leaves already."""
    loras = [lora for lora in instance.loras.values() if lora.state in ("loaded", "leaving")]
    oldest = min(loras, key=lambda lora: lora.since, default=None)
    if oldest is None or any(lora.state == "leaving" for lora in loras):
        return
    if now - oldest.since >= TURN_S:
        oldest.move("leaving", now)


def _install(layers: LoraLayers, adapter: Adapter, entry: ModelEntry, name: str, fitted: FittedLora) -> None:
    layers.install(name, fitted)
    try:
        with layers.traced(name):
            prove(adapter, entry)
    except BaseException:
        layers.remove(name, fitted)
        raise


def _named(entries: list[ModelEntry]) -> list[str]:
    """Names of the adapters that runtime options of these entries name, each once."""
    found = [entry.runtime.get("lora") or entry.runtime.get("lora_id") for entry in entries]
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))
