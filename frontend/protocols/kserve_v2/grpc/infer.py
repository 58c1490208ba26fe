"""ModelInfer and ModelStreamInfer: the same request, alone or as a message of a stream.

A decoupled model gives any number of responses to a message of a stream, which leave as they come.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress

from frontend.grpc.call import Call, Several
from frontend.http.rendering import off_loop_if
from frontend.protocols.kserve_v2 import images
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc import counting
from frontend.protocols.kserve_v2.grpc.reading import EMPTY_FINAL, request_of, version_of
from frontend.protocols.kserve_v2.grpc.rendering import bare_message, is_long, response_of
from frontend.protocols.kserve_v2.grpc.repeats import KnownHeads, Repeated
from frontend.protocols.kserve_v2.parameters import Forwarding
from frontend.protocols.kserve_v2.reading import identified, identifying
from frontend.tensors.models import TensorModel
from frontend.tensors.request import TensorRequest
from ipc.errors import PenstockError
from ipc.protos import kserve_v2_pb2 as pb


class Infer:
    """Answers inference requests; metadata of an rpc may go to the model as header fields do."""

    def __init__(self, forwarding: Forwarding) -> None:
        self._forwarding = forwarding
        self._known = KnownHeads()

    async def alone(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """ModelInfer."""
        return await self._identified(call, message, streamed=False)

    async def streamed(self, call: Call, message: pb.ModelInferRequest) -> bytes | Several:
        """One message of ModelStreamInfer."""
        return await self._identified(call, message, streamed=True)

    def repeated(self, call: Call, data: bytes) -> Awaitable[bytes] | None:
        """The answer to a ModelInfer whose head has been seen; None for any other."""
        found = self._known.find(data, call.context, call.services.inference)
        return None if found is None else self._run_plan(call, found)

    @staticmethod
    def failed(call: Call, message: pb.ModelInferRequest | None, error: PenstockError) -> bytes:
        """A failed message of ModelStreamInfer: the final one, unless an empty one follows."""
        text = text_of(error)
        if message is None:
            return bare_message("", "", "", error=text)
        name, version, follows = message.model_name, message.model_version, False
        with suppress(PenstockError):
            model = call.services.models.find(name, version_of(version))
            name, version = model.name, str(model.version)
            follows = _last(message, model) is not None
        return bare_message(name, version, message.id, final=not follows, error=text)

    @staticmethod
    async def _run_plan(call: Call, repeated: Repeated) -> bytes:
        try:
            result = await call.services.inference.run_plan(call.context, *repeated)
            with result.answer:
                return await off_loop_if(is_long(result), response_of, result, "")
        except PenstockError as error:
            identified(error, "")
            raise

    async def _identified(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes | Several:
        """The answer; an error of validation begins with the client's id of the request."""
        bodies, nbytes = call.services.bodies, counting.nbytes(message)
        # What typed contents become is larger than what was received, and lives as long as the request.
        bodies.held_nbytes += nbytes
        try:
            bodies.check_room(nbytes)
            return await self._run(call, message, streamed)
        except PenstockError as error:
            identified(error, message.id)
            raise
        finally:
            bodies.held_nbytes -= nbytes

    async def _run(self, call: Call, message: pb.ModelInferRequest, streamed: bool) -> bytes | Several:
        services, scope = call.services, call.context
        inference, scope.model = services.inference, message.model_name
        record = inference.begin(scope, message.model_name, None)
        record.version = version = version_of(message.model_version)
        model, request = inference.look(scope, message.model_name, version), None
        if model is None:
            request = request_of(message, call.raw)
            model = await inference.find(scope, request.model, version, request.timeout_us)
        if streamed and model.config.decoupled:
            return Several(self._responses(call, message, request, model), _last(message, model))
        request = self._completed(call, request or request_of(message, call.raw), model)
        result = await inference.run(scope, model, request)
        with result.answer:
            if not streamed and not message.id and not self._forwarding.active:
                key = self._known.note(call.data, call.raw, version, model)
                if key is not None:
                    inference.keep_plan(model, key, sum(map(len, call.raw)), request, None)
            return await off_loop_if(is_long(result), response_of, result, message.id, streamed)

    def _completed(self, call: Call, request: TensorRequest, model: TensorModel) -> TensorRequest:
        """`request` with what the model and the metadata of the rpc add."""
        images.defer(model.config, request.inputs, call.services.settings.limits)
        self._forwarding.apply(call.metadata, request)
        return request

    async def _responses(
        self, call: Call, message: pb.ModelInferRequest, request: TensorRequest | None, model: TensorModel
    ) -> AsyncGenerator[bytes, None]:
        """Those of a decoupled model; `request` is None where the message has not been read yet."""
        services = call.services
        with identifying(message.id), services.bodies.holding(counting.nbytes(message)):
            request = self._completed(call, request or request_of(message, call.raw), model)
            async with aclosing(services.inference.stream(call.context, model, request)) as results:
                async for result in results:
                    # NOTE: the lease ends before the response is written, which takes as long as its client likes.
                    with result.answer:
                        long = is_long(result)
                        answer = await off_loop_if(long, response_of, result, message.id, True, final=False)
                    yield answer


def _last(message: pb.ModelInferRequest, model: TensorModel) -> bytes | None:
    """The empty message behind all responses of a decoupled model, for a client that asks for such a message."""
    wanted = EMPTY_FINAL in message.parameters and message.parameters[EMPTY_FINAL].bool_param
    return (
        bare_message(model.name, str(model.version), message.id)
        if wanted and model.config.decoupled
        else None
    )
