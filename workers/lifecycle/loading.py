"""One load: the files, room for them, the adapter, the proof on the device, the memory it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ipc.catalog.entries import AdapterSource, DirectorySource, HubSource, ModelEntry, check_names, gguf_of
from ipc.settings import Settings
from ipc.wire import codec
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.registry import BUILT_IN, resolve
from workers.adapters.shared.building import BUILDING, resolve_dtype
from workers.device.devices import Device, batch_tokens
from workers.device.findings import Findings
from workers.lifecycle import fingerprint, grouping, memory_budget, program_loads
from workers.lifecycle.instance import Instance, LoadAbandoned
from workers.loading import reading, source
from workers.repository.entries import RepositoryEntry

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
BYTES_PER_S, DOWNLOADED_PER_S = 500e6, 50e6
"""How fast weights come, from the disk and from the hub, for an estimate before the first load."""
PYTHON = "python_model"
_PHASES = {"download": (0.0, 0.4), "read": (0.4, 0.2), "tokenizer": (0.6, 0.0), "weights": (0.6, 0.3)}
_PHASES |= {"libraries": (0.6, 0.0), "linear layers": (0.9, 0.05), "proof of packed steps": (0.95, 0.05)}


class Progress:
    """Receives (phase, fraction) from a load, and notes it in the instance.

    The log has one line a second, and after the first second a line for the begin of each phase.
    """

    def __init__(self, instance: Instance, changed: Callable[[], None]) -> None:
        self._instance, self._changed = instance, changed
        self._began, self._last, self._phase = time.monotonic(), 0.0, ""

    def __call__(self, phase: str, fraction: float) -> None:
        """Report that `phase` is `fraction` (0 to 1) done. Raises `LoadAbandoned` when nobody wants the model."""
        if self._instance.abandoned:
            raise LoadAbandoned("nobody wants it any more")
        start, share = _PHASES.get(phase, (0.9, 0.1))
        self._instance.progress = max(self._instance.progress, start + share * fraction)
        now = time.monotonic()
        begins = phase != self._phase and now - self._began >= REPORT_EVERY_S
        if not begins and now - self._last < REPORT_EVERY_S:
            return
        self._last, self._phase = now, phase
        log.info("loading %s: %s %3.0f %%", self._instance.name, phase, fraction * 100)
        self._changed()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A proven adapter and what it takes."""

    adapter: Adapter
    memory_bytes: int


class Loader:
    """Loads instances; any number of threads may do so at the same time."""

    def __init__(self, settings: Settings, device: Device, run: Callable[[Callable[[], Any]], Any]) -> None:
        """`run` executes a function on the device thread."""
        self._settings, self._device, self._run = settings, device, run
        self._meter = memory_budget.Meter(device, run)

    def load(
        self, instance: Instance, room: Callable[[Instance, int], None], changed: Callable[[], None]
    ) -> Loaded:
        """Load the weights; `room(instance, nbytes)` returns when there is as much memory, or raises `NoRoom`.

        Raises whatever went wrong, for `workers.loading.failure` to classify.
        """
        entry, progress = instance.entry, Progress(instance, changed)
        grouping.check_device(entry, self._device.torch, self._settings.worker_count)
        if not instance.load_s:
            instance.load_s = expected_s(entry)
            changed()
        directory = fetch(entry, progress)
        dtype = resolve_dtype(entry.precision or self._settings.worker.precision, self._device.torch)
        program = entry.program if isinstance(entry, RepositoryEntry) else ""
        nbytes = memory_budget.estimate(directory, program, gguf_of(entry), dtype)
        instance.load_s = instance.load_s or 1.0 + nbytes / BYTES_PER_S
        room(instance, instance.known_bytes or nbytes)
        began = self._meter.begin()
        try:
            watched = reading.unchanged(directory, (LoadAbandoned,), gguf=gguf_of(entry))
            with nullcontext() if _has_own_code(entry) else watched:
                adapter, values = program_loads.load(
                    entry, lambda entry: self._build(entry, directory, dtype, progress), self._run
                )
                state = self._settings.state_root
                path = fingerprint.path_of(state, entry, directory, dtype, self._device.torch)
            fingerprint.check(entry, values, dtype, path)
            tell_mapped(entry, directory)
        except BaseException:
            self._meter.abort()
            raise
        return Loaded(adapter, self._meter.end(began, adapter))

    def _build(self, entry: ModelEntry, directory: Path, dtype: torch.dtype, progress: Progress) -> Adapter:
        tokens = batch_tokens(self._settings, self._device)
        context = LoadContext(
            directory=directory,
            model_id=entry.id,
            device=self._device.torch,
            dtype=dtype,
            max_sequence_length=entry.max_sequence_length,
            options={**entry.runtime, **entry.loadtime},
            progress=progress,
            trust_remote_code=self._settings.worker.trust_remote_code,
            repository=entry if isinstance(entry, RepositoryEntry) else None,
            batch_tokens=min(tokens, entry.max_batch_tokens or tokens),
            generation=self._settings.generation,
            free_bytes=lambda: memory_budget.free_bytes(self._settings, self._device),
            gguf=gguf_of(entry),
            findings=Findings(self._settings.findings_root),
        )
        progress("libraries", 0.0)
        with BUILDING:
            family = resolve(entry.adapter, files=context.trust_remote_code)
        _check_names(entry, family.spec.options)
        if context.gguf and not family.spec.gguf:
            raise source.SourceError(
                f"source.gguf: the family {entry.adapter} reads no GGUF files", "UNKNOWN"
            )

        def identity() -> str:
            return fingerprint.identity_of(entry, directory, family, dtype, self._device.torch)

        before = identity()
        with BUILDING if family.spec.builds_alone else nullcontext():
            adapter = family.load(replace(context, identity=before))
        # NOTE: files that changed while they were read may be half old and half new, so nothing is kept by them.
        adapter.identity = before if identity() == before else ""
        codec.check_status(Instance([entry], state="loaded", adapter=adapter).status(entry, ""))
        check_widths(entry, adapter.dims)
        return adapter


