"""Codecs of MLServer that a request to a catalog model names: the parameter `content_type`.

1. Inputs of catalog models are BYTES elements. `str` and `np` say that the elements are texts or files as they stand;
   `base64` says that each element is base64 of its bytes, which are decoded here.
2. A request may name `str`, `np` or `pd`, which say no more than its inputs do.
3. A wanted output may name the codec that gives its datatype anyway.
4. Every other name is refused: the codec would change elements in a way that no catalog model means.

Programs get the `content_type` of a request as a parameter, and their tensors as sent.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from frontend.http.rendering import off_loop_if
from frontend.tensors.models import TensorModel
from frontend.tensors.request import CONTENT_TYPE, InputTensor, TensorRequest
from ipc.errors import InvalidInput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES

LONG_NBYTES = 64 << 10
"""More bytes of base64 than that are decoded in a thread."""
_PACKED = "base64"
_OF_REQUESTS = ("str", "np", "pd")
_OF_INPUTS = ("str", "np", _PACKED)
_OF_TEXT_OUTPUTS = ("str", "np")
_OF_NUMBER_OUTPUTS = ("np",)


async def decoded(model: TensorModel, request: TensorRequest) -> TensorRequest:
    """The checked request with elements as they are meant, and without the parameter.

    Raises `InvalidInput` for a codec that the model does not take, and for an element that is no base64.
    """
    parameters = dict(request.parameters)
    given = parameters.pop(CONTENT_TYPE, "")
    _check(given, _OF_REQUESTS, f"parameters.{CONTENT_TYPE}", model)
    for tensor in request.inputs:
        _check(tensor.content_type, _OF_INPUTS, f"input '{tensor.name}': {CONTENT_TYPE}", model)
    for output in request.outputs or ():
        known = _OF_TEXT_OUTPUTS if model.outputs[output.name].datatype == BYTES else _OF_NUMBER_OUTPUTS
        _check(output.content_type, known, f"output '{output.name}': {CONTENT_TYPE}", model)
    packed = [len(tensor.data or b"") for tensor in request.inputs if tensor.content_type == _PACKED]
    inputs = request.inputs
    if packed:
        inputs = await off_loop_if(sum(packed) > LONG_NBYTES, _unpacked, inputs)
    return replace(request, inputs=inputs, parameters=parameters)


def _check(given: object, known: Sequence[str], where: str, model: TensorModel) -> None:
    if given and given not in known:
        raise InvalidInput(
            f"{where}: {str(given)[:64]!a} is not one of {', '.join(known)}, "
            f"the codecs that model '{model.name}' takes here"
        )


def _unpacked(inputs: Sequence[InputTensor]) -> list[InputTensor]:
    return [_unpack(tensor) if tensor.content_type == _PACKED else tensor for tensor in inputs]


def _unpack(tensor: InputTensor) -> InputTensor:
    """The input with the bytes that its elements state in base64."""
    if tensor.data is None:
        return tensor
    where = f"input '{tensor.name}'"
    elements = datatypes.split(tensor.data, math.prod(tensor.shape), where)
    return replace(tensor, data=datatypes.join(_bytes_of(elements, where), where))


def _bytes_of(elements: Sequence[memoryview], where: str) -> Iterator[bytes]:
    for index, element in enumerate(elements):
        try:
            yield base64.b64decode(element, validate=True)
        except ValueError as error:
            raise InvalidInput(
                f"{where} element {index}: no {_PACKED}, which {CONTENT_TYPE} states"
            ) from error
