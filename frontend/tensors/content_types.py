"""Codecs of MLServer that a request to a catalog model names: the parameter `content_type`.

1. Inputs of catalog models are BYTES elements. `str` and `np` say that the elements are texts or files as they stand;
   `base64` says that each element is base64 of its bytes, which `catalog_calls` decodes once it has counted them.
2. A request may name `str`, `np` or `pd`, which say no more than its inputs do.
3. A wanted output may name the codec that gives its datatype anyway.
4. Every other name is refused: the codec would change elements in a way that no catalog model means.

Programs get the `content_type` of a request as a parameter, and their tensors as sent.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from frontend.tensors.models import TensorModel
from frontend.tensors.request import CONTENT_TYPE, Parameter, TensorRequest
from ipc.errors import InvalidInput
from ipc.memory.datatypes import BYTES

BASE64 = "base64"
_OF_REQUESTS = ("str", "np", "pd")
_OF_INPUTS = ("str", "np", BASE64)
_OF_TEXT_OUTPUTS = ("str", "np")
_OF_NUMBER_OUTPUTS = ("np",)


def without_codec(model: TensorModel, request: TensorRequest) -> dict[str, Parameter]:
    """The parameters of a checked request but the codec. Raises `InvalidInput` for a codec the model does not take."""
    for tensor in request.inputs:
        if tensor.content_type:
            _check(tensor.content_type, _OF_INPUTS, f"input '{tensor.name}': {CONTENT_TYPE}", model)
    for output in request.outputs or ():
        if output.content_type:
            known = _OF_TEXT_OUTPUTS if model.outputs[output.name].datatype == BYTES else _OF_NUMBER_OUTPUTS
            _check(output.content_type, known, f"output '{output.name}': {CONTENT_TYPE}", model)
    if CONTENT_TYPE not in request.parameters:
        return request.parameters
    parameters = dict(request.parameters)
    codec = parameters.pop(CONTENT_TYPE)
    if codec:
        _check(codec, _OF_REQUESTS, f"parameters.{CONTENT_TYPE}", model)
    return parameters


def _check(codec: Parameter, known: Sequence[str], where: str, model: TensorModel) -> None:
    if codec not in known:
        raise InvalidInput(
            f"{where}: {str(codec)[:64]!a} is not one of {', '.join(known)}, "
            f"the codecs that model '{model.name}' takes here"
        )


def packed_nbytes(request: TensorRequest) -> int:
    """Bytes of the inputs in base64."""
    return sum([len(tensor.data or b"") for tensor in request.inputs if tensor.content_type == BASE64])


def unpacked(elements: Sequence[memoryview], where: str) -> list[bytes]:
    """The bytes that each element states in base64. Raises `InvalidInput` that names the element."""
    found = []
    for index, element in enumerate(elements):
        try:
            found.append(base64.b64decode(element, validate=True))
        except ValueError as error:
            raise InvalidInput(
                f"{where} element {index}: no {BASE64}, which {CONTENT_TYPE} states"
            ) from error
    return found
