"""What a configuration says of one input, in the form that requests are compared with."""

from __future__ import annotations

from typing import NamedTuple

from ipc.catalog.model_config import TensorConfig
from ipc.memory.datatypes import DATATYPES


class InputRule(NamedTuple):
    """One input of a model: `dims` without the batch dimension, `nbytes` of an element (0: varies)."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    variable: bool
    nbytes: int
    optional: bool

    @classmethod
    def of(cls, tensor: TensorConfig) -> InputRule:
        """The rule of one configured input."""
        nbytes = DATATYPES[tensor.datatype].nbytes
        return cls(tensor.name, tensor.datatype, tensor.dims, -1 in tensor.dims, nbytes, tensor.optional)

    def fits(self, dims: list[int]) -> bool:
        """Whether these dims, without the batch dimension, are among those that the model takes."""
        if not self.variable:
            return tuple(dims) == self.dims
        return len(dims) == len(self.dims) and all(
            allowed in (-1, given) for allowed, given in zip(self.dims, dims, strict=True)
        )
