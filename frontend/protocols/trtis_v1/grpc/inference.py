"""Infer and StreamInfer: raw tensors in and out of one message, the outcome always within it."""

from __future__ import annotations

from frontend.grpc import wire
from frontend.grpc.call import Call
from frontend.grpc.service import Answer
from frontend.protocols.trtis_v1 import requests, responses
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.tensors import checking, served
from frontend.tensors.result import TensorResult
from frontend.tensors.running import book_failure, run
from frontend.tensors.served import Served
from ipc.errors import PenstockError
from ipc.protos import trtis_v1_pb2 as pb

RAW_INPUT = pb.InferRequest.RAW_INPUT_FIELD_NUMBER
RAW_OUTPUT = pb.InferResponse.RAW_OUTPUT_FIELD_NUMBER


class Inference:
    """Answers one request, alone or in a stream."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    async def answer(self, call: Call, request: pb.InferRequest) -> Answer:
        """The whole response. Raises the error of the request."""
        services, header = call.services, request.meta_data
        call.context.model = request.model_name
        version = requests.version_of(request.model_version)
        try:
            found = await served.ready(services, request.model_name, version, call.context.deadline_ns)
            wanted = requests.request_of(found, header)
            checking.check_shapes(found, wanted)
            sizes = requests.sizes_of(found, header, wanted)
            requests.attach(found, wanted, sizes, call.raw)
        except PenstockError as error:
            book_failure(services, call.context, request.model_name, version, error)
            raise
        call.scheduled = True
        result = await run(services, call.context, wanted)
        try:
            return self._response(result, found, header.id)
        finally:
            result.reply.release()

    def _response(self, result: TensorResult, found: Served, request_id: int) -> bytes:
        """One message; outputs without bytes of their own keep their place with an empty entry."""
        header = responses.header_of(result, found.name, found.config.batches, request_id)
        response = pb.InferResponse(request_status=self._statuses.success(), meta_data=header)
        contents = [b"" if output.data is None else output.data for output in result.outputs]
        message = b"".join(wire.parts(response.SerializeToString(), RAW_OUTPUT, contents))
        result.reply.check()
        return message

    def failed(self, call: Call, request: pb.InferRequest, error: PenstockError) -> Answer:
        """A response that says what went wrong, with the request's id so that it can be found again."""
        status = self._statuses.failure(error, request.model_name, numbered=call.scheduled)
        return pb.InferResponse(
            request_status=status, meta_data=pb.InferResponseHeader(id=request.meta_data.id)
        )
