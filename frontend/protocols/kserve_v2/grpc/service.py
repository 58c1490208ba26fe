"""The methods of `inference.GRPCInferenceService`, in one table with the scope and the name in metrics of each.

The management calls are here: messages to plain arguments of `management`, and the structs of `management`, which REST
sends as JSON, to messages with the same fields. `infer` has the calls of inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import Message

from frontend.access.gate import Api, Restrictions
from frontend.grpc.call import Answer, Call, Method, Several
from frontend.protocols.kserve_v2 import management
from frontend.protocols.kserve_v2.errors import text_of
from frontend.protocols.kserve_v2.grpc.infer import RAW_INPUT, Infer, refuse_too_many_values
from frontend.protocols.kserve_v2.grpc.reading import values_of, version_of
from frontend.tensors.config_messages import message_of
from frontend.tensors.request import Forwarding, UnavailableModel
from ipc.errors import InvalidInput, ModelLoadFailed, PenstockError
from ipc.protos import kserve_v2_pb2 as pb
from ipc.protos import model_config_pb2
from ipc.settings import Kserve
from ipc.store.regions import Kind

_STATUS_RESPONSES: dict[Kind, Any] = {
    "system": pb.SystemSharedMemoryStatusResponse,
    "cuda": pb.CudaSharedMemoryStatusResponse,
}
_UNREGISTER_RESPONSES: dict[Kind, type[Message]] = {
    "system": pb.SystemSharedMemoryUnregisterResponse,
    "cuda": pb.CudaSharedMemoryUnregisterResponse,
}


class LoadFailed(PenstockError):
    """A load by name has failed: INTERNAL. An inference request to a failed model gets NOT_FOUND."""


async def server_live(call: Call, message: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
    """ServerLive: a process that answers is live."""
    return pb.ServerLiveResponse(live=True)


async def server_ready(call: Call, message: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
    """ServerReady."""
    try:
        management.require_ready_server(call.services)
    except InvalidInput:
        return pb.ServerReadyResponse(ready=False)
    return pb.ServerReadyResponse(ready=True)


async def model_ready(call: Call, message: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
    """ModelReady; an unknown model is not ready."""
    call.context.model = message.name
    version = version_of(message.version)
    try:
        management.require_ready_model(call.services, message.name, version)
    except (InvalidInput, UnavailableModel):
        return pb.ModelReadyResponse(ready=False)
    return pb.ModelReadyResponse(ready=True)


async def server_metadata(call: Call, message: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
    """ServerMetadata."""
    return pb.ServerMetadataResponse(**_fields(management.server_metadata(call.services)))


async def model_metadata(call: Call, message: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
    """ModelMetadata."""
    call.context.model = message.name
    metadata = management.model_metadata(call.services, message.name, version_of(message.version))
    return pb.ModelMetadataResponse(**_fields(metadata))


async def model_config(call: Call, message: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
    """ModelConfig."""
    call.context.model = message.name
    model = call.services.tensor_models.find(message.name, version_of(message.version))
    return pb.ModelConfigResponse(config=message_of(model_config_pb2, model.config, message.name))


async def model_statistics(call: Call, message: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
    """Statistics of one version, of all versions of a model, or of all models."""
    call.context.model = message.name
    counted = await management.statistics(call.services, message.name, version_of(message.version))
    return pb.ModelStatisticsResponse(**_fields(counted))


async def repository_index(call: Call, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
    """Every version of every model; the name of the repository is not looked at."""
    entries = management.repository_index(call.services, message.ready)
    return pb.RepositoryIndexResponse(models=[_fields(entry) for entry in entries])


async def load(call: Call, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
    """Load a model and wait for it."""
    call.context.model = message.model_name
    parameters = values_of(message.parameters, "request")
    try:
        await call.services.extensions.control.load(message.model_name, parameters, call.context.deadline_ns)
    except ModelLoadFailed as error:
        raise LoadFailed(error.message) from error
    return pb.RepositoryModelLoadResponse()


async def unload(call: Call, message: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
    """Begin to unload a model."""
    call.context.model = message.model_name
    parameters = values_of(message.parameters, "request")
    await call.services.extensions.control.unload(message.model_name, parameters, call.context.deadline_ns)
    return pb.RepositoryModelUnloadResponse()


async def region_status(kind: Kind, call: Call, message: Any) -> Message:
    """All regions of a kind by name, or the named region."""
    response = _STATUS_RESPONSES[kind]
    regions = management.regions(call.services, kind, message.name)
    states = {region.name: response.RegionStatus(**_fields(region)) for region in regions}
    answer: Message = response(regions=states)
    return answer


async def unregister(kind: Kind, call: Call, message: Any) -> Message:
    """Forget a region of a kind, or without a name all regions of the kind."""
    await call.services.extensions.regions.unregister(kind, message.name or None)
    return _UNREGISTER_RESPONSES[kind]()


async def system_register(
    call: Call, message: pb.SystemSharedMemoryRegisterRequest
) -> pb.SystemSharedMemoryRegisterResponse:
    """Register bytes of a POSIX object."""
    await call.services.extensions.regions.register_system(
        message.name, message.key, message.offset, message.byte_size
    )
    return pb.SystemSharedMemoryRegisterResponse()


async def cuda_register(
    call: Call, message: pb.CudaSharedMemoryRegisterRequest
) -> pb.CudaSharedMemoryRegisterResponse:
    """Register device memory by its IPC handle."""
    await call.services.extensions.regions.register_cuda(
        message.name, message.raw_handle, message.device_id, message.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


async def trace_setting(call: Call, message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
    """Settings of the server, or of a model. A setting without values goes back to its default."""
    settings = call.services.extensions.trace_settings
    model = management.traced_model(call.services, message.model_name) if message.model_name else ""
    changes = {name: _setting_of(list(setting.value)) for name, setting in message.settings.items()}
    if changes:
        state = await settings.update(changes, call.context.deadline_ns, model)
    else:
        state = settings.get(model)
    response = pb.TraceSettingResponse()
    for name, value in state.items():
        response.settings[name].value.extend([value] if isinstance(value, str) else value)
    return response


def _setting_of(values: list[str]) -> str | list[str] | None:
    return values[0] if len(values) == 1 else values or None


async def log_settings(call: Call, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
    """Settings of the log: change the named ones, answer with the complete state."""
    settings = call.services.extensions.log_settings
    changes = {name: _log_setting_of(name, value) for name, value in message.settings.items()}
    state = await settings.update(changes, call.context.deadline_ns) if changes else settings.get()
    response = pb.LogSettingsResponse()
    for name, value in state.items():
        setting = response.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return response


def _log_setting_of(name: str, value: pb.LogSettingsRequest.SettingValue) -> bool | int | str:
    choice = value.WhichOneof("parameter_choice")
    if choice is None:
        raise InvalidInput(f"setting {name[:64]!a} has no value")
    setting: bool | int | str = getattr(value, choice)
    return setting


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """The fields of a struct, as keywords for the message with the same fields."""
    fields: dict[str, Any] = msgspec.to_builtins(struct)
    return fields


class KserveService:
    """The service that this protocol brings to the gRPC server."""

    protocol = "kserve"
    descriptor = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def __init__(self, kserve: Kserve, restrictions: Restrictions) -> None:
        table = _table(Infer(Forwarding(kserve.forward_headers)))
        self.methods: Mapping[str, Method] = {
            name: _restricted(method, api, restrictions) if kserve.restricted_file else method
            for api, methods in table.items()
            for name, method in methods.items()
        }

    def message_of(self, error: PenstockError) -> str:
        """The words of this protocol for an error."""
        return text_of(error)


def _table(infer: Infer) -> dict[Api, dict[str, Method]]:
    """All methods by the group that they may be restricted with."""
    return {
        "health": {
            "ServerLive": Method(server_live, need=""),
            "ServerReady": Method(server_ready, need=""),
            "ModelReady": Method(model_ready),
        },
        "metadata": {
            "ServerMetadata": Method(server_metadata, "metadata"),
            "ModelMetadata": Method(model_metadata, "metadata"),
        },
        "inference": {
            "ModelInfer": Method(
                infer.alone,
                "infer",
                raw_field=RAW_INPUT,
                check=refuse_too_many_values,
                planned=infer.planned,
            ),
            "ModelStreamInfer": Method(
                infer.streamed,
                "infer",
                raw_field=RAW_INPUT,
                check=refuse_too_many_values,
                failed=infer.failed,
            ),
        },
        "model-config": {"ModelConfig": Method(model_config, "config")},
        "statistics": {"ModelStatistics": Method(model_statistics, "statistics")},
        "model-repository": {
            "RepositoryIndex": Method(repository_index, "index"),
            "RepositoryModelLoad": Method(load, "load", "admin"),
            "RepositoryModelUnload": Method(unload, "unload", "admin"),
        },
        "shared-memory": {
            "SystemSharedMemoryStatus": Method(partial(region_status, "system"), "regions"),
            "SystemSharedMemoryRegister": Method(system_register, "regions", "admin"),
            "SystemSharedMemoryUnregister": Method(partial(unregister, "system"), "regions", "admin"),
            "CudaSharedMemoryStatus": Method(partial(region_status, "cuda"), "regions"),
            "CudaSharedMemoryRegister": Method(cuda_register, "regions", "admin"),
            "CudaSharedMemoryUnregister": Method(partial(unregister, "cuda"), "regions", "admin"),
        },
        "trace": {"TraceSetting": Method(trace_setting, "trace", "admin")},
        "logging": {"LogSettings": Method(log_settings, "logging", "admin")},
    }


def _restricted(method: Method, api: Api, restrictions: Restrictions) -> Method:
    """`method` behind the secret of its group."""

    async def answer(call: Call, message: Any) -> Answer | Several:
        restrictions.require_secret(api, call.header)
        return await method.answer(call, message)

    return replace(method, answer=answer, planned=None)
