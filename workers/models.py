"""The models of one worker: loading them, proving them, and saying in which state they are.

1. A loading thread takes the catalog in order. Each model goes available -> loading -> loaded or failed.
2. Loading reports bytes read; weights are safetensors only.
3. A model counts as loaded only after a canned inference on the device gave finite values.
4. A failure is classified: permanent ones stay, others are tried again after their cool-down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ipc.catalog import Catalog, DirectorySource, HubSource, ModelEntry
from ipc.errors import InferenceFailed
from ipc.messages import EncodeCall, InputItem, ModelStatus
from ipc.settings import Settings
from workers import device as devices
from workers.adapters.base import Adapter, ItemFailure, LoadContext
from workers.adapters.registry import resolve
from workers.adapters.shared.precision import resolve_dtype
from workers.loading import failure, source
from workers.operations import operation_of
from workers.threads import vital_thread

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class Host:
    """One model on this worker."""

    entry: ModelEntry
    status: ModelStatus
    adapter: Adapter | None = None
    retry_at: float | None = None


class ModelTable:
    """All models of the catalog on this worker."""

    def __init__(
        self,
        catalog: Catalog,
        settings: Settings,
        device: devices.Device,
        run: Callable[[Callable[[], Any]], Any],
        changed: Callable[[], None],
    ) -> None:
        """`run` executes a function on the device thread; `changed` is told of every new state."""
        self._settings, self._device, self._run, self._changed = settings, device, run, changed
        self._hosts = {name: Host(entry, ModelStatus(name, "available")) for name, entry in catalog.items()}
        self._wake = threading.Event()
        self._closed = False
        self.first_pass_done = False
        self._thread = vital_thread("loader", self._load_all)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def close(self) -> None:
        """Load nothing more."""
        self._closed = True
        self._wake.set()

    def find(self, name: str) -> Host | None:
        """The host of a model name."""
        return self._hosts.get(name)

    def statuses(self) -> list[ModelStatus]:
        """States of all models."""
        return [host.status for host in self._hosts.values()]

    def _load_all(self) -> None:
        while not self._closed:
            now = time.monotonic()
            for host in self._hosts.values():
                due = host.status.state == "available" or (host.retry_at is not None and now >= host.retry_at)
                if due and not self._closed:
                    # PERF: a thread of its own, whose OpenMP team ends with it: idle teams would make the device
                    # thread's team sleep between its steps.
                    thread = threading.Thread(target=self._load, args=(host,), name=f"load-{host.entry.id}")
                    thread.start()
                    thread.join()
            self.first_pass_done = True
            self._changed()
            pending = [host.retry_at for host in self._hosts.values() if host.retry_at is not None]
            self._wake.wait(max(0.1, min(pending) - time.monotonic()) if pending else None)

    def _load(self, host: Host) -> None:
        began = time.monotonic()
        attempts = host.status.attempts + 1
        host.retry_at = None
        progress = Progress(host, lambda: self._changed())
        self._set(host, ModelStatus(host.entry.id, "loading", device=self._device.name, attempts=attempts))
        try:
            adapter = self._build(host.entry, progress)
            self._run(lambda: prove(adapter, host.entry))
        except Exception as error:
            found = failure.classify(error)
            log.warning(
                "model %s failed to load: %s: %s",
                host.entry.id,
                found.error_class,
                found.message,
                exc_info=found.error_class == "UNKNOWN",
            )
            if found.retry_after_s is not None:
                host.retry_at = time.monotonic() + found.retry_after_s
            state = ModelStatus(
                host.entry.id,
                "failed",
                error_class=found.error_class,
                error_message=found.message,
                attempts=attempts,
                permanent=found.permanent,
            )
            self._set(host, state)
            return
        host.adapter = adapter
        seconds = time.monotonic() - began
        log.info("model %s loaded on %s in %.1f s", host.entry.id, self._device.name, seconds)
        loaded = ModelStatus(
            host.entry.id,
            "loaded",
            device=str(self._device.torch),
            memory_bytes=adapter.memory_bytes,
            max_sequence_length=adapter.max_sequence_length,
            dims=adapter.dims,
            progress=1.0,
            load_s=seconds,
            attempts=attempts,
        )
        self._set(host, loaded)

    def _build(self, entry: ModelEntry, progress: Progress) -> Adapter:
        directory = fetch(entry, progress)
        precision = entry.precision or self._settings.worker.precision
        context = LoadContext(
            directory=directory,
            model_id=entry.id,
            device=self._device.torch,
            dtype=resolve_dtype(precision, self._device.torch),
            max_sequence_length=entry.max_sequence_length,
            options={**entry.runtime, **entry.loadtime},
            progress=progress,
            trust_remote_code=self._settings.worker.trust_remote_code,
        )
        return resolve(entry.adapter).load(context)

    def _set(self, host: Host, status: ModelStatus) -> None:
        host.status = status
        self._changed()


class Progress:
    """Receives (phase, fraction) from a load, logs it once a second and puts it into the model's status."""

    def __init__(self, host: Host, changed: Callable[[], None]) -> None:
        self._host, self._changed = host, changed
        self._last = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        """Report that `phase` is `fraction` (0 to 1) done."""
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_S and fraction < 1.0:
            return
        self._last = now
        log.info("loading %s: %s %3.0f %%", self._host.entry.id, phase, fraction * 100)
        status = self._host.status
        self._host.status = ModelStatus(
            status.name, "loading", device=status.device, attempts=status.attempts, progress=fraction
        )
        self._changed()


def fetch(entry: ModelEntry, progress: Callable[[str, float], None]) -> Any:
    """Local directory of a model's files, whatever its source; its weights have been read once."""
    where = entry.source
    if isinstance(where, HubSource):
        directory = source.from_hub(where.repo, where.revision, progress)
    elif isinstance(where, DirectorySource):
        directory = source.from_directory(where.path)
    else:
        directory = source.from_package(where.package, where.path)
    source.read_ahead(directory, progress)
    return directory


def prove(adapter: Adapter, entry: ModelEntry) -> None:
    """Run a canned inference; raises `InferenceFailed` when it does not give finite values."""
    call = EncodeCall([InputItem(entry.proof)], list(adapter.dims))
    operation = operation_of(call)
    [prepared] = operation.prepare(adapter, call, 0, 1)
    if isinstance(prepared, ItemFailure):
        raise InferenceFailed(prepared.message)
    results = operation.run(adapter, adapter.collate([prepared]), call)
    if not all(results.finite([prepared.rows])):
        raise InferenceFailed("the canned inference did not give finite values")
