"""What a `model.py` of a repository subclasses; operators import it as `penstock.model`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ipc.model_config import ModelConfig
from workers.adapters.shared.named_tensors import NamedBatch


@dataclass(frozen=True, slots=True)
class Context:
    """What a model may know: `directory` is that of its version, `device` the one to compute on."""

    name: str
    version: int
    directory: Path
    config: ModelConfig
    device: torch.device


class Model(ABC):
    """One version of a model; made when it is loaded, dropped when it is unloaded.

    `memory_bytes` is what its weights take, for the memory budget of the worker.
    """

    memory_bytes: int = 0

    def __init__(self, context: Context) -> None:
        """Load weights here; whatever is raised fails the load, and its first line is told to clients."""
        self.context = context

    @abstractmethod
    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch, always in the same thread; at least the outputs of `batch.outputs`.

        `batch.array(name)` is an input as a read-only array, `batch.tensor(name, device)` as a tensor: [rows, *dims] of
        all requests of the batch, [*dims] when `max_batch_size` is 0. BYTES are arrays of `bytes` objects, BF16 is its
        16 bits (uint16). `batch.sizes` are the rows of each request and `batch.parameters` its parameters. With
        `sequence_batching` there is a row for each slot, and the controls are inputs too (docs/sequences.md).
        Without it an input may lie in memory that the next request is written to: keep a copy, never the array itself.

        An output has the same rows and the datatype of the configuration: an array or a tensor on any device; BYTES an
        array of objects, `bytes` or `str`. What is raised fails the requests of the batch, whose halves are tried
        first (but not those of sequences); `ipc.errors.InvalidInput` tells its message to the client, anything else is
        only logged.
        """
