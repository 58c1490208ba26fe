"""All models of one worker and their states, under one lock.

`ModelStates` knows which loads are due, which models hold memory, and which may go. The threads that load and unload
are in `lifecycle.models`. Methods that say so want the lock (`ModelStates.lock`) to be held. `find` and `touch` take no
lock, since they are called for every request and every batch.

The functions at the top tell which models of the catalog a worker offers, and which of them share one set of weights:

1. A repository model runs on the workers that the instance groups of its configuration name (`offers`). A worker has
   one instance of a model, whatever `count` says. KIND_GPU with `gpus` means the workers of these numbers, KIND_GPU
   without them every worker with a GPU, KIND_CPU the CPU of every worker, and anything else every worker.
2. A model and the variants of its profiles share weights (`groups`) when all that matters for a load is equal: source,
   adapter, precision, length, loadtime options, and runtime options. Runtime options that frontends or the family
   (`AdapterSpec.per_call`) resolve for each call may differ. Of a family that cannot be imported nothing is known to be
   resolved for each call; the load of the model tells why the import fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch

from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.reading import ALL, preloaded_names
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from ipc.wire.messages import ModelStatus
from workers import foreign
from workers.adapters.base import Adapter
from workers.adapters.registry import resolve
from workers.lifecycle import memory_budget
from workers.lifecycle.instance import Instance
from workers.lifecycle.memory_budget import Budget
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused
from workers.scheduling.job_table import JobTable

log = logging.getLogger(__name__)

_PER_REQUEST = ("instruction", "overflow_policy", "lora", "lora_id")
"""Runtime options that frontends resolve into each call, for all families."""
T = TypeVar("T")


def _load_facts(entry: ModelEntry, runtime: dict[str, Any]) -> bytes:
    base = entry.id.partition(":")[0]
    facts = (
        base,
        entry.source,
        entry.adapter,
        entry.precision,
        entry.max_sequence_length,
        entry.code,
        entry.error,
        entry.loadtime,
        runtime,
    )
    return msgspec.json.encode((*facts, entry.proof, entry.fingerprint), order="deterministic")


def _per_call(adapter: str) -> tuple[str, ...]:
    try:
        return resolve(adapter).spec.per_call
    except BaseException as raised:
        foreign.error_of(raised)
        return ()


def groups(catalog: Catalog | Iterable[ModelEntry]) -> dict[bytes, list[ModelEntry]]:
    """The entries by what their load depends on, in the order given."""
    entries = list(catalog.values() if isinstance(catalog, Catalog) else catalog)
    alike: dict[bytes, list[ModelEntry]] = {}
    for entry in entries:
        alike.setdefault(_load_facts(entry, {}), []).append(entry)
    sharing: dict[bytes, list[ModelEntry]] = {}
    for members in alike.values():
        differing = any(entry.runtime != members[0].runtime for entry in members)
        free = (*_PER_REQUEST, *_per_call(members[0].adapter)) if differing else ()
        for entry in members:
            bound = {name: value for name, value in entry.runtime.items() if name not in free}
            sharing.setdefault(_load_facts(entry, bound), []).append(entry)
    return sharing


def offers(entry: ModelEntry, slot: int, device: torch.device, workers: int) -> bool:
    """Whether the worker `slot` of `workers` offers a model. All offer a model that none can have, to tell why."""
    if not isinstance(entry, RepositoryEntry):
        return True
    return slot in entry.config.worker_slots(max(workers, slot + 1), device.type == "cpu")


def check_device(entry: ModelEntry, device: torch.device, workers: int) -> None:
    """Raise `ModelRefused` for a model that this worker offers only because no worker can have it."""
    if not isinstance(entry, RepositoryEntry):
        return
    groups = entry.config.instance_groups
    if groups and all(group.kind == "KIND_GPU" for group in groups) and device.type == "cpu":
        raise ModelRefused("instance_group: KIND_GPU, but the workers run on the CPU")
    gpus = entry.config.gpus
    if device.type != "cpu" and gpus and min(gpus) >= workers:
        raise ModelRefused(f"instance_group: gpus {sorted(gpus)}, but the workers are 0 to {workers - 1}")


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model of the catalog and the instance that serves the model; once `next` is loaded, `next` serves."""

    entry: ModelEntry
    instance: Instance
    next: ServedModel | None = None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter, when the model takes requests."""
        return self.instance.adapter if self.instance.state == "loaded" else None

    def status(self, device: str) -> ModelStatus:
        """The state of the model, as frontends are told."""
        status = self.instance.status(self.entry, device)
        if self.next is None:
            return status
        coming = self.next.instance
        failure = coming.failure if coming.state == "failed" else None
        return msgspec.structs.replace(
            status,
            next=self.next.entry.code,
            attempts=status.attempts + coming.attempts,
            error_class=failure.error_class if failure else "",
            error_message=failure.message if failure else "",
            permanent=failure.permanent if failure else False,
        )


class LoadLine(Generic[T]):
    """The loads that are due: first those that requests wait for, then those that only the start asked for."""

    def __init__(self) -> None:
        self._first: deque[T] = deque()
        self._later: deque[T] = deque()

    def add(self, item: T, first: bool) -> None:
        """Line up behind all others; with `first` before the loads that only the start asked for."""
        (self._first if first else self._later).append(item)

    def add_before_all(self, item: T) -> None:
        """Line up before all others."""
        self._first.appendleft(item)

    def promote(self, item: T) -> None:
        """A request waits for a load that only the start asked for. Any other load keeps its place."""
        if item in self._later:
            self._later.remove(item)
            self._first.append(item)

    def withdraw(self, item: T) -> bool:
        """Take a load out of the line; returns whether the load was in line."""
        line = next((line for line in (self._first, self._later) if item in line), None)
        if line is not None:
            line.remove(item)
        return line is not None

    def next(self, may_begin: Callable[[T], bool]) -> T | None:
        """Take the first load that may begin; `may_begin` may withdraw the load it is asked about."""
        for item in [*self._first, *self._later]:
            if may_begin(item):
                self.withdraw(item)
                return item
        return None


class ModelStates:
    """States of all models; the argument `changed` is called after every change."""

    def __init__(
        self,
        settings: Settings,
        budget: Budget,
        jobs: JobTable,
        metrics: WorkerMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._settings, self._jobs, self._metrics, self._tell = settings, jobs, metrics, changed
        self.changed: deque[str] = deque()
        """Names of models that may have new states; `ModelTable.changes` takes them out."""
        self.budget = budget
        self._explicit = settings.repository.control == "explicit"
        self.wishes = Wishes(settings.paths, Store(settings.paths))
        """Loads and unloads by name, which outlive this process."""
        self._unloaded: frozenset[str] = frozenset()
        """Models that were unloaded by name, at the last call of `follow_unloads`."""
        self.lock = threading.Condition(threading.RLock())
        self.served: dict[str, ServedModel] = {}
        self.offers: Callable[[ModelEntry], bool] = lambda entry: True
        """Whether this worker offers a model of the catalog."""
        self.untried: set[int] = set()
        """Serials of the instances that the start waits for."""
        self._by_facts: dict[bytes, Instance] = {}
        self._leaving: list[Instance] = []
        self.due: LoadLine[Instance] = LoadLine()
        self._preloaded: set[int] = set()

    def find(self, name: str) -> ServedModel | None:
        """The model of that name, None where there is none."""
        return self.served.get(name)

    def touch(self, name: str) -> None:
        """Note that a request uses the model now."""
        model = self.served.get(name)
        if model is not None:
            model.instance.last_used = time.monotonic()

    def instances(self) -> list[Instance]:
        """All instances, with those that hold memory although no model names them any more."""
        return [*list(self._by_facts.values()), *list(self._leaving)]

    def used_bytes(self) -> int:
        """Memory that is held or reserved."""
        return sum(instance.held_bytes for instance in self.instances())

    def is_preloaded(self, instance: Instance) -> bool:
        """Whether the settings, or a load by name, want an instance loaded at the start."""
        return instance.serial in self._preloaded

    def is_pinned(self, instance: Instance) -> bool:
        """Whether only an operator or a change of the catalog unloads an instance."""
        pinned = self._settings.catalog.pinned
        names = {entry.id for entry in instance.entries}
        return ALL in pinned or any(name in pinned or name.partition(":")[0] in pinned for name in names)

    def progressed(self, instance: Instance) -> None:
        """Tell the progress of a load to frontends."""
        self.changed.extend(entry.id for entry in instance.entries)
        self._tell()

    # What follows wants the lock.

    def was_unloaded(self, entry: ModelEntry) -> bool | None:
        """Whether an operator has unloaded a repository's model, which no request may have loaded then.

        None when the store cannot be read now.
        """
        if not self._explicit or not isinstance(entry, RepositoryEntry):
            return False
        try:
            return self.wishes.loaded(entry.model) is False
        except OSError as error:
            log.error("whether model %s was unloaded by name cannot be read: %s", entry.id, error.strerror)
            return None

    def follow_unloads(self) -> None:
        """Unload the models that were unloaded by name since the last call, as no frontend need have said so here.

        A frontend may die between the row and its messages, or not have joined this worker yet. Raises `OSError`.
        """
        if not self._explicit:
            return
        unloaded = self.wishes.unloaded()
        recent, self._unloaded = unloaded - self._unloaded, unloaded
        for name, model in list(self.served.items()):
            if isinstance(model.entry, RepositoryEntry) and model.entry.model in recent:
                self.unload(name)

    def unload(self, name: str) -> None:
        """Unload a model, or give up its load, by order of an operator; it is no longer one of the start."""
        model = self.find(name)
        for instance in [each.instance for each in (model, model and model.next) if each is not None]:
            self._preloaded.discard(instance.serial)
            if instance.state == "loaded":
                self.begin_unload(instance, "admin")
            elif instance.state == "loading":
                self.abandon(instance)
            else:
                instance.wanted = False

    def serve(self, catalog: Catalog) -> list[Instance]:
        """Serve this catalog from now on; returns the new instances of models that other instances served before.

        The loaded instance of a repository model goes on serving until the new one is loaded.
        """
        known, self._by_facts = self._by_facts, {}
        served: dict[str, ServedModel] = {}
        offered = [entry for entry in catalog.values() if self.offers(entry)]
        for facts, entries in groups(offered).items():
            instance = self._by_facts[facts] = known.pop(facts) if facts in known else Instance(entries)
            instance.entries = entries
            served.update({entry.id: ServedModel(entry, instance) for entry in entries})
        before = self.served
        self.served = {entry.id: _in_turn(before.get(entry.id), served[entry.id]) for entry in offered}
        self.changed.extend([*self.served, *(before.keys() - self.served.keys())])
        chosen = self._settings.catalog
        names = preloaded_names(catalog, chosen.preload, chosen.models, chosen.serve_all)
        if self._explicit:
            names = self.wishes.preloaded(names, catalog)
        self._preloaded = {served[name].instance.serial for name in names if name in served}
        serving = {model.instance for model in self.served.values()}
        for facts, instance in known.items():
            if instance in serving:
                self._by_facts[facts] = instance
            else:
                self._retire(instance)
        replaced = [
            model.instance
            for name, model in served.items()
            if name in before and before[name].instance is not model.instance
        ]
        return list(dict.fromkeys(replaced))

    def replaced_by(self, instance: Instance) -> list[Instance]:
        """The instances that serve until this one is loaded."""
        served = [h for h in self.served.values() if h.next is not None and h.next.instance is instance]
        return list(dict.fromkeys(model.instance for model in served))

    def make_way(self, instance: Instance) -> bool:
        """Unload the instances that `instance` replaces, since memory has no room for both. False if there are none.

        Until `instance` is loaded, no instance serves the model. So other models are unloaded for `instance`, if need
        be.
        """
        replaced = self.replaced_by(instance)
        instance.demanded = instance.demanded or bool(replaced)
        for other in replaced:
            self.begin_unload(other, "memory")
        return bool(replaced)

    def _retire(self, instance: Instance) -> None:
        if instance.state in ("loading", "loaded", "unloading"):
            self._leaving.append(instance)
        if instance.state == "loading":
            self.abandon(instance)
        elif instance.state == "loaded":
            self.begin_unload(instance, "catalog")

    def announce(self, *instances: Instance) -> None:
        """Tell frontends, soon, that the states of these instances changed."""
        for instance in instances:
            self.changed.extend(entry.id for entry in instance.entries)
        self._tell()
        self.lock.notify_all()

    def enqueue(self, instance: Instance, demanded: bool) -> None:
        """Put an instance in line for its load."""
        instance.begin(demanded)
        self.due.add(instance, first=demanded)
        self.announce(instance)

    def again(self, instance: Instance) -> None:
        """Put a load that has begun back in line, before all others."""
        self.due.add_before_all(instance)
        self.announce(instance)

    def promote(self, instance: Instance) -> None:
        """A request or an operator waits for a load that goes on, or that only the start asked for."""
        instance.demanded, instance.abandoned, instance.wanted = True, False, True
        self.due.promote(instance)
        self.lock.notify_all()

    def abandon(self, instance: Instance) -> None:
        """Nobody wants this load any more: the load ends now, or soon if it runs."""
        instance.abandoned, instance.wanted = True, False
        if self.due.withdraw(instance):
            self.end(instance, instance.rest)

    def end(self, instance: Instance, how: Callable[[], None]) -> None:
        """A load or an unloading has ended; `how` changes the state of the instance.

        An instance for which a request has asked meanwhile is loaded again, unless the catalog has lost the model.
        """
        how()
        self.untried.discard(instance.serial)
        if instance in self._leaving and instance.state != "loaded":
            self._leaving.remove(instance)
        elif instance.wanted and instance.state == "available":
            self.enqueue(instance, demanded=True)
        if instance.state == "loaded":
            for other in self.replaced_by(instance):
                self.begin_unload(other, "catalog")
        self.announce(instance)

    def begin_unload(self, instance: Instance, reason: str) -> None:
        """Take no new requests; the present ones are finished first. Reasons: admin, catalog, idle, memory, oom."""
        log.info("unloading %s (%s)", instance.name, reason)
        self._step_down(instance)
        instance.drain(reason, time.monotonic() + self._settings.worker.unload_drain_s)
        self._metrics.unloads.labels(instance.name, self._metrics.worker, reason).inc()
        if reason == "idle":
            self._metrics.sie_idle_evictions.labels(instance.name).inc()
        self.announce(instance)

    def _step_down(self, instance: Instance) -> None:
        """Hand the models of an instance to the instances that wait to serve them, loaded or not."""
        waiting = {n: h.next for n, h in self.served.items() if h.instance is instance and h.next is not None}
        if waiting:
            self.served |= waiting
            self._by_facts = {facts: i for facts, i in self._by_facts.items() if i is not instance}
            self._leaving.append(instance)

    def residents(self) -> list[memory_budget.Resident]:
        """The loaded instances with their last use, from which `memory_budget.order` chooses those that leave."""
        busy = self._jobs.adapters()
        return [
            memory_budget.Resident(
                i.serial, i.memory_bytes, i.last_used, self.is_pinned(i), id(i.adapter) in busy
            )
            for i in self.instances()
            if i.state == "loaded"
        ]

    def evict_idle(self, keep: ServedModel | None) -> Instance | None:
        """Begin to unload the model without work that was used longest ago, never `keep`; None if there is none."""
        spared = keep.instance.serial if keep is not None else 0
        idle = [r for r in memory_budget.order(self.residents()) if not r.busy and r.serial != spared]
        if not idle:
            return None
        chosen = next(instance for instance in self.instances() if instance.serial == idle[0].serial)
        self.begin_unload(chosen, "oom")
        return chosen

    def evict(self, excess_bytes: int, reason: str, *, last_may_go: bool = False) -> bool:
        """Begin to unload models to free so many bytes, or all that may go; returns whether there was one."""
        chosen = memory_budget.victims(self.residents(), excess_bytes, last_may_go=last_may_go)
        by_serial = {instance.serial: instance for instance in self.instances()}
        for resident in chosen:
            self.begin_unload(by_serial[resident.serial], reason)
        return bool(chosen)


def _in_turn(old: ServedModel | None, new: ServedModel) -> ServedModel:
    """A model served by its new instance, or by the old one until the new one is loaded."""
    if old is None or old.instance is new.instance or old.instance.state != "loaded":
        return new
    return ServedModel(old.entry, old.instance, new) if isinstance(new.entry, RepositoryEntry) else new
