"""Typed contents of an input to its raw bytes: each datatype has one field, small integers share wider ones."""

from __future__ import annotations

import numpy as np

from ipc.errors import InvalidInput
from ipc.memory import bytes_elements, datatypes
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.protos import kserve_v2_pb2 as pb

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


def raw_of(tensor: pb.ModelInferRequest.InferInputTensor) -> bytes:
    """The elements of an input as raw bytes. Raises `InvalidInput`: the input, what was expected, what came."""
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
    return bytes_elements.join(values) if datatype == BYTES else _numbers(values, datatype, where)


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
