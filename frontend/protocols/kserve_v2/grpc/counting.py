"""How many values the typed contents of a request have, counted before the protobuf library makes anything of them.

A number takes one byte on the wire and eight in memory; a string takes two and becomes an object. So their counts are
bounded, and their memory is counted among the bytes that requests hold. Raw contents have no such bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from frontend.grpc import received
from frontend.tensors.checking import check_dimensions
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb

MOST_NUMBERS = 1 << 24
"""Numbers and truth values in the typed contents of one request."""
MOST_SINGLE = 1 << 16
"""Strings in the typed contents of one request, and numbers that are not packed."""
NUMBER_NBYTES, STRING_NBYTES = 16, 96
"""Bytes of a value: parsed, and once more as raw bytes."""
_BYTES = 2
_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER << 3 | _BYTES
_CONTENTS = pb.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER << 3 | _BYTES
_SHAPE = pb.ModelInferRequest.InferInputTensor.SHAPE_FIELD_NUMBER << 3 | _BYTES
_PIECE_NBYTES = 1 << 20
_typed = pb.InferTensorContents


def refuse_too_many_values(data: bytes) -> None:
    """Raise `InvalidInput` when a ModelInferRequest, of which the raw contents are left out, has too many values.

    Raises `ValueError` for other bytes. The fields of the message, and those a level below, must have been counted.
    """
    numbers = single = 0
    for tag, _, began, end in received.fields(data, 0, len(data)):
        for inner, _, start, stop in received.fields(data, began, end) if tag == _INPUTS else ():
            if inner == _SHAPE:
                check_dimensions(_varints(data, start, stop), "an input")
            for field, _, first, last in received.fields(data, start, stop) if inner == _CONTENTS else ():
                count = _PACKED.get(field)
                if count is None:
                    single += 1
                else:
                    numbers += count(data, first, last)
                _check_counts(numbers, single)


def nbytes(message: pb.ModelInferRequest) -> int:
    """About what the typed contents of a request take, parsed and made into raw bytes."""
    found = 0
    for tensor in message.inputs:
        if not tensor.HasField("contents"):
            continue
        for field, values in tensor.contents.ListFields():
            each = STRING_NBYTES if field.number == _typed.BYTES_CONTENTS_FIELD_NUMBER else NUMBER_NBYTES
            found += each * len(values)
    return found


def _check_counts(numbers: int, single: int) -> None:
    if numbers > MOST_NUMBERS:
        raise InvalidInput(
            f"typed contents: more than {MOST_NUMBERS} numbers in one request; send them in raw_input_contents"
        )
    if single > MOST_SINGLE:
        raise InvalidInput(
            f"typed contents: more than {MOST_SINGLE} strings, or numbers that are not packed, in one request; "
            "send them in raw_input_contents"
        )


def _varints(data: bytes, first: int, last: int) -> int:
    """Numbers of variable length: the last byte of each is below 128."""
    found = 0
    for at in range(first, last, _PIECE_NBYTES):
        piece = np.frombuffer(data, np.uint8, min(_PIECE_NBYTES, last - at), at)
        found += int(np.count_nonzero(piece < 128))
        if found > MOST_NUMBERS:
            break
    return found


def _fixed(size: int) -> Callable[[bytes, int, int], int]:
    return lambda data, first, last: (last - first) // size


_PACKED: dict[int, Callable[[bytes, int, int], int]] = {
    number << 3 | _BYTES: count
    for number, count in (
        (_typed.BOOL_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.INT_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.INT64_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.UINT_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.UINT64_CONTENTS_FIELD_NUMBER, _varints),
        (_typed.FP32_CONTENTS_FIELD_NUMBER, _fixed(4)),
        (_typed.FP64_CONTENTS_FIELD_NUMBER, _fixed(8)),
    )
}
"""Functions that count the values of a packed field, by its tag."""
