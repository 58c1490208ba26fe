"""Bodies of generate: named values to tensors, and the answer under the names of its outputs."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import orjson

from frontend.http.rendering import at_once
from frontend.protocols.kserve_v2 import elements, parameters, rendering
from frontend.protocols.kserve_v2.json_bodies import Decoder
from frontend.protocols.kserve_v2.reading import InferRequest, Target
from frontend.tensors.request import InputTensor, TensorRequest
from frontend.tensors.result import TensorResult
from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InvalidInput

GENERATE = Decoder(dict[str, msgspec.Raw])
_Parameters = dict[str, bool | int | float | str]


def parsed_body(target: Target, config: ModelConfig, body: bytes) -> InferRequest:
    """The request of a body in JSON. Raises `InvalidInput`."""
    return request_of(target, config, GENERATE.decode(body))


def request_of(target: Target, config: ModelConfig, body: dict[str, msgspec.Raw]) -> InferRequest:
    """The request of a body. Raises `InvalidInput` that names the key."""
    request = TensorRequest(target.name, target.version, [], None)
    given: dict[str, Any] = {}
    for key, raw in body.items():
        expected = config.input(key)
        if expected is not None:
            request.inputs.append(_input(expected, bytes(raw), config.batches))
        elif key == "parameters":
            given |= _parameters("parameters", raw, _Parameters)
        elif key != "id":
            given |= _parameters(key, raw, None)
            parameters.check_count(len(given))
    parameters.apply(request, given)
    return InferRequest(request, "", False, {})


def _parameters(key: str, raw: msgspec.Raw, kind: Any) -> _Parameters:
    try:
        if kind is not None:
            found: _Parameters = msgspec.json.decode(raw, type=kind)
            return found
        return {key: msgspec.json.decode(raw, type=bool | int | float | str)}
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"'{key[:200]}': {str(error)[:200]}") from None


def _input(expected: TensorConfig, text: bytes, batches: bool) -> InputTensor:
    where = f"input '{expected.name}'"
    dims = [1, *expected.dims] if batches else list(expected.dims)
    count = math.prod(dim for dim in dims if dim >= 0)
    if -1 in dims:
        if dims.count(-1) > 1:
            raise InvalidInput(f"{where}: generate cannot tell the shape, the model takes {dims}")
        found = elements.count_of(text, where)
        if not count or found % count:
            raise InvalidInput(
                f"{where}: expected a multiple of {count} elements for shape {dims}, got {found}"
            )
        dims[dims.index(-1)] = found // count
        count = found
    return InputTensor(
        expected.name, expected.datatype, dims, elements.read(text, expected.datatype, count, where)
    )


def answer_of(result: TensorResult, words: bool) -> bytes:
    """The body of an answer. Raises `InvalidInput` for what JSON cannot say."""
    body: dict[str, Any] = {"model_name": result.model, "model_version": str(result.version)}
    for output in result.outputs:
        datatype, shape, data = rendering.told(output, result.batches)
        if data is None:
            continue
        text = at_once(rendering.json_of(data, datatype, shape, f"output '{output.name}'", words))
        body[output.name] = orjson.Fragment(text[1:-1] if math.prod(shape) == 1 else text)
    return orjson.dumps(body | result.parameters)
