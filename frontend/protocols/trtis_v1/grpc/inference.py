"""Infer and StreamInfer: raw tensors in and out of one message, the outcome always within it."""

from __future__ import annotations

from frontend.grpc import wire
from frontend.grpc.call import Call
from frontend.grpc.service import Answer
from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1 import requests, responses
from frontend.protocols.trtis_v1.grpc.turns import Turn, Turns
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.tensors import checking
from frontend.tensors.result import TensorResult
from frontend.tensors.running import book_failure, run
from ipc.errors import PenstockError
from ipc.protos import trtis_v1_pb2 as pb

RAW_INPUT = pb.InferRequest.RAW_INPUT_FIELD_NUMBER
RAW_OUTPUT = pb.InferResponse.RAW_OUTPUT_FIELD_NUMBER


class Inference:
    """Answers one request, alone or in a stream."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses, self._turns = statuses, Turns()

    async def answer(self, call: Call, request: pb.InferRequest) -> Answer:
        """The whole response, when its turn has come. Raises the error of the request."""
        with self._turns.take(call.rpc, request.model_name) as turn:
            try:
                return await self._infer(call, request, turn)
            finally:
                await turn.come()

    async def _infer(self, call: Call, request: pb.InferRequest, turn: Turn) -> Answer:
        services, header = call.services, request.meta_data
        call.context.model = request.model_name
        version, rows = requests.version_of(request.model_version), 0
        try:
            found = await services.models.ready(request.model_name, version, call.context.deadline_ns)
            version, rows = found.version, requests.rows_of(found, header)
            turn.of(found.config)
            wanted = requests.request_of(found, header)
            checking.check_shapes(found, wanted)
            sizes = requests.sizes_of(found, header, wanted)
            requests.attach(found, wanted, sizes, call.raw)
        except PenstockError as error:
            book_failure(services, call.context, request.model_name, version, error, rows)
            raise
        call.scheduled = True
        result = await run(services, call.context, wanted)
        try:
            return await self._response(result, header.id)
        finally:
            result.reply.release()

    async def _response(self, result: TensorResult, request_id: int) -> bytes:
        """One message; it is copied out of the reply."""
        status = self._statuses.success()
        message = await off_loop_if(result.has_many_classes, _rendered, result, request_id, status)
        result.reply.check()
        return message

    def failed(self, call: Call, request: pb.InferRequest | None, error: PenstockError) -> Answer:
        """A response that says what went wrong, with the request's id so that it can be found again."""
        model, given_id = ("", 0) if request is None else (request.model_name, request.meta_data.id)
        status = self._statuses.failure(error, model, numbered=call.scheduled)
        return pb.InferResponse(request_status=status, meta_data=pb.InferResponseHeader(id=given_id))


def _rendered(result: TensorResult, request_id: int, status: pb.RequestStatus) -> bytes:
    """The whole response; outputs without bytes of their own keep their place with an empty entry."""
    response = pb.InferResponse(
        request_status=status, meta_data=responses.typed_header_of(result, request_id)
    )
    contents = [b"" if output.data is None else output.data for output in result.outputs]
    return b"".join(wire.parts(response.SerializeToString(), RAW_OUTPUT, contents))
