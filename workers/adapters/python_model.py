"""Programs written in Python (`model.py`): one subclass of `penstock.model.Model`, called for every batch, or of
`DecoupledModel`, called for every request.

The file is code of whoever can write to the repository, and runs with the rights of the worker; it is loaded only with
`repository.allow_python`.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping
from importlib.abc import SourceLoader
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from ipc.catalog.repository.layout import ModelRefused
from workers.adapters.base import LoadContext, Pause
from workers.adapters.shared.model_class import BaseModel, Context, DecoupledModel, Model
from workers.adapters.shared.named_tensors import NamedBatch
from workers.adapters.shared.repository_program import RepositoryProgram, entry_of
from workers.adapters.spec import AdapterSpec

_numbers = itertools.count(1)


class PythonModelAdapter(RepositoryProgram):
    """An object of the operator's class."""

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
        """Run the file and make the model. Raises `ModelRefused`, and whatever the model raises."""
        entry = entry_of(context)
        if not (entry.config.inputs and entry.config.outputs):
            raise ModelRefused(
                f"{entry.program} tells no types and shapes; config.pbtxt must give input and output"
            )
        wanted = DecoupledModel if entry.config.decoupled else Model
        found = _class_of(context.directory / entry.program, wanted)
        device = cls.device_of(context)
        model = found(Context(entry.model, entry.version, context.directory, entry.config, device))
        context.progress("read", 1.0)
        return cls(model, context)

    @property
    def memory_bytes(self) -> int:
        """What the model says of itself."""
        return int(self._model.memory_bytes)

    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Hand the batch over."""
        assert isinstance(self._model, Model)
        return self._model.infer(batch)

    def stream(self, batch: NamedBatch) -> Iterator[Mapping[str, np.ndarray | torch.Tensor] | Pause]:
        """Hand the request over."""
        assert isinstance(self._model, DecoupledModel)
        return self._model.stream(batch)


def _class_of(path: Path, wanted: type[BaseModel]) -> type[BaseModel]:
    """The one class of a file that is a model of the `wanted` kind."""
    name = f"penstock_repository_model_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceLoader):
        raise ModelRefused(f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # NOTE: dataclasses look for the module of their class there.
    sys.modules[name] = module
    try:
        # NOTE: no compiled file is written or read: it would be taken for that of an older version of the same size.
        exec(spec.loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    finally:
        del sys.modules[name]
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, wanted) and value.__module__ == name
    ]
    if len(found) != 1:
        names = ", ".join(each.__name__ for each in found) or "none"
        raise ModelRefused(
            f"{path.name} must have one subclass of penstock.model.{wanted.__name__}; it has {names}"
        )
    return found[0]
