"""The thread that keeps the models of a worker as they should be, and the threads that load.

1. It begins what is due, `worker.load_threads` at a time, each in a thread of its own.
2. It ends drains: the memory is given back once no request uses the model, or when `worker.unload_drain_s` is over.
3. Once a second it tries again what failed for a while, unloads what is idle or too much, and follows the files of the
   catalog.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ipc.catalog.entries import Catalog
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import ModelRefused
from ipc.catalog.repository.opening import open_catalog, tell_bad
from ipc.catalog.repository.overrides import Overrides
from ipc.catalog.repository.retaining import with_retained
from ipc.catalog.watch import EVERY_S, CatalogWatch
from ipc.errors import ConfigError, ModelNotLoaded, ProtocolError
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers.device.devices import Device
from workers.device.threads import vital_thread
from workers.lifecycle import accepted, memory, sharing
from workers.lifecycle.crashes import LoadMarks
from workers.lifecycle.instance import Instance
from workers.lifecycle.loading import LoadAbandoned, Loaded, Loader, NoRoom
from workers.lifecycle.loras import LoraLoader
from workers.lifecycle.shelf import Shelf
from workers.loading import failure
from workers.loading.source import DownloadFailed, SourceError
from workers.scheduling.jobs import JobBook

log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.02
RETIRE_AFTER_S = 3.0
"""How long a version stays whose place was taken: until then frontends have ceased to send requests for it."""


class Keeper:
    """Owns the keeper's thread and the loading threads of one worker."""

    def __init__(
        self,
        shelf: Shelf,
        settings: Settings,
        slot: int,
        catalog: Catalog,
        device: Device,
        run: Callable[[Callable[[], Any]], Any],
        book: JobBook,
        metrics: WorkerMetrics,
    ) -> None:
        """`catalog` is what the shelf serves; `run` executes a function on the device thread."""
        self._shelf, self._settings, self._device = shelf, settings, device
        self._book, self._metrics = book, metrics
        self._loader = Loader(settings, device, run)
        self.loras = LoraLoader(shelf, settings, slot, run, book)
        self._marks = LoadMarks(settings.paths.root / "loading", slot)
        self._overrides = Overrides(settings.paths.overrides())
        places = (settings.catalog.dirs, catalog.files, settings.repository.dirs, self._overrides)
        self._sources = catalog.sources
        self._watch = CatalogWatch(*places) if settings.catalog.watch else None
        self._wanted: Catalog | None = None
        """The catalog of the files, while more than that is served."""
        self._replaced_at = math.inf
        self._loading = 0
        self._heap = memory.Heap()
        self._next_look = 0.0
        self._closed = False
        self._thread = vital_thread("keeper", self._keep)

    def start(self) -> None:
        """Begin with what is due."""
        self._thread.start()

    def close(self) -> None:
        """Begin nothing more; loads that run end soon."""
        with self._shelf.lock:
            self._closed = True
            for instance in self._shelf.instances():
                instance.abandoned = True
            self._shelf.lock.notify_all()
        self._marks.close()
        self.loras.close()

    def _keep(self) -> None:
        while not self._closed:
            self._finish_drains()
            self._look()
            with self._shelf.lock:
                self._start_loads()
                draining = any(instance.state == "unloading" for instance in self._shelf.instances())
                if not self._closed:
                    self._shelf.lock.wait(DRAIN_LOOK_S if draining else EVERY_S)

    def _start_loads(self) -> None:
        most = self._settings.worker.load_threads
        while self._loading < most and (instance := self._shelf.next_due(self._may_begin)) is not None:
            verdict = self._marks.verdict(instance.name)
            if verdict is not None:
                log.error("model %s is not loaded: %s", instance.name, verdict.message)
                self._shelf.end(instance, partial(instance.fail, verdict, time.monotonic()))
                continue
            self._loading += 1
            self._marks.begin(instance.name)
            # PERF: a thread of its own, whose OpenMP team ends with it: idle teams would make the device thread's team
            # sleep between its steps.
            vital_thread(f"load-{instance.name}", partial(self._load, instance)).start()

    def _may_begin(self, instance: Instance) -> bool:
        return self._marks.may_begin(instance.name)

    def _load(self, instance: Instance) -> None:
        """One load, in a thread of its own."""
        began = time.monotonic()
        failed: failure.LoadFailure | None = None
        try:
            loaded = self._loader.load(instance, self._room, partial(self._shelf.progressed, instance))
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
        memory.give_back()
        self._not_loaded(instance, failed)

    def _loaded(self, instance: Instance, loaded: Loaded, seconds: float) -> None:
        log.info("model %s loaded on %s in %.1f s", instance.name, self._device.name, seconds)
        self._metrics.loads.labels(instance.name, self._metrics.worker, "loaded").inc()
        with self._shelf.lock:
            self._settle(instance)
            how = partial(instance.succeed, loaded.adapter, loaded.memory_bytes, seconds, time.monotonic())
            self._shelf.end(instance, how)
            # NOTE: a start reads which models were unloaded by name before it can be told of another unload.
            unwanted = not instance.demanded and self._shelf.was_unloaded(instance.entry)
            if (instance.abandoned or unwanted) and not self._closed:
                self._shelf.begin_unload(instance, "admin")

    def _not_loaded(self, instance: Instance, failed: failure.LoadFailure | None) -> None:
        with self._shelf.lock:
            self._settle(instance)
            if failed is None:
                self._shelf.end(instance, instance.rest)
                return
            self._metrics.loads.labels(instance.name, self._metrics.worker, "failed").inc()
            if failed.error_class == "OOM" and not (instance.relieved or instance.abandoned):
                instance.relieved = True
                if self._shelf.make_way(instance) or self._shelf.evict(1, "oom", last_may_go=True):
                    self._shelf.again(instance)
                    return
            self._shelf.end(instance, partial(instance.fail, failed, time.monotonic()))

    def _settle(self, instance: Instance) -> None:
        self._marks.end(instance.name)
        self._loading -= 1

    def _room(self, instance: Instance, nbytes: int) -> None:
        """Wait until the budget has room for a load, and make it; see `Loader.load`."""
        shelf = self._shelf
        with shelf.lock:
            instance.reserved_bytes = nbytes
            while not (self._closed or instance.abandoned):
                leaving = any(other.state == "unloading" for other in shelf.instances())
                excess = shelf.used_bytes() - shelf.budget.nbytes
                if excess <= 0 and not (instance.relieved and leaving):
                    return
                if not leaving and not shelf.make_way(instance):
                    if not instance.demanded and not shelf.is_pinned(instance):
                        raise NoRoom("it does not fit beside the others and no request has asked for it")
                    if not shelf.evict(excess, "memory", last_may_go=self._last_may_go(instance)):
                        return
                shelf.lock.wait(EVERY_S)
        raise LoadAbandoned("nobody wants it any more")

    def _last_may_go(self, instance: Instance) -> bool:
        """The last loaded model gives way when there would not be enough memory at all, or when another one comes."""
        coming = (i for i in self._shelf.instances() if i is not instance and i.state == "loading")
        return self._shelf.used_bytes() > self._shelf.budget.total_nbytes or any(
            i.reserved_bytes for i in coming
        )

    def _finish_drains(self) -> None:
        """Give back what nobody uses any more, and fail what is left when the time is up."""
        now, done = time.monotonic(), []
        with self._shelf.lock:
            busy = self._book.adapters()
            for instance in self._shelf.instances():
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
        memory.give_back()
        with self._shelf.lock:
            for instance in done:
                log.info("model %s is unloaded", instance.name)
                self._shelf.end(instance, instance.rest)

    def _look(self) -> None:
        """Once a second: what to try again, what is idle, memory, files."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + EVERY_S
        with self._shelf.lock:
            self._try_again(now)
            self._unload_idle(now)
            self._relieve()
        if not self._loading:
            self._heap.look()
        self._follow_catalog()

    def _try_again(self, now: float) -> None:
        """Failures whose time has come: models of the start, and those for which others still serve, are loaded again.

        All others are when somebody asks.
        """
        shelf = self._shelf
        for instance in shelf.instances():
            if instance.state == "failed" and instance.retry_at is not None and now >= instance.retry_at:
                awaited = shelf.is_preloaded(instance) or shelf.is_pinned(instance)
                if awaited or shelf.replaced_by(instance):
                    shelf.enqueue(instance, demanded=False)
                else:
                    shelf.end(instance, instance.rest)

    def _unload_idle(self, now: float) -> None:
        limit_s = self._settings.worker.idle_unload_s
        if not limit_s:
            return
        unused = [r for r in self._shelf.residents() if not (r.pinned or r.busy)]
        idle = {resident.serial for resident in unused if now - resident.last_used > limit_s}
        for instance in self._shelf.instances():
            if instance.serial in idle:
                self._shelf.begin_unload(instance, "idle")

    def _relieve(self) -> None:
        """Over the budget, or (when it is not set by hand) over its share of the device: the oldest one goes."""
        if any(instance.state in ("loading", "unloading") for instance in self._shelf.instances()):
            return
        worker = self._settings.worker
        by_hand, share = worker.memory_budget_bytes > 0, worker.memory_pressure_percent / 100
        excess = self._shelf.used_bytes() - self._shelf.budget.nbytes
        if excess > 0 or (not by_hand and memory.device_share(self._device) > share):
            self._shelf.evict(max(1, excess), "memory")

    def _follow_catalog(self) -> None:
        """Serve what the files say once they have changed. Whatever is wrong with them must not end the worker."""
        if self._watch is None:
            return
        chosen = self._settings.catalog
        try:
            if not self._watch.changed():
                self._retire_retained()
                return
            catalog = open_catalog(
                chosen, self._settings.repository, vanished_ok=True, overrides=self._overrides
            )
            tell_bad(catalog)
            catalog = catalog.keeping(self._sources)
            sharing.groups(catalog)
        except ConfigError as error:
            log.error("the changed catalog is refused, the old one stays: %s", error.message)
            return
        except (OSError, ValueError, RecursionError) as error:
            log.error("the catalog's files cannot be followed, the old catalog stays: %s", error)
            return
        self._watch.was_read(catalog.files)
        self._sources = catalog.sources
        log.info("the catalog changed: it has %d models now", len(catalog))
        accepted.keep(self._settings.paths.root, chosen, catalog)
        self._wanted, self._replaced_at = catalog, math.inf
        self.apply(self._with_retained(catalog))

    def _with_retained(self, catalog: Catalog) -> Catalog:
        """`catalog`, and versions that stay until one of those that it names can take their place."""
        hosts = dict(self._shelf.hosts)

        def is_loaded(name: str, revision: str) -> bool:
            host = hosts.get(name)
            return host is not None and host.adapter is not None and revision in ("", host.entry.code)

        return with_retained(catalog, (host.entry for host in hosts.values()), is_loaded)

    def _retire_retained(self) -> None:
        """Unload versions whose place has been taken, a while ago."""
        if self._wanted is None:
            return
        catalog, now = self._with_retained(self._wanted), time.monotonic()
        if self._shelf.hosts.keys() - catalog.keys():
            self._replaced_at = min(self._replaced_at, now)
            if now - self._replaced_at < RETIRE_AFTER_S:
                return
            self.apply(catalog)
        self._replaced_at = math.inf
        if catalog is self._wanted:
            self._wanted = None

    def apply(self, catalog: Catalog) -> None:
        """Serve this catalog: new models become available, removed and changed ones are unloaded.

        A changed model that is loaded at the start is loaded again at once, any other when somebody asks; so is a new
        one of a repository, and what is to replace one that still serves.
        """
        with self._shelf.lock:
            known = set(self._shelf.instances())
            replaced = self._shelf.take(catalog)
            new = (
                i
                for i in self._shelf.instances()
                if i not in known and (isinstance(i.entry, RepositoryEntry) or i.entry.error)
            )
            for instance in dict.fromkeys([*replaced, *new]):
                wanted = (
                    self._shelf.is_preloaded(instance)
                    or self._shelf.replaced_by(instance)
                    or instance.entry.error
                )
                if instance.state == "available" and wanted:
                    self._shelf.enqueue(instance, demanded=False)
            self._shelf.announce()
