"""A `TensorResult` as the bytes of a ModelInferResponse: tensors are raw, and joined in without a copy of their own."""

from __future__ import annotations

from functools import lru_cache

from frontend.grpc import received
from frontend.protocols.kserve_v2 import rendering, strings
from frontend.tensors.request import Parameter
from frontend.tensors.result import TensorResult
from ipc.protos import kserve_v2_pb2 as pb

RAW_OUTPUT = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
STREAMED = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
FINAL = "triton_final_response"


Shown = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of an output."""


def response_of(result: TensorResult, given_id: str, streamed: bool = False, *, final: bool = True) -> bytes:
    """The response; an output in shared memory has an empty raw entry, so that the others keep their places.

    In a stream it is wrapped in a ModelStreamInferResponse, and says whether it is the `final` one to its request. This
    copies out of the answer's block, so the answer must still be open.
    """
    shown: list[Shown] = []
    contents: list[bytes | memoryview] = []
    for output in result.outputs:
        datatype, shape, data = rendering.told(output, result.batches)
        shown.append((output.name, datatype, tuple(shape)))
        contents.append(b"" if data is None else data)
    if streamed or given_id or result.parameters:
        head = _message(result.model, result.version, tuple(shown))
        head.id = given_id
        for name, value in result.parameters.items():
            head.parameters[name].CopyFrom(_parameter(value))
        if streamed:
            head.parameters[FINAL].bool_param = final
        parts = received.parts(head.SerializeToString(), RAW_OUTPUT, contents)
    else:
        parts = received.parts(_plain_head(result.model, result.version, tuple(shown)), RAW_OUTPUT, contents)
    return b"".join(received.nested(STREAMED, parts) if streamed else parts)


def _message(model: str, version: int, shown: tuple[Shown, ...]) -> pb.ModelInferResponse:
    """A response without raw contents."""
    message = pb.ModelInferResponse(model_name=model, model_version=str(version))
    for name, datatype, shape in shown:
        message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message


@lru_cache(maxsize=256)
def _plain_head(model: str, version: int, shown: tuple[Shown, ...]) -> bytes:
    """PERF: most responses of a model begin with the same bytes."""
    return _message(model, version, shown).SerializeToString()


def is_long(result: TensorResult) -> bool:
    """Whether that is work for a thread."""
    return result.has_many_classes or strings.is_long(result)


def bare_message(model: str, version: str, given_id: str, *, final: bool = True, error: str = "") -> bytes:
    """A message of a stream without tensors: no response follows, or the request failed with an `error`."""
    answer = pb.ModelStreamInferResponse(error_message=error)
    head = answer.infer_response
    head.model_name, head.model_version, head.id = model, version, given_id
    head.parameters[FINAL].bool_param = final
    return answer.SerializeToString()


def _parameter(value: Parameter) -> pb.InferParameter:
    """A parameter of a response."""
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(int64_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    return pb.InferParameter(string_param=value)
