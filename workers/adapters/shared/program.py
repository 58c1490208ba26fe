"""Bases of the families that run programs over named tensors.

A family defines `config` and `infer`; `ProgramAdapter` defines the other methods of `Adapter`. The operation
`workers.operations.infer` checks and prepares requests. `RepositoryProgram` adds the device and the warm-up inputs of
programs in a model repository.

Marks of what a program keeps between two runs (`marks`) tell whether a run has changed something.
"""

from __future__ import annotations

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from ipc.catalog.model_config import ROW_COST, ModelConfig, Warmup, WarmupInput
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.wire.messages import Call, InputItem, TensorInput, TensorOutput
from workers.adapters.base import Adapter, Gathering, ItemFailure, LoadContext, Prepared
from workers.adapters.shared.named_tensors import Array, NamedBatch, Signature
from workers.adapters.shared.slot_batch import SlotBatch
from workers.repository import configuration, layout
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

Sample = dict[str, np.ndarray]

WARMUP = "warmup"
"""Directory of warm-up files, below the directory of the model."""
MOST_WARMUP_BYTES = 1 << 30
SEED = 20240607
FINDING = "joining"
"""Parameter of a told configuration that says why requests are not joined, or are joined without proof."""


class ProgramAdapter(Adapter):
    """One loaded program; `spec.operations` is `("infer",)`."""

    allowed: tuple[list[TensorInput], list[TensorOutput], int] | None = None
    """Inputs, outputs and rows of the last call that the configuration allowed."""
    tries_rows: ClassVar[bool] = True
    """Whether a load tries if requests may be joined (`workers.lifecycle.row_trials`)."""
    joins: bool = True
    """Whether requests may share a batch, if there is a batch dimension; a load sets this before the first request."""
    finding: str = ""
    """What the trial of a load found against joined requests, told with the configuration."""

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """Inputs and outputs; always the same object."""

    @abstractmethod
    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch; see `Adapter.infer`."""

    @property
    def told_config(self) -> ModelConfig:
        """The configuration with the finding of the load among its parameters."""
        if not self.finding and FINDING not in self.config.parameters:
            return self.config
        parameters = {name: text for name, text in self.config.parameters.items() if name != FINDING}
        if self.finding:
            parameters[FINDING] = self.finding
        return msgspec.structs.replace(self.config, parameters=parameters)

    def kept_state(self) -> object:
        """Stands for what a run may change in the program; equal values as long as nothing has changed."""
        return None

    @functools.cached_property
    def signature(self) -> Signature:
        """The configuration, prepared for checks of requests."""
        return Signature(self.config)

    @functools.cached_property
    def gathering(self) -> Gathering | None:  # type: ignore[override]
        """From dynamic batching with a delay or preferred sizes; None for requests that run alone."""
        batching = self.config.dynamic_batching
        if (
            self.streams
            or not self.joins
            or batching is None
            or not (batching.max_queue_delay_us or batching.preferred_batch_sizes)
        ):
            return None
        preferred = tuple(ROW_COST * rows for rows in sorted(batching.preferred_batch_sizes))
        full = preferred[-1] if preferred else ROW_COST * self.config.max_batch_size
        return Gathering(batching.max_queue_delay_us * 1000, full, preferred)

    @functools.cached_property
    def batch_tokens(self) -> int | None:  # type: ignore[override]
        """Cost of `max_batch_size` rows; one request where requests run alone or there is no batch dimension."""
        if self.streams or not self.joins:
            return 1
        return ROW_COST * max(1, self.config.max_batch_size)

    @functools.cached_property
    def streams(self) -> bool:  # type: ignore[override]
        """Decoupled programs answer in parts."""
        return self.config.decoupled

    @property
    def max_sequence_length(self) -> int:
        """Programs have none."""
        return 0

    @property
    def dims(self) -> dict[str, int]:
        """No vectors; outputs are in `config`."""
        return {}

    def samples(self) -> list[Sample]:
        """Inputs to run once after a load, in the shapes of a request, rows included.

        Samples belong to no sequence. A sample that raises fails the load only with `samples_must_run`.
        """
        return [zeros(self.config)]

    @property
    def samples_must_run(self) -> bool:
        """Whether every sample suits the model. Those of a warm-up do, zeros may not."""
        return False

    def refuse_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Raise `InvalidInput` for values of one request that the program cannot take.

        Arrays have the shapes of the program. Called before the request joins a batch, on any preparing thread.
        """

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Programs take no items."""
        raise InvalidInput("this model takes named tensors only")

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """A `NamedBatch` of the prepared requests, which joins arrays on demand.

        Raises `ValueError` for several requests with more rows in all than the program takes.
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
    """One row of zeros (empty texts for BYTES) for every required input; a dimension of any size is 1."""
    sample: Sample = {}
    for tensor in config.inputs:
        if tensor.optional:
            continue
        shape = [1] * config.batches + [max(dim, 1) if dim < 0 else dim for dim in tensor.dims]
        if tensor.datatype == BYTES:
            sample[tensor.name] = np.full(shape, b"", dtype=object)
        else:
            sample[tensor.name] = np.zeros(shape, dtype=DATATYPES[tensor.datatype].array)
    return sample


