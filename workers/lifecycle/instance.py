"""What is loaded on this worker: sets of weights (`Instance`), and LoRA adapters as children of one (`LoraAdapter`).

Both have one life cycle (`LifeCycle`):

available ──► loading ──► loaded ──► unloading ──► available
              │     └───► failed ──► loading, or available when its time has come
              └─────────► available: nobody wants the load any more, or there is no room

An unloading model takes no new requests and finishes the present ones. A child ends with its parent.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field

from ipc.catalog.entries import LoraSource, ModelEntry
from ipc.wire.messages import ModelStatus
from workers.adapters.base import Adapter, Held
from workers.adapters.shared.lora import FittedLora
from workers.loading.failure import LoadFailure
from workers.loading.lora_files import Files

NEXT = {
    "available": frozenset({"loading"}),
    "loading": frozenset({"loaded", "failed", "available"}),
    "loaded": frozenset({"unloading"}),
    "unloading": frozenset({"available"}),
    "failed": frozenset({"loading", "available"}),
}
_serials = itertools.count(1)


class WrongTransition(Exception):
    """A model or an adapter left a state by a way that the life cycle does not have: a bug."""


class LoadAbandoned(Exception):
    """The load was given up, since no request, setting or operator wants the model any more."""


class NoRoom(Exception):
    """The model does not fit beside the others. No request has asked for the model, so no other model goes for it."""


@dataclass(slots=True, eq=False, kw_only=True)
class LifeCycle:
    """The states of a model or of an adapter.

    Instants are time.monotonic() seconds: at `since` the state changed last, at `retry_at` a failure may be forgotten
    (None: never by itself), at `drained_by` open requests are failed. `demanded` is false while only the start asked
    for the load. `failure` is the error of the last load, until a load succeeds.
    """

    serial: int = field(default_factory=lambda: next(_serials))
    state: str = "available"
    since: float = 0.0
    last_used: float = 0.0
    attempts: int = 0
    demanded: bool = False
    failure: LoadFailure | None = None
    retry_at: float | None = None
    unload_reason: str = ""
    drained_by: float = math.inf

    @property
    def name(self) -> str:
        """The name, unique among the models and adapters that this worker loads."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """The name in the log."""
        return f"model {self.name}"

    def move(self, state: str) -> None:
        """Enter the next state. Raises `WrongTransition`."""
        if state not in NEXT[self.state]:
            raise WrongTransition(f"{self.name}: {self.state} to {state}")
        self.state, self.since = state, time.monotonic()

    def begin(self, demanded: bool) -> None:
        """A load is due."""
        self.move("loading")
        self.attempts += 1
        self.demanded, self.retry_at = demanded, None

    def loaded(self, now: float) -> None:
        """The load ended well."""
        self.move("loaded")
        self.last_used, self.failure = now, None

    def fail(self, failure: LoadFailure, now: float) -> None:
        """The load ended badly."""
        self.move("failed")
        self.failure = failure
        self.retry_at = None if failure.retry_after_s is None else now + failure.retry_after_s

    def drain(self, reason: str, until: float) -> None:
        """Take no new requests; the present ones may go on until `until`."""
        self.move("unloading")
        self.unload_reason, self.drained_by = reason, until

    def rest(self) -> None:
        """No memory is held any more."""
        self.move("available")
        self.failure = None


@dataclass(slots=True, eq=False)
class LoraAdapter(LifeCycle):
    """One LoRA adapter of a model, known to requests as `key`.

    A failed adapter is not read again while its files are the same as then (`files`), unless `retry_at` has come.
    `named` is the source that the catalog entry gave, None for an adapter that was found in a directory. `due` marks an
    adapter in line that the model has a place for: its load begins when a thread is free, without another request.
    """

    parent: Instance
    key: str
    source: LoraSource
    files: Files
    named: LoraSource | None = None
    fitted: FittedLora | None = None
    due: bool = False

    @property
    def name(self) -> str:
        """The model's name and the adapter's."""
        return f"{self.parent.name} {self.key}"

    @property
    def title(self) -> str:
        """The name in the log."""
        return f"LoRA {self.key} of {self.parent.name}"

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, once they are loaded."""
        return 0 if self.fitted is None else self.fitted.nbytes

    @property
    def told(self) -> str:
        """The state for frontends; "" if frontends are told none, so that the next request asks for a load again."""
        if self.state == "available":
            return "loading" if self.due else ""
        return "" if self.state == "failed" else self.state

    def succeed(self, fitted: FittedLora, now: float) -> None:
        """The load ended well."""
        self.loaded(now)
        self.fitted = fitted


