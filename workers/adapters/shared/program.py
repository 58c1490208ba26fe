"""Bases of the families that run programs over named tensors.

A family says its `config` and runs `infer`; what encode and its kin need is answered here. Requests are checked and
prepared by `workers.operations.infer`. `RepositoryProgram` is for programs that come from a model repository: their
device, and the inputs of their warm-up.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.catalog.model_config import ROW_COST, ModelConfig, Warmup, WarmupInput
from ipc.catalog.repository import document, layout
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import ModelRefused
from ipc.errors import InvalidInput
from ipc.memory import bytes_elements
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, Gathering, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.named_tensors import Array, NamedBatch, Signature
from workers.adapters.shared.slot_batch import SlotBatch

Sample = dict[str, np.ndarray]


WARMUP = "warmup"
"""Directory below the model's in which its warm-up files lie."""
MOST_WARMUP_BYTES = 1 << 30
SEED = 20240607


class ProgramAdapter(Adapter):
    """One loaded program; `spec.operations` is `("infer",)`."""

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """What the program takes and gives; the same object as long as the adapter lives."""

    @abstractmethod
    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch; see `Adapter.infer`."""

    @functools.cached_property
    def signature(self) -> Signature:
        """The configuration as requests are checked against it."""
        return Signature(self.config)

    @functools.cached_property
    def gathering(self) -> Gathering | None:  # type: ignore[override]
        """By dynamic batching, where that has a delay or preferred sizes; requests of a stream run alone."""
        batching = self.config.dynamic_batching
        if (
            self.streams
            or batching is None
            or not (batching.max_queue_delay_us or batching.preferred_batch_sizes)
        ):
            return None
        preferred = tuple(ROW_COST * rows for rows in sorted(batching.preferred_batch_sizes))
        full = preferred[-1] if preferred else ROW_COST * self.config.max_batch_size
        return Gathering(batching.max_queue_delay_us * 1000, full, preferred)

    @functools.cached_property
    def batch_tokens(self) -> int | None:  # type: ignore[override]
        """Those of the rows that the program takes; of a program without a batch dimension those of one request."""
        if self.streams:
            return 1
        return ROW_COST * max(1, self.config.max_batch_size)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        """Decoupled programs answer in parts."""
        return self.config.decoupled

    @property
    def max_sequence_length(self) -> int:
        """Programs have none."""
        return 0

    @property
    def dims(self) -> dict[str, int]:
        """Programs give no vectors of a known kind; their outputs are in `config`."""
        return {}

    def samples(self) -> list[Sample]:
        """Inputs to run once when the model was loaded, in the shapes that a request would have, rows included.

        They belong to no sequence. A sample that raises fails the load only when `samples_must_run`.
        """
        return [zeros(self.config)]

    @property
    def samples_must_run(self) -> bool:
        """Whether the samples are known to suit the model: those of its warm-up are, zeros may not be."""
        return False

    def refuse_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Raise `InvalidInput` for values of one request that the program cannot take.

        They are in the shapes of the program. Called before the request joins a batch, on any of the preparing threads.
        """

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Programs take no items."""
        raise InvalidInput("this model takes named tensors only")

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """A `NamedBatch` of the prepared requests; joining is left to who takes a tensor from it.

        Raises `ValueError` for several requests that have more rows together than the program takes.
        """
        requests, config = [item.payload for item in prepared], self.config
        rows, most = sum(request.rows for request in requests), max(1, config.max_batch_size)
        if len(requests) > 1 and rows > most:
            raise ValueError(
                f"{len(requests)} requests have {rows} rows, max_batch_size allows {most} in a batch"
            )
        if config.sequence_batching is not None:
            return SlotBatch(requests, [item.slot for item in prepared], config)
        return NamedBatch(requests, config)


def zeros(config: ModelConfig) -> Sample:
    """One row of zeros (empty texts for BYTES) for every input that is not optional; a dimension of any size is 1."""
    found: Sample = {}
    for tensor in config.inputs:
        if tensor.optional:
            continue
        shape = [1] * config.batches + [max(dim, 1) if dim < 0 else dim for dim in tensor.dims]
        if tensor.datatype == BYTES:
            found[tensor.name] = np.full(shape, b"", dtype=object)
        else:
            found[tensor.name] = np.zeros(shape, dtype=DATATYPES[tensor.datatype].array)
    return found


def entry_of(context: LoadContext) -> RepositoryEntry:
    """The repository entry of a load. Raises `ModelRefused` for a catalog model that names such a family."""
    if context.repository is None:
        raise ModelRefused("this family runs programs of a model repository only")
    return context.repository


class RepositoryProgram(ProgramAdapter):
    """A loaded program with its configuration and its device."""

    def __init__(self, entry: RepositoryEntry, config: ModelConfig, device: torch.device) -> None:
        self._config, self.device, self._directory = config, device, Path(entry.directory)

    @staticmethod
    def device_of(context: LoadContext) -> torch.device:
        """The worker's device; the CPU for a model whose instances are all of KIND_CPU."""
        groups = entry_of(context).config.instance_groups
        on_cpu = bool(groups) and all(group.kind == "KIND_CPU" for group in groups)
        return torch.device("cpu") if on_cpu else context.device

    @property
    def config(self) -> ModelConfig:
        """What the configuration file says, completed by the program."""
        return self._config

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights, where the family can tell."""
        return 0

    def samples(self) -> list[Sample]:
        """Those of the warm-up; without one, zeros. Raises `ModelRefused`."""
        warmups, config = self.config.warmups, self.config
        found = [sample for warmup in warmups for sample in _samples(self._directory, warmup, config)]
        return found or [zeros(config)]

    @property
    def samples_must_run(self) -> bool:
        """A warm-up must."""
        return bool(self.config.warmups)


def _samples(directory: Path, warmup: Warmup, config: ModelConfig) -> list[Sample]:
    where = f"model_warmup {warmup.name[:200]!a}"
    rows = max(1, warmup.batch_size)
    found: Sample = {}
    for name, given in warmup.inputs.items():
        declared = config.input(name)
        if declared is None or declared.datatype != given.datatype:
            raise ModelRefused(f"{where}: there is no input {name[:200]!a} of {given.datatype}")
        shape = (rows, *given.dims) if config.batches else given.dims
        found[name] = _values(directory, where, shape, given)
    missing = [each.name for each in config.inputs if not each.optional and each.name not in found]
    if missing:
        raise ModelRefused(f"{where}: input {missing[0][:200]!a} is missing")
    return [found] * warmup.count


def _values(directory: Path, where: str, shape: tuple[int, ...], given: WarmupInput) -> np.ndarray:
    known = DATATYPES[given.datatype]
    nbytes = math.prod(shape) * max(known.nbytes, 1)
    if nbytes > MOST_WARMUP_BYTES:
        raise ModelRefused(f"{where}: {nbytes} bytes are above {MOST_WARMUP_BYTES}")
    if given.data == "file":
        return _from_file(directory, where, shape, given)
    if given.datatype == BYTES:
        return np.full(shape, b"", dtype=object)
    if given.data == "zero":
        return np.zeros(shape, known.array)
    source = np.random.default_rng(SEED)
    if given.datatype == "BF16":
        return (source.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if np.dtype(known.array).kind == "f":
        return source.random(shape).astype(known.array)
    return source.integers(0, 2 if known.array == "bool" else 128, shape).astype(known.array)


def _from_file(directory: Path, where: str, shape: tuple[int, ...], given: WarmupInput) -> np.ndarray:
    """Raw values of a file, one row, repeated for every row."""
    path = layout.named_file(directory / WARMUP, given.file, f"{where}: input_data_file")
    layout.inside(directory, path, follow_links=False)
    data, count = document.read_bounded(path, MOST_WARMUP_BYTES), math.prod(given.dims)
    nbytes = DATATYPES[given.datatype].nbytes
    if nbytes and len(data) != count * nbytes:
        raise ModelRefused(f"{where}: {path.name} has {len(data)} bytes, expected {count * nbytes}")
    if nbytes:
        return np.broadcast_to(
            np.frombuffer(data, DATATYPES[given.datatype].array).reshape(given.dims), shape
        )
    row = np.empty(count, dtype=object)
    try:
        row[:] = [bytes(each) for each in bytes_elements.split(memoryview(data), count, path.name)]
    except InvalidInput as error:
        raise ModelRefused(f"{where}: {error.message}") from error
    return np.broadcast_to(row.reshape(given.dims), shape)
