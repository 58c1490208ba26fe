"""Named tensors of a batch, and the shapes and types that a configuration allows.

1. A `Signature` prepares a configuration for fast checks of requests. Requests and results have the shapes of `dims`,
   the program may have others (`reshape`). Dimensions of any size (-1) correspond in their order.
2. A `NamedBatch` joins requests along their rows, on the host or on the device. Arrays of a single request are views of
   the payload if they are aligned; arrays of several requests are copied once.

Arrays have the types of `ipc.memory.datatypes`: BF16 as uint16 bits, BYTES as arrays of `bytes` objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory import copies
from ipc.memory.datatypes import BYTES, DATATYPES, elements
from ipc.wire.messages import Step

if TYPE_CHECKING:
    from workers.inputs import OpenRegion

CPU = torch.device("cpu")
TORCH_TYPES: dict[str, torch.dtype] = {
    datatype.array: getattr(torch, datatype.array) for datatype in DATATYPES.values()
}
"""Dtypes of torch by the name of numpy's dtype."""
Parameter = bool | int | float | str
Array = np.ndarray | torch.Tensor
"""On the host, or already on the device; BF16 as its bits on both."""
Shape = tuple[int, ...]


@dataclass(slots=True, eq=False)
class NamedInputs:
    """One request. `arrays` are read-only, for a model that batches [rows, ...].

    `outputs` are the requested ones, `targets` the regions of the client that some outputs are written to.
    """

    arrays: dict[str, Array]
    rows: int
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    step: Step | None = None
    targets: Mapping[str, OpenRegion] = field(default_factory=dict)


class NamedBatch:
    """Requests that run together. All of them give the same inputs, in shapes that differ in the rows only."""

    def __init__(self, requests: Sequence[NamedInputs], config: ModelConfig) -> None:
        self._requests, self._config = requests, config

    @property
    def rows(self) -> int:
        """Rows of all requests; 1 for a model that does not batch."""
        return sum(request.rows for request in self._requests)

    @property
    def sizes(self) -> list[int]:
        """Rows of each request, in the order in which they are joined."""
        return [request.rows for request in self._requests]

    @property
    def names(self) -> list[str]:
        """Names of the given inputs, in the order of the configuration; optional ones may be missing."""
        return list(self._requests[0].arrays)

    @property
    def outputs(self) -> frozenset[str]:
        """Outputs that at least one request asks for."""
        if len(self._requests) == 1:
            return frozenset(self._requests[0].outputs)
        return frozenset(name for request in self._requests for name in request.outputs)

    @property
    def parameters(self) -> list[Mapping[str, Parameter]]:
        """Parameters of each request."""
        return [request.parameters for request in self._requests]

    @property
    def steps(self) -> list[Step | None]:
        """Place of each request in a sequence."""
        return [request.step for request in self._requests]

    def array(self, name: str, *, writable: bool = False) -> np.ndarray:
        """An input on the host, all rows; read-only unless `writable`, which may take a copy.

        Raises `KeyError` for an input that is not given.
        """
        values = self._on_host(name, writable)
        return values if writable else read_only(values)

    def _on_host(self, name: str, writable: bool) -> np.ndarray:
        first, *others = [host_array(request.arrays[name]) for request in self._requests]
        if others:
            joined = np.concatenate([first, *others])
            copies.count("join", joined.nbytes)
            return joined
        if first.flags.aligned and (first.flags.writeable or not writable):
            return first
        copies.count("own", first.nbytes)
        return first.copy()

    def arrays(self) -> dict[str, np.ndarray]:
        """All given inputs on the host; read-only."""
        return {name: self.array(name) for name in self.names}

    def tensor(self, name: str, device: torch.device = CPU, *, writable: bool = False) -> torch.Tensor:
        """A numeric input as a tensor on `device`, all rows; BF16 as `torch.bfloat16`.

        NOTE: without `writable` the memory may be mapped read-only, and the process dies if a program writes to such an
        input in place.

        Raises `KeyError` for an input that is not given, and `TypeError` for BYTES.
        """
        arrays = [request.arrays[name] for request in self._requests]
        if isinstance(arrays[0], np.ndarray) and arrays[0].dtype.kind == "O":
            raise TypeError(f"input {name!r} is {BYTES}, which no tensor holds")
        if device.type == "cpu":
            values = as_tensor(self._on_host(name, writable))
        else:
            values = _joined_on(device, arrays, writable)
        if values.dtype != torch.uint16:
            return values
        declared = self._config.input(name)
        return values.view(torch.bfloat16) if declared is not None and declared.datatype == "BF16" else values


