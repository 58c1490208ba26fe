"""One load of a model: its files, room for them, the adapter, the proof on the device, the memory taken.

A program of named tensors is also tried: whether its requests may be joined, its samples, its state as in the file.

1. `row_trials` tries whether rows depend on their company. Sequences, streams and Python models are not tried.
2. A program whose configuration leaves `max_batch_size` to the program is joined only if rows are independent.
   Otherwise the program is loaded again, without a batch dimension. Programs of torch on CUDA are tried on the CPU.
3. A stated `max_batch_size` is obeyed. Requests of a program whose rows depend on each other are joined only if the
   configuration has `dynamic_batching`, as in Triton. Where a trial proves nothing they are joined.
4. A program that has changed its own state in a trial or a sample is loaded again, so that no trace is left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ipc.catalog.entries import QUANTIZED, AdapterSource, DirectorySource, HubSource, ModelEntry, gguf_of
from ipc.catalog.model_config import InstanceGroup
from ipc.catalog.reading import check_names
from ipc.settings import Settings
from ipc.wire import codec
from workers.adapters.base import Adapter, LoadContext
from workers.adapters.registry import BUILT_IN, building, resolve
from workers.adapters.shared.building import BUILDING, resolve_dtype, tensors_ahead
from workers.adapters.shared.program import ProgramAdapter
from workers.device.devices import Device, batch_tokens
from workers.device.findings import Findings, Proof, Values
from workers.lifecycle import fingerprint, memory_budget, model_states
from workers.lifecycle.instance import Instance, LoadAbandoned
from workers.lifecycle.proof import Run, prove
from workers.lifecycle.row_trials import Finding, try_rows
from workers.loading import reading, source
from workers.repository.entries import RepositoryEntry

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
BYTES_PER_S, DOWNLOADED_PER_S = 500e6, 50e6
"""Bytes a second from the disk and from the hub, for an estimate before the first load."""
_LOADS = "loads"
"""Findings of what loads took, in seconds."""
PYTHON, ONNX, CAUSAL = "python_model", "onnx", "causal"
_PHASES = {"download": (0.0, 0.4), "read": (0.4, 0.2), "tokenizer": (0.6, 0.0), "weights": (0.6, 0.3)}
_PHASES |= {"libraries": (0.6, 0.0), "linear layers": (0.9, 0.05), "proof of packed steps": (0.95, 0.05)}
Build = Callable[[ModelEntry], Adapter]
_STATEFUL = Finding("dependent", "the program keeps state of its own from one run to the next")


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
        self._instance.stage = phase
        now = time.monotonic()
        begins = phase != self._phase and now - self._began >= REPORT_EVERY_S
        if not begins and now - self._last < REPORT_EVERY_S:
            return
        self._last, self._phase = now, phase
        log.info("loading %s: %s %3.0f %%", self._instance.name, phase, fraction * 100)
        self._changed()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A proven adapter and its memory."""

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
        """Load the weights; `room(instance, nbytes)` returns once there is so much memory, or raises `NoRoom`.

        Raises any error, for `workers.loading.failure` to classify.
        """
        entry, progress = self._quantized(instance.entry), Progress(instance, changed)
        model_states.check_device(entry, self._device.torch, self._settings.worker_count)
        dtype = resolve_dtype(entry.precision or self._settings.worker.precision, self._device.torch)
        findings = Findings(self._settings.findings_root)
        facts = (entry.id, repr(entry.source), str(dtype), self._device.name)
        instance.began = time.monotonic()
        if not instance.load_s:
            instance.load_s = expected_s(entry, findings.read_as(_LOADS, facts, float) or 0.0)
            changed()
        directory = fetch(entry, progress)
        here = time.monotonic()
        program = entry.program if isinstance(entry, RepositoryEntry) else ""
        nbytes = memory_budget.estimate(directory, program, gguf_of(entry), dtype, _quantization(entry))
        instance.load_s = instance.load_s or 1.0 + nbytes / BYTES_PER_S
        room(instance, instance.known_bytes or nbytes)
        began, proof = self._meter.begin(), Proof(findings)
        try:
            watched = reading.unchanged(directory, (LoadAbandoned,), gguf=gguf_of(entry))
            with nullcontext() if _has_own_code(entry) else watched:
                adapter, values = build_proven(
                    entry, lambda entry: self._build(entry, directory, dtype, progress, proof), self._run
                )
                state = self._settings.state_root
                path = fingerprint.path_of(state, entry, directory, dtype, self._device.torch)
            if proof.values is not None:
                fingerprint.compare(proof.values, values, dtype, "the load gave whose proof is remembered")
            fingerprint.check(entry, values, dtype, path)
            tell_mapped(entry, directory)
            if adapter.identity:
                proof.keep(values)
        except BaseException:
            self._meter.abort()
            raise
        if (seconds := time.monotonic() - here) >= REPORT_EVERY_S:
            findings.write(_LOADS, facts, round(seconds, 1))
        return Loaded(adapter, self._meter.end(began, adapter))

    def _quantized(self, entry: ModelEntry) -> ModelEntry:
        """An entry of a model that generates text says itself how the settings quantise its weights."""
        precision = self._settings.worker.precision
        if entry.adapter != CAUSAL or entry.precision or entry.error or precision not in QUANTIZED:
            return entry
        return msgspec.structs.replace(entry, precision=precision)

    def _build(
        self, entry: ModelEntry, directory: Path, dtype: torch.dtype, progress: Progress, proof: Proof
    ) -> Adapter:
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
            quantization=_quantization(entry),
            findings=Findings(self._settings.findings_root),
            proof=proof,
        )
        plain = dtype == torch.float32 and context.device.type == "cpu" and not context.quantization
        with tensors_ahead(directory / context.gguf if plain and context.gguf else None) as ahead:
            return self._built(entry, replace(context, ahead=ahead))

    def _built(self, entry: ModelEntry, context: LoadContext) -> Adapter:
        directory, dtype = context.directory, context.dtype
        context.progress("libraries", 0.0)
        with BUILDING:
            family = resolve(entry.adapter, files=context.trust_remote_code)
        _check_names(entry, family.spec.options)
        if context.gguf and not family.spec.gguf:
            raise source.SourceError(
                f"source.gguf: the family {entry.adapter} reads no GGUF files", "UNKNOWN"
            )
        if context.quantization and not family.spec.quantizes:
            raise source.SourceError(
                f"precision: {context.quantization} is for models that generate text (adapter causal); {entry.adapter} "
                "takes float32, bfloat16 or float16",
                "UNKNOWN",
            )

        def identity() -> str:
            return fingerprint.identity_of(entry, directory, family, dtype, self._device.torch)

        before = identity()
        with BUILDING if family.spec.builds_alone else nullcontext(), building(entry.adapter):
            adapter = family.load(replace(context, identity=before))
        # NOTE: files that changed while they were read may be half old and half new, so nothing is kept by them.
        adapter.identity = before if identity() == before else ""
        codec.check_status(Instance([entry], state="loaded", adapter=adapter).status(entry, ""))
        check_widths(entry, adapter.dims)
        return adapter


