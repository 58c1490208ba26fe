"""SharedMemoryControl: regions of clients registered, listed and forgotten."""

from __future__ import annotations

from frontend.grpc.call import Call
from frontend.protocols.trtis_v1.shared_memory import listed
from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb


async def change_regions(
    call: Call, request: pb.SharedMemoryControlRequest, made: pb.SharedMemoryControlResponse
) -> None:
    """Do what the request asks for; only `status` has an answer. Raises as `ClientRegions` does."""
    regions = call.services.extensions.regions
    action = request.WhichOneof("shared_memory_control")
    if action == "register":
        _register(call, request.register)
    elif action == "unregister":
        regions.unregister(None, request.unregister.name)
    elif action == "unregister_all":
        regions.unregister_all(None)
    elif action == "status":
        found, status = listed(regions.status(None)), made.shared_memory_status
        status.shared_memory_region.extend(found)
        status.region_of_status.extend(found)
    else:
        raise InvalidInput(
            "shared memory request: register, unregister, unregister_all or status must be set"
        )


def _register(call: Call, wanted: pb.SharedMemoryControlRequest.Register) -> None:
    regions, kind = call.services.extensions.regions, wanted.WhichOneof("shared_memory_types")
    if kind == "system_shared_memory":
        system = wanted.system_shared_memory
        regions.register_system(wanted.name, system.shared_memory_key, system.offset, wanted.byte_size)
    elif kind == "cuda_shared_memory":
        cuda = wanted.cuda_shared_memory
        regions.register_cuda(wanted.name, cuda.raw_handle, cuda.device_id, wanted.byte_size)
    else:
        raise InvalidInput("register: system_shared_memory or cuda_shared_memory must be set")