@dataclass(slots=True, eq=False)
class Instance(LifeCycle):
    """Weights, loaded or not. `entries` are the models that share them; the first says how to load.

    `reserved_bytes` is the expected memory of a load that runs, `own_bytes` the memory of the load without children,
    and `known_bytes` that of the last load with children. `load_s` is what the last load took or this one may take;
    `began` is the instant of time.monotonic() at which the load left the line, 0 before, and `stage` what it does.
    `abandoned` ends a load that nobody wants any more. `relieved` is set once a model was evicted because this load ran
    out of memory. `wanted` has the model loaded again as soon as the present load or unloading has ended without a
    loaded model. `loras` are the LoRA adapters by key; `dropped_loras` are weights of former adapters that the device
    thread has still to remove.
    """

    entries: list[ModelEntry]
    adapter: Adapter | None = None
    own_bytes: int = 0
    reserved_bytes: int = 0
    known_bytes: int = 0
    load_s: float = 0.0
    began: float = 0.0
    stage: str = ""
    progress: float = 0.0
    abandoned: bool = False
    relieved: bool = False
    wanted: bool = False
    loras: dict[str, LoraAdapter] = field(default_factory=dict)
    dropped_loras: list[tuple[str, FittedLora]] = field(default_factory=list)

    @property
    def entry(self) -> ModelEntry:
        """The model that says how to load."""
        return self.entries[0]

    @property
    def name(self) -> str:
        """The name of the model that says how to load."""
        return self.entry.id

    @property
    def memory_bytes(self) -> int:
        """Bytes that the weights take, children included; 0 until they are loaded."""
        return self.own_bytes and self.own_bytes + sum(lora.nbytes for lora in list(self.loras.values()))

    @property
    def held_bytes(self) -> int:
        """Bytes that count against the budget now."""
        return self.memory_bytes or self.reserved_bytes

    def begin(self, demanded: bool) -> None:
        """A load is due."""
        LifeCycle.begin(self, demanded)
        self.abandoned, self.relieved, self.wanted, self.progress = False, False, False, 0.0
        self.began, self.stage = 0.0, ""

    def succeed(self, adapter: Adapter, memory_bytes: int, seconds: float, now: float) -> None:
        """The load ended well and took `memory_bytes` without children."""
        self.loaded(now)
        self.adapter, self.own_bytes = adapter, memory_bytes
        self.known_bytes = self.memory_bytes
        self.reserved_bytes, self.load_s, self.wanted = 0, seconds, False

    def fail(self, failure: LoadFailure, now: float) -> None:
        """The load ended badly; children that were loaded with the model go as well."""
        LifeCycle.fail(self, failure, now)
        self.loras, self.dropped_loras = {}, []
        self.reserved_bytes, self.progress, self.wanted = 0, 0.0, False

    def rest(self) -> None:
        """Neither the model nor its children hold memory any more."""
        LifeCycle.rest(self)
        self.adapter, self.loras, self.dropped_loras = None, {}, []
        self.own_bytes, self.reserved_bytes, self.progress = 0, 0, 0.0

    @property
    def left_s(self) -> int:
        """Whole seconds that the load is still expected to take, at least 1; 0 without a load, or if nothing is known.

        For a load that takes longer than expected, the seconds are those of the part that is not done.
        """
        if self.state != "loading" or not self.load_s:
            return 0
        passed_s = time.monotonic() - self.began if self.began else 0.0
        return max(1, math.ceil(max(self.load_s - passed_s, passed_s * (1 - self.progress))))

    def drop_lora(self, lora: LoraAdapter) -> None:
        """A child has ended; the next load of a child has the device thread remove the weights."""
        if lora.fitted is not None:
            self.dropped_loras.append((lora.key, lora.fitted))
        del self.loras[lora.key]

    def status(self, entry: ModelEntry, device: str) -> ModelStatus:
        """The state of one of the models; models that share memory tell the memory once, with the first of them."""
        adapter, failure = self.adapter, self.failure
        is_loaded = self.state in ("loaded", "unloading") and adapter is not None
        return ModelStatus(
            entry.id,
            self.state,
            device=device if self.state in ("loading", "loaded", "unloading") else "",
            memory_bytes=self.memory_bytes if entry is self.entry else 0,
            max_sequence_length=adapter.max_sequence_length if is_loaded and adapter else 0,
            dims=adapter.dims if is_loaded and adapter else {},
            image_tokens=adapter.image_tokens if is_loaded and adapter else 0,
            progress=1.0 if self.state == "loaded" else self.progress,
            load_s=self.load_s,
            stage=self.stage if self.state == "loading" else "",
            left_s=self.left_s,
            error_class=failure.error_class if failure else "",
            error_message=failure.message if failure else "",
            attempts=self.attempts,
            permanent=failure.permanent if failure else False,
            uses=sorted(adapter.uses) if is_loaded and adapter else [],
            labels=list(adapter.own_labels) if is_loaded and adapter else [],
            config=adapter.told_config if is_loaded and adapter else None,
            loras={key: lora.told for key, lora in list(self.loras.items()) if lora.told},
            revision=entry.code,
            max_sequences=adapter.engine.max_sequences if is_loaded and adapter and adapter.engine else 0,
            identity=adapter.identity if is_loaded and adapter else "",
            tools=adapter.tools_shown if is_loaded and adapter else "",
            limited_by=adapter.limited_by if is_loaded and adapter else "",
            sees=adapter.sees if is_loaded and adapter else False,
            **(adapter.held if is_loaded and adapter else Held())._asdict(),
        )
