"""A request without JSON (`Inference-Header-Content-Length: 0`): its body is the model's only input, the batch is 1."""

from __future__ import annotations

import math

from frontend.protocols.kserve_v2.reading import InferRequest
from frontend.tensors.request import InputTensor, TensorRequest
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput
from ipc.memory import bytes_elements
from ipc.memory.datatypes import BYTES, DATATYPES


def parse(name: str, version: int | None, config: ModelConfig, data: memoryview) -> InferRequest:
    """The request; all outputs are wanted in binary.

    Raises `InvalidInput` when the model has several inputs, or its only one cannot be told from its bytes.
    """
    if len(config.inputs) != 1:
        raise InvalidInput(
            f"a request without JSON needs a model of one input, '{name[:200]}' has {len(config.inputs)}"
        )
    expected = config.inputs[0]
    where = f"input '{expected.name}'"
    if expected.datatype == BYTES:
        dims = _string_dims(expected, where)
        given: bytes | memoryview = bytes_elements.join([data], where)
    else:
        dims, given = _dims(expected, len(data), where), data
    shape = [1, *dims] if config.batches else dims
    tensor = InputTensor(expected.name, expected.datatype, shape, given)
    return InferRequest(TensorRequest(name, version, [tensor], None), "", True, {})


def _string_dims(expected: TensorConfig, where: str) -> list[int]:
    if any(dim not in (1, -1) for dim in expected.dims):
        raise InvalidInput(
            f"{where}: a request without JSON carries one string, the model takes shape {list(expected.dims)}"
        )
    return [1] * len(expected.dims)


def _dims(expected: TensorConfig, nbytes: int, where: str) -> list[int]:
    """The dims of the model's input, the variable one from the size of the body."""
    dims = list(expected.dims)
    unit = math.prod(dim for dim in dims if dim >= 0) * DATATYPES[expected.datatype].nbytes
    unknown = dims.count(-1)
    if unknown > 1:
        raise InvalidInput(f"{where}: a request without JSON leaves {unknown} dimensions of {dims} open")
    if not unknown:
        if nbytes != unit:
            raise InvalidInput(f"{where}: expected {unit} bytes for shape {dims}, got {nbytes}")
        return dims
    if not unit or nbytes % unit:
        raise InvalidInput(f"{where}: expected a multiple of {unit} bytes for shape {dims}, got {nbytes}")
    dims[dims.index(-1)] = nbytes // unit
    return dims