def _quantization(entry: ModelEntry) -> str:
    """How the weights of an entry's linear layers stay quantised; empty for numbers."""
    return entry.precision if entry.precision in QUANTIZED else ""


def keeps_threads(entry: ModelEntry) -> bool:
    """Whether threads and processes that a load has started may serve the model later, with the priority of the load.

    Code of an operator may start any, and a session of onnxruntime starts the threads that run it.
    """
    return entry.adapter not in BUILT_IN or entry.adapter in (PYTHON, ONNX)


def _has_own_code(entry: ModelEntry) -> bool:
    """Whether a model is code of an operator, which may write files beside its own."""
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
    """Raise `SourceError` where the entry states another width than the model gives (`dims`, by output)."""
    for name, spec in entry.outputs.items():
        if name in dims and spec.dims not in (None, dims[name]):
            raise source.SourceError(
                f"outputs.{name}.dims: {spec.dims} is stated, the model gives {dims[name]}", "UNKNOWN"
            )


def expected_s(entry: ModelEntry, remembered_s: float = 0.0) -> float:
    """Seconds that the first load of a process may take; 0 if nothing is known.

    An earlier process remembers what a load took (`remembered_s`), a download left out. Otherwise the size of the
    weights here or in the hub tells.
    """
    where = entry.source
    if isinstance(entry, RepositoryEntry) or entry.error:
        return remembered_s
    try:
        if isinstance(where, HubSource):
            nbytes, missing = source.size_in_hub(where.repo, where.revision, where.gguf)
        elif isinstance(where, DirectorySource):
            nbytes, missing = memory_budget.estimate(Path(where.path), gguf=where.gguf), 0
        else:
            return remembered_s
    except Exception as error:
        log.info("the size of %s is not known before its load: %s", entry.id, type(error).__name__)
        return remembered_s
    built_s = remembered_s or (1.0 + nbytes / BYTES_PER_S if nbytes else 0.0)
    return built_s + missing / DOWNLOADED_PER_S


