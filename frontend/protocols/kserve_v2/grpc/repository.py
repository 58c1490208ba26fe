"""RepositoryIndex, RepositoryModelLoad, RepositoryModelUnload."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.kserve_v2.grpc.parameters import values_of
from ipc.errors import ModelLoadFailed, PenstockError
from ipc.protos import kserve_v2_pb2 as pb


class LoadFailed(PenstockError):
    """A load that was asked for by name has failed: INTERNAL, where a request to such a model is told NOT_FOUND."""


async def index(call: Call, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
    """Every version of every model; the repository's name is not looked at."""
    entries = call.services.extensions.control.index(ready_only=message.ready)
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=str(entry.version), state=entry.state, reason=entry.reason
            )
            for entry in entries
        ]
    )


async def load(call: Call, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
    """Load a model and wait for it."""
    call.context.model = message.model_name
    given = values_of(message.parameters, "request")
    try:
        await call.services.extensions.control.load(message.model_name, given, call.context.deadline_ns)
    except ModelLoadFailed as error:
        raise LoadFailed(error.message) from error
    return pb.RepositoryModelLoadResponse()


async def unload(call: Call, message: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
    """Begin to unload a model."""
    call.context.model = message.model_name
    given = values_of(message.parameters, "request")
    await call.services.extensions.control.unload(message.model_name, given, call.context.deadline_ns)
    return pb.RepositoryModelUnloadResponse()
