"""What a model configuration says of shapes and types, laid out so that a request is checked quickly.

Shapes of requests and results are those of `dims`; the program's own may differ (`reshape`). Dimensions of any size
(-1) of one stand for those of the other in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory.datatypes import BYTES, DATATYPES, elements

Shape = tuple[int, ...]


class TensorFacts:
    """One input or output. `dtype` is what holds it (objects for BYTES); `row_nbytes` is None where it varies."""

    __slots__ = ("_rest", "batches", "datatype", "dims", "dtype", "itemsize", "name", "program", "row_nbytes")

    def __init__(self, tensor: TensorConfig, batches: bool) -> None:
        known = DATATYPES[tensor.datatype]
        self.name, self.datatype, self.batches = tensor.name, tensor.datatype, batches
        self.itemsize = known.nbytes
        self.dtype = np.dtype(object if tensor.datatype == BYTES else known.array)
        self.dims: Shape = tensor.dims
        self.program: Shape = tensor.dims if tensor.reshape is None else tensor.reshape
        self._rest = list(tensor.dims)
        fixed = tensor.datatype != BYTES and all(dim >= 0 for dim in tensor.dims)
        self.row_nbytes = math.prod(tensor.dims) * self.itemsize if fixed else None

    def check_input(self, shape: list[int], rows: int, nbytes: int) -> None:
        """Raise `InvalidInput` unless a request of `rows` may give this shape in so many bytes."""
        rest = shape[1:] if self.batches else shape
        if (rest != self._rest and not self.admits(rest)) or (self.batches and shape[:1] != [rows]):
            expected = [rows, *self.dims] if self.batches else list(self.dims)
            raise InvalidInput(f"unexpected shape for input {self.name!a}: expected {expected}, got {shape}")
        if not self.itemsize:
            return
        try:
            expected_nbytes = elements(shape) * self.itemsize
        except ValueError as error:
            raise InvalidInput(f"input {self.name!a}: {error}") from error
        if nbytes != expected_nbytes:
            raise InvalidInput(f"input {self.name!a}: expected {expected_nbytes} bytes, got {nbytes}")

    def admits(self, rest: Sequence[int]) -> bool:
        """Whether a shape, without rows, is one of the configuration."""
        return _matches(self.dims, rest)

    def to_program(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape in which the program takes an input that a request gives as `shape`."""
        if self.program is self.dims:
            return shape
        head = 1 if self.batches else 0
        return (*shape[:head], *_translate(self.dims, self.program, shape[head:]))

    def from_program(self, shape: Sequence[int]) -> list[int] | None:
        """The shape that a result has, without rows, when the program gave `shape`; None when it must not."""
        if not _matches(self.program, shape):
            return None
        return list(shape if self.program is self.dims else _translate(self.program, self.dims, shape))


def _matches(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return len(dims) == len(shape) and all(d in (-1, s) and s >= 0 for d, s in zip(dims, shape, strict=True))


def _translate(before: Shape, after: Shape, shape: Sequence[int]) -> Shape:
    """`shape`, which fits `before`, in the form of `after`: sizes of free dimensions go over in their order."""
    free = iter([size for dim, size in zip(before, shape, strict=True) if dim < 0])
    return tuple(next(free) if dim < 0 else dim for dim in after)


class Signature:
    """Inputs and outputs of a model by name."""

    __slots__ = ("batches", "inputs", "max_rows", "outputs", "required")

    def __init__(self, config: ModelConfig) -> None:
        self.batches = config.batches
        self.max_rows = max(1, config.max_batch_size)
        self.inputs = {tensor.name: TensorFacts(tensor, config.batches) for tensor in config.inputs}
        self.outputs = {tensor.name: TensorFacts(tensor, config.batches) for tensor in config.outputs}
        self.required = frozenset(tensor.name for tensor in config.inputs if not tensor.optional)
