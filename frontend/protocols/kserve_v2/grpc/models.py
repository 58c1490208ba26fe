"""Rpcs about the server and its models: live, ready, metadata, configuration."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.kserve_v2 import describing
from frontend.protocols.kserve_v2.grpc.reading import version_of
from frontend.tensors import served
from frontend.tensors.config_messages import message_of
from ipc.protos import kserve_v2_pb2 as pb
from ipc.protos import model_config_pb2


async def server_live(call: Call, message: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
    """ServerLive: a process that answers is live."""
    return pb.ServerLiveResponse(live=True)


async def server_ready(call: Call, message: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
    """ServerReady."""
    return pb.ServerReadyResponse(ready=call.services.engine.ready()[0])


async def model_ready(call: Call, message: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
    """ModelReady; an unknown model is not ready."""
    call.context.model = message.name
    ready = describing.model_ready(call.services, message.name, version_of(message.version))
    return pb.ModelReadyResponse(ready=ready)


async def server_metadata(call: Call, message: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
    """ServerMetadata."""
    return pb.ServerMetadataResponse(**describing.server_metadata(call.services))


async def model_metadata(call: Call, message: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
    """ModelMetadata."""
    call.context.model = message.name
    return pb.ModelMetadataResponse(
        **describing.model_metadata(call.services, message.name, version_of(message.version))
    )


async def model_config(call: Call, message: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
    """ModelConfig."""
    call.context.model = message.name
    found = served.find(call.services, message.name, version_of(message.version))
    return pb.ModelConfigResponse(config=message_of(model_config_pb2, found.config, message.name))
