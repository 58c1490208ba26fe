"""TRTIS v1 over gRPC: the methods of `nvidia.inferenceserver.GRPCService`, which take a `Call` and a message.

1. The gRPC status is OK for failed requests too; the outcome is in `request_status`.
2. `Inference` answers Infer and StreamInfer: raw tensors in and out of one message.
3. `TrtisService` has the table of methods. `management` does the work of all others.

Imported in frontends only, since it imports gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message

from frontend.grpc import received
from frontend.grpc.call import Answer, Call, Method
from frontend.http.threads import off_loop_if
from frontend.protocols.trtis_v1 import management, requests
from frontend.protocols.trtis_v1.management import server_status
from frontend.protocols.trtis_v1.statuses import Statuses, message_of
from frontend.route_rows import Need
from frontend.services import Services
from frontend.tensors import checking
from frontend.tensors.result import TensorResult
from ipc.catalog.model_config import ModelConfig
from ipc.errors import AccessRefused, Cancelled, InvalidInput, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

RAW_INPUT = pb.InferRequest.RAW_INPUT_FIELD_NUMBER
RAW_OUTPUT = pb.InferResponse.RAW_OUTPUT_FIELD_NUMBER
Work = Callable[[Call, Any, Any], Awaitable[None]]


class Inference:
    """Answers one request, alone or in a stream."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses, self._order = statuses, AnswerOrder()

    async def answer(self, call: Call, request: pb.InferRequest) -> Answer:
        """The whole response. A model that keeps the order waits for earlier answers. Raises the request's error."""
        with self._order.take(call.rpc, request.model_name) as place:
            try:
                return await self._infer(call, request, place)
            finally:
                await place.wait()

    async def _infer(self, call: Call, request: pb.InferRequest, place: PlaceInOrder) -> Answer:
        scope, inference, header = call.context, call.services.tensor_inference, request.meta_data
        scope.model, version = request.model_name, requests.version_of(request.model_version)
        record = inference.begin(scope, request.model_name, version)
        model = await inference.find(scope, request.model_name, version)
        record.rows = requests.rows_of(model, header)
        place.note_model(model.config)
        request_read = requests.request_of(model, header)
        checking.check_shapes(model, request_read)
        sizes = requests.sizes_of(model, header, request_read)
        requests.attach(model, request_read, sizes, call.raw)
        call.scheduled = True
        result = await inference.run(scope, model, request_read)
        with result.answer:
            status = self._statuses.success()
            return await off_loop_if(result.has_many_classes, _rendered, result, header.id, status)

    def failed(self, call: Call, request: pb.InferRequest | None, error: PenstockError) -> Answer:
        """A response that says what went wrong, with the request's id so that it can be found again."""
        model, given_id = ("", 0) if request is None else (request.model_name, request.meta_data.id)
        status = self._statuses.failure(error, model, numbered=call.scheduled)
        return pb.InferResponse(request_status=status, meta_data=pb.InferResponseHeader(id=given_id))


def _rendered(result: TensorResult, request_id: int, status: pb.RequestStatus) -> bytes:
    """The whole response; outputs without bytes of their own keep their place with an empty entry."""
    response = pb.InferResponse(request_status=status, meta_data=requests.typed_header_of(result, request_id))
    contents = [b"" if output.data is None else output.data for output in result.outputs]
    return b"".join(received.parts(response.SerializeToString(), RAW_OUTPUT, contents))


class PlaceInOrder:
    """The place of one request among those of its stream for the same model."""

    def __init__(self, before: asyncio.Event | None) -> None:
        self._before = before
        self.keeps_order = False

    def note_model(self, config: ModelConfig) -> None:
        """Learn whether the model keeps an order."""
        batching = config.dynamic_batching
        self.keeps_order = batching is not None and batching.preserve_ordering

    async def wait(self) -> None:
        """Wait until the request before this one has been answered."""
        if self.keeps_order and self._before is not None:
            await self._before.wait()


