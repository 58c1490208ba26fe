"""What a `model.py` of a repository subclasses; operators import it as `penstock.model`.

`Model` gives one response to each request, `DecoupledModel` any number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig
from workers.adapters.base import Pause
from workers.adapters.shared.named_tensors import NamedBatch


@dataclass(frozen=True, slots=True)
class Context:
    """What a model may know: `directory` is that of its version, `device` the one to compute on."""

    name: str
    version: int
    directory: Path
    config: ModelConfig
    device: torch.device


class BaseModel:
    """One version of a model; made when it is loaded, dropped when it is unloaded.

    `memory_bytes` is what its weights take, for the memory budget of the worker.
    """

    memory_bytes: int = 0

    def __init__(self, context: Context) -> None:
        """Load weights here; whatever is raised fails the load, and its first line is told to clients."""
        self.context = context


class Model(BaseModel, ABC):
    """A model that gives one response to each request."""

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


class DecoupledModel(BaseModel, ABC):
    """A model with `model_transaction_policy { decoupled: true }`: any number of responses to each request."""

    @abstractmethod
    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """The responses to one request, one after the other; usually a generator. None at all is an answer too.

        `batch` is as in `Model.infer` and has this request alone; each response has at least the outputs of
        `batch.outputs`, with the rows of the request. It is copied when it was given, so arrays may be used again.

        Every step runs in the thread that runs all models of the worker: other batches run between two steps and wait
        for one, so steps should be short, and no step should sleep. Yield `Pause(seconds)` in place of a response to
        wait: other requests, also of this model, run meanwhile. No step is taken while the client has enough responses
        that it has not read. When it goes away or the time of the request is up the generator is closed at its `yield`,
        so `finally` is the place for what must be given back. Do not yield inside of a `with torch...` block: torch
        keeps such states for the thread. What is raised ends the request, after the responses so far:
        `ipc.errors.InvalidInput` tells its message to the client, anything else is only logged.
        """