def _has_own_code(entry: ModelEntry) -> bool:
    """Whether the files of a model are those of an operator's code, which may write beside itself."""
    return isinstance(entry.source, AdapterSource) or entry.adapter == PYTHON


def _check_names(entry: ModelEntry, known: tuple[str, ...]) -> None:
    """Raise `SourceError` for options that an adapter which is no family does not list, where it lists any."""
    if not known or entry.adapter in BUILT_IN:
        return
    try:
        check_names(entry.runtime, "runtime", known)
        check_names(entry.loadtime, "loadtime", known)
    except ValueError as error:
        raise source.SourceError(str(error), "UNKNOWN") from error


def tell_mapped(entry: ModelEntry, directory: Path) -> None:
    """Warn of files that the library of a model maps in spite of `workers.loading.reading`."""
    for path in reading.mapped_files(directory, gguf_of(entry)):
        text = "model %s: its library maps %s: never write to the file, replace the file by a rename"
        log.warning(text, entry.id, path.name)


def check_widths(entry: ModelEntry, dims: Mapping[str, int]) -> None:
    """Raise `SourceError` where the entry states another width than `dims`, those that the model gives by output."""
    for name, spec in entry.outputs.items():
        if name in dims and spec.dims not in (None, dims[name]):
            raise source.SourceError(
                f"outputs.{name}.dims: {spec.dims} is stated, the model gives {dims[name]}", "UNKNOWN"
            )


def expected_s(entry: ModelEntry) -> float:
    """What a first load may take, by the size of the weights on this machine or in the hub; 0 where nobody says it."""
    where = entry.source
    if isinstance(entry, RepositoryEntry) or entry.error:
        return 0.0
    try:
        if isinstance(where, HubSource):
            nbytes, missing = source.size_in_hub(where.repo, where.revision, where.gguf)
        elif isinstance(where, DirectorySource):
            nbytes, missing = memory_budget.estimate(Path(where.path), gguf=where.gguf), 0
        else:
            return 0.0
    except Exception as error:
        log.info("the size of %s is not known before its load: %s", entry.id, type(error).__name__)
        return 0.0
    return 1.0 + nbytes / BYTES_PER_S + missing / DOWNLOADED_PER_S if nbytes else 0.0


def fetch(entry: ModelEntry, progress: Callable[[str, float], None]) -> Path:
    """Local directory of a model's files, whatever its source; its weights have been read once.

    Raises `SourceError`, also for what is wrong with a repository model or with a catalog file.
    """
    where = entry.source
    if entry.error:
        raise source.SourceError(entry.error, "UNKNOWN")
    if isinstance(entry, RepositoryEntry):
        return Path(entry.directory) / str(entry.version)
    if isinstance(where, HubSource):
        directory = source.from_hub(
            where.repo,
            where.revision,
            progress,
            extra_files=where.files,
            tokenizer_repo=where.tokenizer_repo,
            gguf=where.gguf,
        )
    elif isinstance(where, AdapterSource):
        return Path(where.path)
    elif isinstance(where, DirectorySource):
        directory = source.from_directory(where.path, where.gguf)
    else:
        directory = source.from_package(where.package, where.path, where.gguf)
    source.read_ahead(directory, progress, where.gguf)
    return directory
