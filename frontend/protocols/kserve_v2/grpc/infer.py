"""ModelInfer and ModelStreamInfer: the same request, alone or as a message of a stream.

A decoupled model gives any number of responses to a message of a stream, which leave as they come.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from frontend.grpc.call import Call
from frontend.grpc.service import Several
from frontend.http.rendering import off_loop_if
from frontend.protocols.kserve_v2 import images
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc import counting
from frontend.protocols.kserve_v2.grpc.reading import EMPTY_FINAL, request_of, version_of
from frontend.protocols.kserve_v2.grpc.rendering import empty_final, is_long, response_of, stream_error
from frontend.protocols.kserve_v2.parameters import Forwarding
from frontend.protocols.kserve_v2.reading import identifying
from frontend.tensors import running
from frontend.tensors.models import TensorModel
from frontend.tensors.request import TensorRequest
from frontend.tensors.streamed import closing, results
from frontend.tensors.version_states import model_of
from ipc.errors import PenstockError
from ipc.memory.datatypes import BYTES
from ipc.protos import kserve_v2_pb2 as pb

RAW_INPUT = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER


class Infer:
    """Answers inference requests; metadata of an rpc may go to the model as header fields do."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding

    async def alone(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """ModelInfer."""
        with identifying(message.id):
            return await self._run(call, message, streamed=False)

    async def streamed(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """One message of ModelStreamInfer."""
        with identifying(message.id):
            return await self._run(call, message, streamed=True)

    @staticmethod
    def failed(call: Call, message: pb.ModelInferRequest | None, error: PenstockError) -> bytes:
        """A failed message of ModelStreamInfer."""
        return stream_error(text_of(error), message.id if message is not None else "")

    async def _run(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes | Several:
        services, context = call.services, call.context
        context.model = message.model_name
        # What typed contents become is larger than what was received, and lives as long as the request.
        with services.bodies.holding(counting.nbytes(message)):
            with running.booking_failures(services, context, *self._asked(call, message)):
                request = request_of(message, call.raw)
                await self._defer(call, request)
                found = await self._find(call, request) if streamed else None
            self._forwarding.apply(call.metadata, request)
            if found is not None and found.config.decoupled:
                return Several(self._responses(call, message, request, found))
            result = await running.run(services, context, request, book=False)
        asked = message.model_name, result.version, result.rows
        with running.booking_failures(services, context, *asked), result.reply:
            answer = await off_loop_if(is_long(result), response_of, result, message.id, streamed)
            result.reply.check()
        running.book_answered(services, context, model_of(context.model), result)
        return answer

    @staticmethod
    def _asked(call: Call, message: pb.ModelInferRequest) -> tuple[str, int | None]:
        """Name and version of the model that is asked, as far as they are known before the request is read."""
        name, version = message.model_name, None
        with contextlib.suppress(PenstockError):
            version = version_of(message.model_version)
            version = call.services.models.find(name, version).version
        return name, version

    @staticmethod
    async def _find(call: Call, request: TensorRequest) -> TensorModel:
        return await call.services.models.ready(request.model, request.version, call.context.deadline_ns)

    @staticmethod
    async def _responses(
        call: Call, message: pb.ModelInferRequest, request: TensorRequest, found: TensorModel
    ) -> AsyncGenerator[bytes, None]:
        """Those of a decoupled model, and an empty one at the end if it was asked for."""
        services = call.services
        with identifying(message.id), services.bodies.holding(counting.nbytes(message)):
            async with closing(results(services, call.context, request)) as each:
                async for result in each:
                    # NOTE: the lease ends before the response is written, which takes as long as its client likes.
                    with result.reply:
                        long = is_long(result)
                        answer = await off_loop_if(long, response_of, result, message.id, True, final=False)
                        result.reply.check()
                    yield answer
        if EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param:
            yield empty_final(found.name, found.version, message.id)

    @staticmethod
    async def _defer(call: Call, request: TensorRequest) -> None:
        """Say of encoded images and strings what becomes of them for the model, where there may be any."""
        if all(tensor.datatype != BYTES for tensor in request.inputs):
            return
        found = await Infer._find(call, request)
        images.defer(found.config, request.inputs, call.services.settings.limits)