def read_only(array: np.ndarray) -> np.ndarray:
    """The same memory as an array that cannot be written, be it the memory of a client or of a joined batch."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def host_array(values: Array) -> np.ndarray:
    """The same values on the host; BF16 as its bits."""
    if isinstance(values, np.ndarray):
        return values
    host = values.detach().cpu()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same bytes as a tensor. A tensor of read-only bytes must not be written, though torch would allow that."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # PERF: torch warns about read-only arrays, and evaluates the filters of warnings each time.
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """An array interface that declares read-only bytes writable, and keeps the bytes alive."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, array: np.ndarray) -> None:
        described = dict(array.__array_interface__)
        described["data"] = (described["data"][0], False)
        self.__array_interface__, self._array = described, array


def _joined_on(device: torch.device, arrays: Sequence[Array], writable: bool) -> torch.Tensor:
    """All rows on a device. Arrays on the host are copied once, directly into their place."""
    parts = [a if isinstance(a, torch.Tensor) else as_tensor(np.require(a, requirements="A")) for a in arrays]
    copies.count("device", sum(part.nbytes for part in parts if not part.is_cuda))
    if len(parts) == 1:
        return parts[0].to(device, copy=writable)
    rows = sum(len(part) for part in parts)
    joined = torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    at = 0
    for part in parts:
        joined[at : at + len(part)].copy_(part, non_blocking=True)
        at += len(part)
    return joined


class TensorFacts:
    """One input or output. `dtype` is numpy's (object for BYTES); `row_nbytes` is None for rows of varying size."""

    __slots__ = (
        "_program",
        "_rest",
        "batches",
        "datatype",
        "dims",
        "dtype",
        "itemsize",
        "name",
        "program",
        "row_nbytes",
        "tensor_dtype",
    )

    def __init__(self, tensor: TensorConfig, batches: bool) -> None:
        known = DATATYPES[tensor.datatype]
        self.name, self.datatype, self.batches = tensor.name, tensor.datatype, batches
        self.itemsize = known.nbytes
        self.dtype = np.dtype(object if tensor.datatype == BYTES else known.array)
        self.dims: Shape = tensor.dims
        self.program: Shape = tensor.dims if tensor.reshape is None else tensor.reshape
        self._rest, self._program = list(tensor.dims), list(self.program)
        self.tensor_dtype = None if tensor.datatype == BYTES else TORCH_TYPES[known.array]
        """Type of tensors of a program; None for BYTES, which no tensor holds."""
        if tensor.datatype == "BF16":
            self.tensor_dtype = torch.bfloat16
        fixed = tensor.datatype != BYTES and all(dim >= 0 for dim in tensor.dims)
        self.row_nbytes = math.prod(tensor.dims) * self.itemsize if fixed else None

    def check_input(self, shape: list[int], rows: int, nbytes: int) -> None:
        """Raise `InvalidInput` unless a request of `rows` may give this shape in so many bytes."""
        rest = shape[1:] if self.batches else shape
        # PERF: most inputs have exactly the shape of the configuration.
        if self.row_nbytes is not None and rest == self._rest and (not self.batches or shape[:1] == [rows]):
            if nbytes != (expected_nbytes := self.row_nbytes * (rows if self.batches else 1)):
                raise InvalidInput(f"input {self.name!a}: expected {expected_nbytes} bytes, got {nbytes}")
            return
        if (rest != self._rest and not self.admits(rest)) or (self.batches and shape[:1] != [rows]):
            expected = [rows, *self.dims] if self.batches else list(self.dims)
            raise InvalidInput(f"unexpected shape for input {self.name!a}: expected {expected}, got {shape}")
        try:
            expected_nbytes = elements(shape) * self.itemsize
        except ValueError as error:
            raise InvalidInput(f"input {self.name!a}: {error}") from error
        if self.itemsize and nbytes != expected_nbytes:
            raise InvalidInput(f"input {self.name!a}: expected {expected_nbytes} bytes, got {nbytes}")

    def admits(self, rest: Sequence[int]) -> bool:
        """Whether the configuration allows this shape, given without rows."""
        return _matches(self.dims, rest)

    def to_program(self, shape: Sequence[int]) -> Sequence[int]:
        """The program's shape of an input that a request gives as `shape`."""
        if self.program is self.dims:
            return shape
        head = 1 if self.batches else 0
        return (*shape[:head], *_translate(self.dims, self.program, shape[head:]))

    def from_program(self, shape: Sequence[int]) -> list[int] | None:
        """The result's shape, without rows, of an output of `shape`; None for a shape that is not allowed."""
        if self.program is self.dims and shape == self._program:
            return self._rest
        if not _matches(self.program, shape):
            return None
        return list(shape if self.program is self.dims else _translate(self.program, self.dims, shape))


def _matches(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return len(dims) == len(shape) and all(d in (-1, s) and s >= 0 for d, s in zip(dims, shape, strict=True))


def _translate(before: Shape, after: Shape, shape: Sequence[int]) -> Shape:
    """`shape`, which matches `before`, in the form of `after`; sizes of free dimensions keep their order."""
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
