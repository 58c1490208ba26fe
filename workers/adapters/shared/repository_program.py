"""Base of the families whose programs come from a model repository: their device, and the inputs of their warm-up."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig, Warmup, WarmupInput
from ipc.catalog.repository import document, layout
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import ModelRefused
from ipc.errors import InvalidInput
from ipc.memory import bytes_elements
from ipc.memory.datatypes import BYTES, DATATYPES
from workers.adapters.base import LoadContext
from workers.adapters.shared.program import ProgramAdapter, Sample, zeros

WARMUP = "warmup"
"""Directory below the model's in which its warm-up files lie."""
MOST_WARMUP_BYTES = 1 << 30
SEED = 20240607


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
