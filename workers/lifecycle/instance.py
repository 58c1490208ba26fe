"""One set of weights on this worker: its state, the models that share it, and what is told of it.

available ──► loading ──► loaded ──► unloading ──► available
              │     └───► failed ──► loading, or available when its time has come
              └─────────► available: nobody wants it any more, or there is no room
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from ipc.catalog.entries import LoraSource, ModelEntry
from ipc.wire.messages import ModelStatus
from workers.adapters.base import Adapter
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
    """The lifecycle of an instance was broken; a bug."""


@dataclass(slots=True, eq=False)
class LoraState:
    """One LoRA adapter of a loaded model: loading, loaded, leaving (it takes nothing new) or failed.

    `since` (the last change of state), `last_used` and `retry_at` are time.monotonic() seconds. A failed one is not
    read again while its files are the same as then (`files`), unless `retry_at` has come. `named` is the source that
    the catalog entry gave for it, None for one that was found in a directory.
    """

    files: Files
    named: LoraSource | None = None
    state: str = "loading"
    since: float = 0.0
    fitted: FittedLora | None = None
    last_used: float = 0.0
    failure: LoadFailure | None = None
    retry_at: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, once they are loaded."""
        return 0 if self.fitted is None else self.fitted.nbytes

    def end(self, found: FittedLora | LoadFailure, now: float) -> None:
        """The load has ended."""
        if isinstance(found, FittedLora):
            self.fitted, self.last_used = found, now
            self.move("loaded", now)
            return
        self.retry_at = None if found.retry_after_s is None else now + found.retry_after_s
        self.failure = found
        self.move("failed", now)

    def move(self, state: str, now: float) -> None:
        """Enter another state."""
        self.state, self.since = state, now


@dataclass(slots=True, eq=False)
class Instance:
    """Weights, or the place for them. `entries` are the models that share them; the first says how to load.

    `reserved_bytes` is what a load is expected to take while it runs, `memory_bytes` what it took, and `known_bytes`
    what the last load took. Instants are time.monotonic() seconds. `demanded` is false while only the start asked for
    the model; `abandoned` ends a load that nobody wants any more; `relieved` is set once something was evicted because
    this load ran out of memory. `wanted` says that it is to be loaded again as soon as what goes on now has ended
    without a loaded model. `failure` is that of the last load, until one succeeds. `loras` are its LoRA adapters
    by name; their bytes are part of `memory_bytes`.
    """

    entries: list[ModelEntry]
    serial: int = field(default_factory=lambda: next(_serials))
    state: str = "available"
    adapter: Adapter | None = None
    memory_bytes: int = 0
    reserved_bytes: int = 0
    known_bytes: int = 0
    last_used: float = 0.0
    load_s: float = 0.0
    progress: float = 0.0
    attempts: int = 0
    failure: LoadFailure | None = None
    retry_at: float | None = None
    demanded: bool = False
    abandoned: bool = False
    relieved: bool = False
    wanted: bool = False
    drained_by: float = 0.0
    unload_reason: str = ""
    loras: dict[str, LoraState] = field(default_factory=dict)

    @property
    def entry(self) -> ModelEntry:
        """The model that says how to load."""
        return self.entries[0]

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return self.entry.id

    @property
    def held_bytes(self) -> int:
        """What counts against the budget now."""
        return self.memory_bytes or self.reserved_bytes

    def move(self, state: str) -> None:
        """Enter the next state. Raises `WrongTransition`."""
        if state not in NEXT[self.state]:
            raise WrongTransition(f"{self.name}: {self.state} to {state}")
        self.state = state

    def begin(self, demanded: bool) -> None:
        """A load is due."""
        self.move("loading")
        self.attempts += 1
        self.demanded, self.abandoned, self.relieved, self.wanted = demanded, False, False, False
        self.progress, self.retry_at = 0.0, None

    def succeed(self, adapter: Adapter, memory_bytes: int, seconds: float, now: float) -> None:
        """The load ended well."""
        self.move("loaded")
        memory_bytes += sum(lora.nbytes for lora in self.loras.values())
        self.adapter, self.memory_bytes, self.known_bytes = adapter, memory_bytes, memory_bytes
        self.reserved_bytes, self.load_s, self.last_used, self.failure = 0, seconds, now, None
        self.wanted = False

    def fail(self, failure: LoadFailure, now: float) -> None:
        """The load ended badly."""
        self.move("failed")
        self.failure, self.reserved_bytes, self.progress, self.wanted = failure, 0, 0.0, False
        self.retry_at = None if failure.retry_after_s is None else now + failure.retry_after_s

    def drain(self, reason: str, until: float) -> None:
        """Nothing new is taken; what is there may go on until then."""
        self.move("unloading")
        self.unload_reason, self.drained_by = reason, until

    def rest(self) -> None:
        """Nothing is held any more."""
        self.move("available")
        self.adapter, self.failure, self.loras = None, None, {}
        self.memory_bytes, self.reserved_bytes, self.progress = 0, 0, 0.0

    def status(self, entry: ModelEntry, device: str) -> ModelStatus:
        """What is told of one of the models; its memory is told once, with the first of those that share it."""
        adapter, failure = self.adapter, self.failure
        loaded = self.state in ("loaded", "unloading") and adapter is not None
        return ModelStatus(
            entry.id,
            self.state,
            device=device if self.state in ("loading", "loaded", "unloading") else "",
            memory_bytes=self.memory_bytes if entry is self.entry else 0,
            max_sequence_length=adapter.max_sequence_length if loaded and adapter else 0,
            dims=adapter.dims if loaded and adapter else {},
            image_tokens=adapter.image_tokens if loaded and adapter else 0,
            progress=1.0 if self.state == "loaded" else self.progress,
            load_s=self.load_s,
            error_class=failure.error_class if failure else "",
            error_message=failure.message if failure else "",
            attempts=self.attempts,
            permanent=failure.permanent if failure else False,
            uses=sorted(adapter.uses) if loaded and adapter else [],
            config=adapter.config if loaded and adapter else None,
            loras={name: lora.state for name, lora in list(self.loras.items()) if lora.state != "failed"},
            revision=entry.code,
        )