def fetch(entry: ModelEntry, progress: Callable[[str, float], None]) -> Path:
    """Local directory of a model's files, whatever its source; its weights have been read once.

    Raises `SourceError`, also for mistakes of a repository model or a catalog file.
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


def build_proven(entry: ModelEntry, build: Build, run: Run) -> tuple[Adapter, Values]:
    """Build an adapter and prove its numbers; `run` executes a function on the device thread. Raises any error."""
    adapter = build(entry)
    if not isinstance(adapter, ProgramAdapter):
        return adapter, prove(adapter, entry, run=run)
    return _ProgramLoad(entry, adapter, build, run).finish()


class _ProgramLoad:
    """The load of one program: trials of its rows, the proof, and another build after each that left a trace."""

    def __init__(self, entry: ModelEntry, adapter: ProgramAdapter, build: Build, run: Run) -> None:
        self._entry, self._build, self._run = entry, build, run
        self._adapter, self._state = adapter, adapter.kept_state()
        self._infers = isinstance(entry, RepositoryEntry) and entry.infers_batch

    def finish(self) -> tuple[Adapter, Values]:
        """The adapter, with its finding, and the values of its fingerprint."""
        finding = self._try() if _may_be_joined(self._adapter) else None
        if finding is not None and self._infers and finding.kind != "independent":
            assert isinstance(self._entry, RepositoryEntry)
            self._entry = msgspec.structs.replace(self._entry, default_batch=0)
            self._again()
        values = prove(self._adapter, self._entry, run=self._run)
        if self._adapter.kept_state() != self._state:
            log.info("model %s: %s; the program is loaded again", self._entry.id, _STATEFUL.words)
            self._again()
        if finding is not None:
            self._conclude(finding)
        return self._adapter, values

    def _try(self) -> Finding:
        tried: Adapter = self._build(_on_cpu(self._entry)) if self._may_break_device() else self._adapter
        assert isinstance(tried, ProgramAdapter)
        finding = try_rows(tried, self._run)
        return finding if tried.kept_state() == self._state else _STATEFUL

    def _may_break_device(self) -> bool:
        """Whether a value that becomes an index out of range would end the context of the device: torch on CUDA."""
        device = getattr(self._adapter, "device", torch.device("cpu"))
        return device.type == "cuda" and self._entry.adapter in ("torchscript", "torch_export")

    def _again(self) -> None:
        """Build the program again, with its state as in the file."""
        del self._adapter
        adapter = self._build(self._entry)
        assert isinstance(adapter, ProgramAdapter)
        self._adapter, self._state = adapter, adapter.kept_state()

    def _conclude(self, finding: Finding) -> None:
        """Apply the finding to batches, and log the consequence."""
        adapter, name, words = self._adapter, self._entry.id, finding.words
        if finding.kind == "independent":
            log.info("model %s: requests are joined, rows do not depend on each other (%s)", name, words)
            return
        if self._infers:
            text = f"requests run one at a time, as no configuration states a max_batch_size: {words}"
        elif finding.kind == "unknown":
            text = f"requests are joined as max_batch_size says, without proof that rows are independent: {words}"
        elif adapter.config.dynamic_batching is not None:
            text = f"requests are joined as dynamic_batching says, and change each other's results: {words}"
        else:
            adapter.joins = False
            text = (
                f"requests run one at a time; dynamic_batching in the configuration would join them: {words}"
            )
        adapter.finding = text
        log.warning("model %s: %s", name, text)


def _on_cpu(entry: ModelEntry) -> RepositoryEntry:
    assert isinstance(entry, RepositoryEntry)
    config = msgspec.structs.replace(entry.config, instance_groups=(InstanceGroup(kind="KIND_CPU"),))
    return msgspec.structs.replace(entry, config=config)


def _may_be_joined(adapter: ProgramAdapter) -> bool:
    config = adapter.config
    tried = adapter.tries_rows and not adapter.streams and config.sequence_batching is None
    return tried and config.max_batch_size > 1