class AnswerOrder:
    """The order of answers on a stream, for models with `preserve_ordering`: each waits for the answer before it.

    Workers keep the order of their requests, but the requests of one stream may go to several workers. Kept is the last
    request of each model on each rpc that is under way.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], asyncio.Event] = {}

    @contextmanager
    def take(self, rpc: object, model: str) -> Iterator[PlaceInOrder]:
        """The place of a request, in the order of the calls. Leaving the context lets the next request answer."""
        # NOTE: the rpc lives as long as any of its requests, so its number belongs to no other one meanwhile.
        key, mine = (id(rpc), model), asyncio.Event()
        before, self._last[key] = self._last.get(key), mine
        try:
            yield PlaceInOrder(before)
        finally:
            mine.set()
            if self._last.get(key) is mine:
                del self._last[key]


class TrtisService:
    """`nvidia.inferenceserver.GRPCService`."""

    protocol = "trtis_v1"
    descriptor = pb.DESCRIPTOR.services_by_name["GRPCService"]

    def __init__(self, services: Services) -> None:
        statuses = self._statuses = Statuses(services.settings)
        inference = Inference(statuses)
        infer = Method(
            inference.answer, "infer", raw_field=RAW_INPUT, failed=_unless_transport(inference.failed)
        )
        stream = Method(
            inference.answer,
            "infer",
            raw_field=RAW_INPUT,
            failed=_unless_transport(inference.failed),
            ordered=False,
        )
        self.methods: Mapping[str, Method] = {
            "Infer": infer,
            "StreamInfer": stream,
            "Health": self._method("health", pb.HealthResponse, _health, ""),
            "Status": self._method("status", pb.StatusResponse, self._status),
            "Profile": self._method("profile", pb.ProfileResponse, _profile),
            "ModelControl": self._method("control", pb.ModelControlResponse, _control, "admin"),
            "SharedMemoryControl": self._method(
                "regions", pb.SharedMemoryControlResponse, _change_regions, _need_of_regions
            ),
            "Repository": self._method("index", pb.RepositoryResponse, _repository),
        }

    def message_of(self, error: PenstockError) -> str:
        """Text of an error that ends an rpc."""
        return message_of(error)

    def _method(
        self, kind: str, response: Callable[[], Any], work: Work, need: Need | Callable[[Any], Need] = "infer"
    ) -> Method:
        """A unary method: `work` fills a response, the status carries the outcome; calls are counted by `kind`."""

        async def answer(call: Call, request: Any) -> Answer:
            began, answer_message = time.perf_counter_ns(), response()
            call.context.model = getattr(request, "model_name", "")
            try:
                await work(call, request, answer_message)
            finally:
                call.services.extensions.counters.called(kind, time.perf_counter_ns() - began)
            answer_message.request_status.CopyFrom(self._statuses.success())
            return answer_message  # type: ignore[no-any-return]

        def failed(call: Call, request: Any, error: PenstockError) -> Message:
            answer = response()
            answer.request_status.CopyFrom(self._statuses.failure(error))
            return answer  # type: ignore[no-any-return]

        return Method(answer, kind, need, failed=_unless_transport(failed))

    async def _status(self, call: Call, request: pb.StatusRequest, made: pb.StatusResponse) -> None:
        status = await server_status(call.services, self._statuses.server_id, request.model_name)
        made.server_status.CopyFrom(status)


def _unless_transport(
    failed: Callable[[Call, Any, PenstockError], Answer],
) -> Callable[[Call, Any, PenstockError], Answer | None]:
    """Refused keys and clients that left end the rpc with a gRPC status; every other failure is an answer."""

    def decide(call: Call, request: Any, error: PenstockError) -> Answer | None:
        return None if isinstance(error, AccessRefused | Cancelled) else failed(call, request, error)

    return decide


async def _health(call: Call, request: pb.HealthRequest, made: pb.HealthResponse) -> None:
    made.health = management.is_healthy(call.services, request.mode)


async def _profile(call: Call, request: pb.ProfileRequest, made: pb.ProfileResponse) -> None:
    await management.profile()


async def _control(call: Call, request: pb.ModelControlRequest, made: pb.ModelControlResponse) -> None:
    control = call.services.extensions.control
    change = control.load if request.type == pb.ModelControlRequest.LOAD else control.unload
    await change(request.model_name, {}, call.context.deadline_ns)


async def _repository(call: Call, request: pb.RepositoryRequest, made: pb.RepositoryResponse) -> None:
    if not request.index:
        raise InvalidInput("repository request: index must be true")
    made.index.CopyFrom(management.repository_index(call.services))


async def _change_regions(
    call: Call, request: pb.SharedMemoryControlRequest, made: pb.SharedMemoryControlResponse
) -> None:
    """Register, unregister or list regions. Raises as `ClientRegions` does."""
    regions = call.services.extensions.regions
    action = request.WhichOneof("shared_memory_control")
    if action == "register":
        await _register(call, request.register)
    elif action == "unregister":
        await regions.unregister(None, request.unregister.name)
    elif action == "unregister_all":
        await regions.unregister(None, None)
    elif action == "status":
        found, status = management.regions(call.services), made.shared_memory_status
        status.shared_memory_region.extend(found)
        status.region_of_status.extend(found)
    else:
        raise InvalidInput(
            "shared memory request: register, unregister, unregister_all or status must be set"
        )


async def _register(call: Call, wanted: pb.SharedMemoryControlRequest.Register) -> None:
    regions, kind = call.services.extensions.regions, wanted.WhichOneof("shared_memory_types")
    if kind == "system_shared_memory":
        system = wanted.system_shared_memory
        await regions.register_system(wanted.name, system.shared_memory_key, system.offset, wanted.byte_size)
    elif kind == "cuda_shared_memory":
        cuda = wanted.cuda_shared_memory
        await regions.register_cuda(wanted.name, cuda.raw_handle, cuda.device_id, wanted.byte_size)
    else:
        raise InvalidInput("register: system_shared_memory or cuda_shared_memory must be set")


def _need_of_regions(request: pb.SharedMemoryControlRequest) -> Need:
    """Every caller may look; changes need an administrator."""
    return "infer" if request.WhichOneof("shared_memory_control") == "status" else "admin"
