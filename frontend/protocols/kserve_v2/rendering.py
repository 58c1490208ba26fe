"""Results as bodies of infer answers: JSON, and behind it the tensors that are wanted in binary.

1. Each output is an entry of the JSON: with `data`, or with the size of its bytes behind the JSON, in the order of the
   entries, or, when it was written to shared memory, with neither.
2. Bytes of tensors are not copied here; they are views that leave with the response.
3. JSON of numbers is made piece by piece, so that other requests get their turn between two pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from frontend.http.threads import Steps
from frontend.protocols.kserve_v2 import conversions
from frontend.protocols.kserve_v2.reading import InferRequest
from frontend.protocols.kserve_v2.schemas import InferredOutput, InferResponse
from frontend.tensors.result import OutputTensor, TensorResult, TopClass
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES, DATATYPES

PIECE_ELEMENTS = 1 << 16
LONG_NBYTES = 64 << 10
SHORT_NBYTES, SHORT_OUTPUTS = 4 << 10, 8
"""Tensors to be written as JSON above this size are work for a thread."""
_FLOATS = {"FP16", "BF16", "FP32", "FP64"}
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_encoder = msgspec.json.Encoder()


@dataclass(slots=True, frozen=True)
class AnswerBody:
    """A body: `parts` one after another. `json_nbytes` of JSON stand before binary tensors (0: there are none)."""

    parts: list[bytes | memoryview]
    json_nbytes: int


def render(result: TensorResult, wanted: InferRequest, fallback_id: str, words: bool) -> Steps[AnswerBody]:
    """The body of an answer.

    `fallback_id` is sent when the client gave none. `words` allows NaN and infinities in JSON, by their names.

    Raises:
        InvalidInput: an output cannot be written as JSON; binary data would do.
    """
    entries: list[InferredOutput] = []
    tail: list[bytes | memoryview] = []
    for output in result.outputs:
        name, (datatype, shape, data) = output.name, told(output, result.batches)
        entry = InferredOutput(name, datatype, shape)
        entries.append(entry)
        if data is None:
            continue
        if wanted.binary.get(name, wanted.binary_default):
            entry.parameters = {"binary_data_size": data.nbytes}
            if data.nbytes:
                tail.append(data)
        else:
            elements: Any = msgspec.Raw(
                (yield from json_of(data, datatype, shape, f"output '{name}'", words))
            )
            entry.data = elements
    head = _encoder.encode(
        InferResponse(wanted.id or fallback_id, result.model, str(result.version), entries)
    )
    return AnswerBody([head, *tail], len(head) if tail else 0)


def is_long(result: TensorResult, wanted: InferRequest) -> bool:
    """Whether rendering is work for a thread: for bytes to be written as JSON, or for classes."""
    # PERF: most answers are so small that nothing about them takes long.
    for output in result.outputs:
        if output.classes or (output.data is not None and output.data.nbytes > SHORT_NBYTES):
            break
    else:
        if len(result.outputs) <= SHORT_OUTPUTS:
            return False
    nbytes = sum(
        output.data.nbytes
        for output in result.outputs
        if output.data is not None and not wanted.binary.get(output.name, wanted.binary_default)
    )
    return nbytes > LONG_NBYTES or result.has_many_classes or conversions.is_long(result)


def told(output: OutputTensor, batches: bool) -> tuple[str, list[int], memoryview | None]:
    """Datatype, shape and raw bytes of an output in the answer: classes and marked strings are BYTES."""
    if output.classes is not None:
        return BYTES, *classes_tensor(output.classes, output.datatype, batches)
    if output.data is not None and conversions.is_marked(output.name, output.datatype, len(output.shape)):
        return conversions.texts_of(output)
    return output.datatype, output.shape, output.data


def json_of(data: memoryview, datatype: str, shape: Sequence[int], where: str, words: bool) -> Steps[bytes]:
    """A tensor as a flat JSON list. Raises `InvalidInput` for values that JSON cannot express."""
    if datatype == BYTES:
        return _strings(data, shape, where)
    values = np.frombuffer(data, DATATYPES[datatype].array)
    if datatype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif datatype == "BOOL":
        values = values.view(np.uint8) != 0
    if datatype in _FLOATS and not np.isfinite(values).all():
        return (yield from _with_words(values, where, words))
    text = yield from _numbers(values)
    return b"[" + text + b"]"


def _numbers(values: np.ndarray) -> Steps[bytes]:
    pieces: list[bytes] = []
    for start in range(0, len(values), PIECE_ELEMENTS):
        pieces.append(orjson.dumps(values[start : start + PIECE_ELEMENTS], option=_NUMPY)[1:-1])
        yield
    return b",".join(pieces)


def _with_words(values: np.ndarray, where: str, words: bool) -> Steps[bytes]:
    if not words:
        raise InvalidInput(
            f"{where} holds NaN or infinity, which JSON does not know: request binary data for it "
            "(binary_data), or allow words with kserve.json_nonfinite"
        )
    finite = np.isfinite(values)
    text = yield from _numbers(np.where(finite, values, 0))
    tokens = text.split(b",")
    for index in np.flatnonzero(~finite):
        value = values[index]
        tokens[index] = b"NaN" if np.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
    return b"[" + b",".join(tokens) + b"]"


def _strings(data: memoryview, shape: Sequence[int], where: str) -> bytes:
    elements = datatypes.split(data, math.prod(shape), where)
    try:
        return orjson.dumps([str(element, "utf-8") for element in elements])
    except UnicodeDecodeError:
        raise InvalidInput(
            f"{where} holds bytes that are not UTF-8: request binary data for it (binary_data)"
        ) from None


def classes_tensor(rows: list[list[TopClass]], datatype: str, batches: bool) -> tuple[list[int], memoryview]:
    """Shape and raw bytes of a classification: `<value>:<index>[:<label>]` for each entry."""
    form = "{:.6f}:{}" if datatype in _FLOATS else "{}:{}"
    elements = [
        (form.format(top.value, top.index) + (f":{top.label}" if top.label else "")).encode()
        for row in rows
        for top in row
    ]
    width = len(rows[0]) if rows else 0
    return ([len(rows), width] if batches else [width]), memoryview(datatypes.join(elements))
