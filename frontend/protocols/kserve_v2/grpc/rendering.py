"""A `TensorResult` as the bytes of a ModelInferResponse: tensors are raw, and joined in without a copy of their own."""

from __future__ import annotations

from frontend.grpc import wire
from frontend.protocols.kserve_v2 import rendering, strings
from frontend.tensors.request import Parameter
from frontend.tensors.result import TensorResult
from ipc.protos import kserve_v2_pb2 as pb

RAW_OUTPUT = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
STREAMED = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
FINAL = "triton_final_response"


def response_of(result: TensorResult, given_id: str, streamed: bool = False, *, final: bool = True) -> bytes:
    """The response; an output in shared memory has an empty raw entry, so that the others keep their places.

    In a stream it is wrapped in a ModelStreamInferResponse, and says whether it is the `final` one to its request. This
    copies out of the answer's block, so the answer must still be open.
    """
    head = pb.ModelInferResponse(model_name=result.model, model_version=str(result.version), id=given_id)
    for name, value in result.parameters.items():
        head.parameters[name].CopyFrom(_parameter(value))
    if streamed:
        head.parameters[FINAL].bool_param = final
    contents: list[bytes | memoryview] = []
    for output in result.outputs:
        datatype, shape, data = rendering.told(output, result.batches)
        head.outputs.add(name=output.name, datatype=datatype, shape=shape)
        contents.append(b"" if data is None else data)
    parts = wire.parts(head.SerializeToString(), RAW_OUTPUT, contents)
    return b"".join(wire.nested(STREAMED, parts) if streamed else parts)


def is_long(result: TensorResult) -> bool:
    """Whether that is work for a thread."""
    return result.has_many_classes or strings.is_long(result)


def empty_final(model: str, version: int, given_id: str) -> bytes:
    """The message of a stream that only says that a request of a decoupled model has no more responses."""
    answer = pb.ModelStreamInferResponse()
    head = answer.infer_response
    head.model_name, head.model_version, head.id = model, str(version), given_id
    head.parameters[FINAL].bool_param = True
    return answer.SerializeToString()


def stream_error(message: str, given_id: str) -> bytes:
    """The message of a stream that tells the failure of one request."""
    answer = pb.ModelStreamInferResponse(error_message=message)
    answer.infer_response.id = given_id
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
