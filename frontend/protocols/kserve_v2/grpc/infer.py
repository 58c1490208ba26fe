"""ModelInfer and ModelStreamInfer: the same request, alone or as a message of a stream."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.kserve_v2 import images
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc.reading import request_of
from frontend.protocols.kserve_v2.grpc.rendering import response_of, stream_error
from frontend.protocols.kserve_v2.headers import Forwarding
from frontend.rendering import off_loop_if
from frontend.tensors import running, served
from frontend.tensors.request import TensorRequest
from ipc.datatypes import BYTES
from ipc.errors import PenstockError
from ipc.protos import kserve_v2_pb2 as pb

RAW_INPUT = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER


class Infer:
    """Answers inference requests; metadata of an rpc may go to the model as header fields do."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding

    async def alone(self, call: Call, message: pb.ModelInferRequest) -> bytes:
        """ModelInfer."""
        return await self._run(call, message, streamed=False)

    async def streamed(self, call: Call, message: pb.ModelInferRequest) -> bytes:
        """One message of ModelStreamInfer."""
        return await self._run(call, message, streamed=True)

    @staticmethod
    def failed(call: Call, message: pb.ModelInferRequest | None, error: PenstockError) -> bytes:
        """A failed message of ModelStreamInfer."""
        return stream_error(text_of(error), message.id if message is not None else "")

    async def _run(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes:
        services, context = call.services, call.context
        context.model = message.model_name
        try:
            request = request_of(message, call.raw)
            await self._convert(call, request)
        except PenstockError as error:
            running.book_failure(services, context, message.model_name, None, error)
            raise
        self._forwarding.apply(call.metadata, request)
        result = await running.run(services, context, request)
        with result.reply:
            answer = await off_loop_if(result.has_many_classes, response_of, result, message.id, streamed)
            result.reply.check()
        return answer

    @staticmethod
    async def _convert(call: Call, request: TensorRequest) -> None:
        """Turn encoded images and strings into the tensors that the model takes, where there may be any."""
        if all(tensor.datatype != BYTES for tensor in request.inputs):
            return
        services = call.services
        found = await served.ready(services, request.model, request.version, call.context.deadline_ns)
        await images.convert_all(found.config, request.inputs, services.settings.limits)
