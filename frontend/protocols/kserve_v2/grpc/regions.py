"""SystemSharedMemory... and CudaSharedMemory...: Status, Register, Unregister."""

from __future__ import annotations

from frontend.grpc.call import Call
from ipc.protos import kserve_v2_pb2 as pb
from ipc.store.regions import Kind


async def system_status(
    call: Call, message: pb.SystemSharedMemoryStatusRequest
) -> pb.SystemSharedMemoryStatusResponse:
    """All system regions by name, or the one that is named."""
    answer = pb.SystemSharedMemoryStatusResponse()
    for entry in call.services.extensions.regions.status("system", message.name):
        region = answer.regions[entry.name]
        region.name, region.key, region.offset, region.byte_size = (
            entry.name,
            entry.key,
            entry.offset,
            entry.nbytes,
        )
    return answer


async def system_register(
    call: Call, message: pb.SystemSharedMemoryRegisterRequest
) -> pb.SystemSharedMemoryRegisterResponse:
    """Register bytes of a POSIX object."""
    call.services.extensions.regions.register_system(
        message.name, message.key, message.offset, message.byte_size
    )
    return pb.SystemSharedMemoryRegisterResponse()


async def system_unregister(
    call: Call, message: pb.SystemSharedMemoryUnregisterRequest
) -> pb.SystemSharedMemoryUnregisterResponse:
    """Forget a system region, or all of them."""
    _unregister(call, "system", message.name)
    return pb.SystemSharedMemoryUnregisterResponse()


async def cuda_status(
    call: Call, message: pb.CudaSharedMemoryStatusRequest
) -> pb.CudaSharedMemoryStatusResponse:
    """All CUDA regions by name, or the one that is named."""
    answer = pb.CudaSharedMemoryStatusResponse()
    for entry in call.services.extensions.regions.status("cuda", message.name):
        region = answer.regions[entry.name]
        region.name, region.device_id, region.byte_size = entry.name, entry.device, entry.nbytes
    return answer


async def cuda_register(
    call: Call, message: pb.CudaSharedMemoryRegisterRequest
) -> pb.CudaSharedMemoryRegisterResponse:
    """Register device memory by its IPC handle."""
    call.services.extensions.regions.register_cuda(
        message.name, message.raw_handle, message.device_id, message.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(
    call: Call, message: pb.CudaSharedMemoryUnregisterRequest
) -> pb.CudaSharedMemoryUnregisterResponse:
    """Forget a CUDA region, or all of them."""
    _unregister(call, "cuda", message.name)
    return pb.CudaSharedMemoryUnregisterResponse()


def _unregister(call: Call, kind: Kind, name: str) -> None:
    """An empty name means all; one that is not known is no error."""
    regions = call.services.extensions.regions
    if name:
        regions.unregister(kind, name)
    else:
        regions.unregister_all(kind)
