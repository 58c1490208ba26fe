"""ModelInferRequest to a `TensorRequest`: only mistakes of this wire format are found here, all others in the run.

1. Parameters become plain values; those of a tensor may name a region of shared memory, or a number of classes.
2. An input has raw bytes, a region, or typed contents. Each datatype has one field of typed contents, which small
   integers share with wider ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from frontend.protocols.kserve_v2 import reading as http_reading
from frontend.tensors.checking import check_dimensions
from frontend.tensors.request import (
    CONTENT_TYPE,
    InputTensor,
    Parameter,
    RegionUse,
    TensorRequest,
    WantedOutput,
)
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.protos import kserve_v2_pb2 as pb

EMPTY_FINAL = "triton_enable_empty_final_response"
_MAX_VERSION_DIGITS = 18
REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
NBYTES = "shared_memory_byte_size"
CLASSES = "classification"
FIELD_OF = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""Where the elements of a datatype are; FP16 and BF16 have no field and travel raw only."""
_WIDE = {"int_contents": np.int32, "uint_contents": np.uint32}


def version_of(text: str) -> int | None:
    """The version that a request names, None for the latest. Raises `InvalidInput` for any other text."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_VERSION_DIGITS):
        raise InvalidInput(f"model version: expected a number, got {text[:64]!a}")
    return int(text)


def request_of(message: pb.ModelInferRequest, raw: Sequence[bytes | memoryview]) -> TensorRequest:
    """The request; `raw` are its `raw_input_contents`. Raises `InvalidInput`."""
    request = TensorRequest(
        message.model_name,
        version_of(message.model_version),
        _inputs_of(message, raw),
        [_wanted(output) for output in message.outputs] if message.outputs else None,
    )
    if message.parameters:
        given = values_of(message.parameters, "request")
        if not isinstance(empty_final := given.pop(EMPTY_FINAL, False), bool):
            raise InvalidInput(f"parameter '{EMPTY_FINAL}': expected true or false, got {empty_final!a:.64}")
        http_reading.apply_parameters(request, given)
    return request


def _inputs_of(message: pb.ModelInferRequest, raw: Sequence[bytes | memoryview]) -> list[InputTensor]:
    for tensor in message.inputs:
        check_dimensions(len(tensor.shape), f"input {tensor.name[:200]!a}")
    places = [_place_of(tensor) for tensor in message.inputs]
    if raw:
        _check_raw(message, len(raw), sum(region is None for region, _ in places))
    contents = iter(raw)
    return [
        InputTensor(
            tensor.name,
            tensor.datatype,
            list(tensor.shape),
            None if region is not None else next(contents) if raw else raw_of(tensor),
            region,
            content_type=content_type,
        )
        for tensor, (region, content_type) in zip(message.inputs, places, strict=True)
    ]


def _place_of(tensor: pb.ModelInferRequest.InferInputTensor) -> tuple[RegionUse | None, str]:
    """The region that an input lies in, if any, and the content type that the input names."""
    if not tensor.parameters:
        return None, ""
    where = f"input {tensor.name[:200]!a}"
    given = values_of(tensor.parameters, where)
    region = region_of(given, where)
    if region is not None and tensor.contents.ListFields():
        raise InvalidInput(f"{where}: contents and shared memory exclude each other")
    return region, _content_type(given, where)


def _content_type(given: Mapping[str, Parameter], where: str) -> str:
    value = given.get(CONTENT_TYPE, "")
    if not isinstance(value, str):
        raise InvalidInput(f"{where}: parameter '{CONTENT_TYPE}': expected a text, got {value!a:.64}")
    return value


def _check_raw(message: pb.ModelInferRequest, got: int, expected: int) -> None:
    for tensor in message.inputs:
        if tensor.HasField("contents") and tensor.contents.ListFields():
            raise InvalidInput(
                f"input {tensor.name[:200]!a}: contents and raw_input_contents exclude each other"
            )
    if got != expected:
        raise InvalidInput(
            f"raw_input_contents: expected {expected} entries, one for each input that is not in shared memory, "
            f"got {got}"
        )


def _wanted(output: Any) -> WantedOutput:
    if not output.parameters:
        return WantedOutput(output.name)
    where = f"output {output.name[:200]!a}"
    given = values_of(output.parameters, where)
    classes = _whole(given.get(CLASSES, 0), CLASSES, where)
    return WantedOutput(output.name, classes or None, region_of(given, where), _content_type(given, where))


def values_of(parameters: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters by name. Raises `InvalidInput` for a parameter without a value; `where` names the owner."""
    return {name: _value_of(name, parameter, where) for name, parameter in parameters.items()}


def _value_of(name: str, parameter: Any, where: str) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidInput(f"{where}: parameter {name[:64]!a} has no value")
    return getattr(parameter, choice)


def region_of(given: Mapping[str, Parameter], where: str) -> RegionUse | None:
    """Where in a client's memory a tensor lies, if it does. Raises `InvalidInput`."""
    if REGION not in given:
        return None
    name = given[REGION]
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where}: parameter '{REGION}': expected the name of a region, got {name!a}")
    if NBYTES not in given:
        raise InvalidInput(f"{where}: parameter '{NBYTES}' is missing beside '{REGION}'")
    return RegionUse(name, _whole(given.get(OFFSET, 0), OFFSET, where), _whole(given[NBYTES], NBYTES, where))


def _whole(value: Parameter, name: str, where: str) -> int:
    """A parameter that counts something. Raises `InvalidInput`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{where}: parameter '{name}': expected an integer from 0, got {value!a:.64}")
    return value


def raw_of(tensor: pb.ModelInferRequest.InferInputTensor) -> bytes:
    """The elements of an input as raw bytes. Raises `InvalidInput` with the expected and the given elements."""
    where, datatype = f"input {tensor.name[:200]!a}", tensor.datatype
    if datatype not in DATATYPES:
        raise InvalidInput(f"{where}: datatype {datatype[:64]!a} is not one of {', '.join(DATATYPES)}")
    used = [field.name for field, _ in tensor.contents.ListFields()]
    field = FIELD_OF.get(datatype)
    if field is None:
        raise InvalidInput(f"{where}: {datatype} travels in raw_input_contents only")
    if wrong := [name for name in used if name != field]:
        raise InvalidInput(f"{where}: found {', '.join(wrong)}, but {datatype} is expected in {field}")
    values = getattr(tensor.contents, field)
    _check_count(len(values), tensor, where)
    return datatypes.join(values) if datatype == BYTES else _numbers(values, datatype, where)


def _check_count(count: int, tensor: pb.ModelInferRequest.InferInputTensor, where: str) -> None:
    try:
        expected = datatypes.elements(tensor.shape)
    except ValueError as error:
        raise InvalidInput(f"{where}: {error}") from None
    if count != expected:
        raise InvalidInput(
            f"{where}: expected {expected} elements for shape {list(tensor.shape)}, got {count}"
        )


def _numbers(values: object, datatype: str, where: str) -> bytes:
    kind = np.dtype(DATATYPES[datatype].array)
    wide = _WIDE.get(FIELD_OF[datatype])
    array = np.array(values, wide or kind)
    if wide is not None and array.size:
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        if array.min() < low or array.max() > high:
            worst = array[(array < low) | (array > high)][0]
            raise InvalidInput(f"{where}: {worst} is not within {low}..{high}, the range of {datatype}")
        array = array.astype(kind)
    return array.tobytes()
