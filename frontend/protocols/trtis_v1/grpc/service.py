"""The methods of `GRPCService`. The gRPC status is OK for failed requests too; the outcome is in `request_status`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from frontend.grpc.call import Answer, Call, Method
from frontend.protocols.trtis_v1 import management
from frontend.protocols.trtis_v1.grpc.inference import RAW_INPUT, Inference
from frontend.protocols.trtis_v1.management import server_status
from frontend.protocols.trtis_v1.statuses import Statuses, message_of
from frontend.routes import Need
from frontend.services import Services
from ipc.errors import AccessRefused, Cancelled, InvalidInput, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

Work = Callable[[Call, Any, Any], Awaitable[None]]


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
            began, made = time.perf_counter_ns(), response()
            call.context.model = getattr(request, "model_name", "")
            try:
                await work(call, request, made)
            finally:
                call.services.extensions.counters.called(kind, time.perf_counter_ns() - began)
            made.request_status.CopyFrom(self._statuses.success())
            return made  # type: ignore[no-any-return]

        def failed(call: Call, request: Any, error: PenstockError) -> Message:
            made = response()
            made.request_status.CopyFrom(self._statuses.failure(error))
            return made  # type: ignore[no-any-return]

        return Method(answer, kind, need, failed=_unless_transport(failed))

    async def _status(self, call: Call, request: pb.StatusRequest, made: pb.StatusResponse) -> None:
        found = await server_status(call.services, self._statuses.server_id, request.model_name)
        made.server_status.CopyFrom(found)


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