def entry_of(context: LoadContext) -> RepositoryEntry:
    """The repository entry of a load. Raises `ModelRefused` for a model of the catalog."""
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
        """The configuration file, completed by the program."""
        return self._config

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights; 0 where unknown."""
        return 0

    def samples(self) -> list[Sample]:
        """Inputs of the warm-up, or zeros without a warm-up. Raises `ModelRefused`."""
        warmups, config = self.config.warmups, self.config
        samples = [sample for warmup in warmups for sample in _samples(self._directory, warmup, config)]
        return samples or [zeros(config)]

    @property
    def samples_must_run(self) -> bool:
        """True with a warm-up."""
        return bool(self.config.warmups)


def _samples(directory: Path, warmup: Warmup, config: ModelConfig) -> list[Sample]:
    where = f"model_warmup {warmup.name[:200]!a}"
    rows = max(1, warmup.batch_size)
    sample: Sample = {}
    for name, given in warmup.inputs.items():
        declared = config.input(name)
        if declared is None or declared.datatype != given.datatype:
            raise ModelRefused(f"{where}: there is no input {name[:200]!a} of {given.datatype}")
        shape = (rows, *given.dims) if config.batches else given.dims
        sample[name] = _values(directory, where, shape, given)
    missing = [each.name for each in config.inputs if not each.optional and each.name not in sample]
    if missing:
        raise ModelRefused(f"{where}: input {missing[0][:200]!a} is missing")
    return [sample] * warmup.count


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
    """Raw values of one row in a file, repeated for every row."""
    path = layout.named_file(directory / WARMUP, given.file, f"{where}: input_data_file")
    layout.inside(directory, path, follow_links=False)
    data, count = configuration.read_bounded(path, MOST_WARMUP_BYTES), math.prod(given.dims)
    nbytes = DATATYPES[given.datatype].nbytes
    if nbytes and len(data) != count * nbytes:
        raise ModelRefused(f"{where}: {path.name} has {len(data)} bytes, expected {count * nbytes}")
    if nbytes:
        return np.broadcast_to(
            np.frombuffer(data, DATATYPES[given.datatype].array).reshape(given.dims), shape
        )
    row = np.empty(count, dtype=object)
    try:
        row[:] = [bytes(each) for each in datatypes.split(memoryview(data), count, path.name)]
    except InvalidInput as error:
        raise ModelRefused(f"{where}: {error.message}") from error
    return np.broadcast_to(row.reshape(given.dims), shape)


def mark(value: Any) -> object:
    """Equal for equal values: a checksum for a tensor, and the same for what lists and dictionaries hold."""
    if isinstance(value, torch.Tensor):
        return _mark_of_tensor(value.detach())
    if isinstance(value, dict):
        return tuple((key, mark(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(mark, value))
    return repr(value) if isinstance(value, (str, bytes, bool, int, float, type(None))) else ""


def marks(values: Iterable[Any]) -> tuple[object, ...]:
    """The mark of each value."""
    return tuple(map(mark, values))


def _mark_of_tensor(tensor: torch.Tensor) -> object:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), zlib.crc32(raw.numpy().data)
