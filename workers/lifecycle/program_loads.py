"""A load of a program of named tensors: whether its requests may be joined, its samples, and its state as in the file.

1. `row_trials` tries whether rows depend on their company. Sequences, streams and Python models are not tried.
2. A program whose configuration leaves `max_batch_size` to the program is joined only if rows are independent.
   Otherwise the program is loaded again, without a batch dimension. Programs of torch on CUDA are tried on the CPU.
3. A stated `max_batch_size` is obeyed. Requests of a program whose rows depend on each other are joined only if the
   configuration has `dynamic_batching`, as in Triton. Where a trial proves nothing they are joined.
4. A program that has changed its own state in a trial or a sample is loaded again, so that no trace is left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import torch

from ipc.catalog.entries import ModelEntry
from ipc.catalog.model_config import InstanceGroup
from workers.adapters.base import Adapter
from workers.adapters.shared.program import ProgramAdapter
from workers.lifecycle.proof import Values, prove
from workers.lifecycle.row_trials import Finding, Run, try_rows
from workers.repository.entries import RepositoryEntry

log = logging.getLogger(__name__)

Build = Callable[[ModelEntry], Adapter]
_STATEFUL = Finding("dependent", "the program keeps state of its own from one run to the next")


def load(entry: ModelEntry, build: Build, run: Run) -> tuple[Adapter, Values]:
    """Build an adapter and prove it; `run` executes a function on the device thread. Raises whatever went wrong."""
    adapter = build(entry)
    if not isinstance(adapter, ProgramAdapter):
        return adapter, run(lambda: prove(adapter, entry))
    return _Load(entry, adapter, build, run).finish()


class _Load:
    """The load of one program."""

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
        values = self._run(lambda: prove(self._adapter, self._entry))
        if self._adapter.kept_state() != self._state:
            log.info("model %s: %s; the program is loaded again", self._entry.id, _STATEFUL.words)
            self._again()
        if finding is not None:
            self._conclude(finding)
        return self._adapter, values

    def _try(self) -> Finding:
        if not self._may_break_device():
            found = try_rows(self._adapter, self._run)
            return found if self._adapter.kept_state() == self._state else _STATEFUL
        beside = self._build(_on_cpu(self._entry))
        assert isinstance(beside, ProgramAdapter)
        found = try_rows(beside, self._run)
        return found if beside.kept_state() == self._state else _STATEFUL

    def _may_break_device(self) -> bool:
        """Whether a value that becomes an index out of range would end the context of the device: torch on CUDA."""
        device = getattr(self._adapter, "device", torch.device("cpu"))
        return device.type == "cuda" and self._entry.adapter in ("torchscript", "torch_export")

    def _again(self) -> None:
        """Load the program anew."""
        del self._adapter
        adapter = self._build(self._entry)
        assert isinstance(adapter, ProgramAdapter)
        self._adapter, self._state = adapter, adapter.kept_state()

    def _conclude(self, finding: Finding) -> None:
        """Set what the finding means for batches, and say so."""
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
