"""Programs written in Python (`model.py`): one subclass of `Model`, called for every batch, or of `DecoupledModel`.

`Model` gives one response to each request, `DecoupledModel` any number. Operators import both as `penstock.model`.

The file is code of any person who can write to the repository, and runs with the rights of the worker. Such a file is
loaded only with `repository.allow_python`.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig
from workers.adapters.base import AdapterSpec, LoadContext, Pause
from workers.adapters.registry import run_file
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.program import RepositoryProgram, entry_of
from workers.repository.layout import ModelRefused

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Context:
    """Facts for a model: `directory` holds the files of its version, `device` is the device to compute on."""

    name: str
    version: int
    directory: Path
    config: ModelConfig
    device: torch.device


class BaseModel:
    """One version of a model: created by a load, dropped by an unload.

    `memory_bytes` is the size of its weights, for the memory budget of the worker.
    """

    memory_bytes: int = 0

    def __init__(self, context: Context) -> None:
        """Load weights here. An exception fails the load, and clients see its first line."""
        self.context = context


class Model(BaseModel, ABC):
    """A model that gives one response to each request."""

    @abstractmethod
    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch, always in the same thread; at least the outputs of `batch.outputs`.

        `batch.array(name)` is an input as a read-only array, `batch.tensor(name, device)` as a tensor: [rows, *dims] of
        all requests of the batch, [*dims] when `max_batch_size` is 0. BYTES are arrays of `bytes` objects, BF16 is its
        16 bits (uint16). `batch.sizes` are the rows of each request and `batch.parameters` its parameters. With
        `sequence_batching` there is a row for each slot, and the controls are inputs too (docs/sequences.md). Without
        `sequence_batching` the next request may overwrite the memory of an input: keep a copy, never the array itself.

        An output has the same rows and the datatype of the configuration: an array or a tensor on any device; BYTES an
        array of objects, `bytes` or `str`. An exception fails the batch. Then the halves of the batch run again, except
        with sequences. Clients see the message of `ipc.errors.InvalidInput`, and the first line of a ValueError, an
        IndexError and an error about shapes (400). Other exceptions are only logged.
        """


class DecoupledModel(BaseModel, ABC):
    """A model with `model_transaction_policy { decoupled: true }`: any number of responses to each request."""

    @abstractmethod
    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """The responses to one request, one after the other; usually a generator. There may be no response.

        `batch` is as in `Model.infer` and has one request; each response has at least the outputs of `batch.outputs`,
        with the rows of the request. A response is copied before the next step, so its arrays may be used again.

        Every step runs in the thread that runs all models of the worker. Other batches run between two steps, so steps
        should be short and never sleep. To wait, yield `Pause(seconds)` in place of a response: other requests, also of
        this model, run meanwhile. No step is taken while the client has enough unread responses. When the client goes
        away or the request's time is up the generator is closed at its `yield`, so release resources in `finally`. Do
        not yield inside of a `with torch...` block: torch keeps such states for the thread. An exception ends the
        request, after the responses so far. Clients see of exceptions what they see of those of `Model.infer`.
        """


class PythonModelAdapter(RepositoryProgram):
    """A loaded `Model` or `DecoupledModel`. The author says by the configuration whether requests are joined."""

    tries_rows: ClassVar[bool] = False

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="python_model",
        operations=("infer",),
        inputs=(),
        outputs=(),
        needs_proof=False,
    )

    def __init__(self, model: BaseModel, context: LoadContext) -> None:
        entry = entry_of(context)
        super().__init__(entry, entry.config, self.device_of(context))
        self._model = model

    @classmethod
    def load(cls, context: LoadContext) -> Self:
        """Run the file and make the model. Raises `ModelRefused`; exceptions of the model pass."""
        entry = entry_of(context)
        if not (entry.config.inputs and entry.config.outputs):
            raise ModelRefused(
                f"{entry.program} tells no types and shapes; config.pbtxt must give input and output"
            )
        kind = DecoupledModel if entry.config.decoupled else Model
        model_class = _class_of(context.directory / entry.program, kind)
        device = cls.device_of(context)
        model = model_class(Context(entry.model, entry.version, context.directory, entry.config, device))
        context.progress("read", 1.0)
        return cls(model, context)

    @property
    def memory_bytes(self) -> int:
        """`memory_bytes` of the model."""
        return int(self._model.memory_bytes)

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """`Model.infer`."""
        assert isinstance(self._model, Model)
        return self._model.infer(batch)

    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """`DecoupledModel.stream`."""
        assert isinstance(self._model, DecoupledModel)
        return self._model.stream(batch)


def _class_of(path: Path, wanted: type[BaseModel]) -> type[BaseModel]:
    """The one class of a file that is a model of the `wanted` kind."""
    name = f"penstock_repository_model_{next(_numbers)}"
    module = run_file(name, path, path.read_bytes())
    del sys.modules[name]
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, wanted) and value.__module__ == name
    ]
    if len(classes) != 1:
        names = ", ".join(each.__name__ for each in classes) or "none"
        raise ModelRefused(
            f"{path.name} must have one subclass of penstock.model.{wanted.__name__}; it has {names}"
        )
    return classes[0]
