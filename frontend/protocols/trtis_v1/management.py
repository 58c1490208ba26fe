"""The management calls: health, model control, the list of models, regions of shared memory; over HTTP as over gRPC.

Answers are the messages of the contract: `routes` sends them as text, JSON or in the wire format, `grpc.service` within
its responses. The status of the server is in `server_status`.
"""

from __future__ import annotations

from frontend.protocols.trtis_v1 import server_status
from frontend.protocols.trtis_v1.statuses import UnknownMode
from frontend.services import Services
from ipc.errors import Unsupported
from ipc.protos import trtis_v1_pb2 as pb
from ipc.store.regions import RegionEntry


def is_healthy(services: Services, mode: str) -> bool:
    """Whether the server is `live` or `ready`. Raises `UnknownMode`, and `Draining` while the server stops."""
    if mode not in ("live", "ready"):
        raise UnknownMode(f"unknown health mode {mode[:64]!a}; known are live and ready")
    server_status.refuse_while_exiting(services)
    return True if mode == "live" else server_status.is_ready(services)


async def control(services: Services, action: str, model: str, deadline_ns: int) -> None:
    """`load` a model and wait for it, or begin to `unload` it. Raises as `RepositoryControl` does."""
    if action == "load":
        await services.extensions.control.load(model, {}, deadline_ns)
    else:
        await services.extensions.control.unload(model, {}, deadline_ns)


def repository_index(services: Services) -> pb.ModelRepositoryIndex:
    """Names of all models."""
    names = sorted({entry.name for entry in services.extensions.control.index()})
    return pb.ModelRepositoryIndex(models=[pb.ModelRepositoryIndex.ModelEntry(name=name) for name in names])


def regions(services: Services) -> list[pb.SharedMemoryRegion]:
    """All regions of shared memory."""
    return [_region(entry) for entry in services.extensions.regions.status(None)]


def _region(entry: RegionEntry) -> pb.SharedMemoryRegion:
    region = pb.SharedMemoryRegion(name=entry.name, byte_size=entry.nbytes)
    if entry.kind == "cuda":
        region.cuda_shared_memory.device_id = entry.device
    else:
        region.system_shared_memory.shared_memory_key = entry.key
        region.system_shared_memory.offset = entry.offset
    return region


async def profile() -> None:
    """Raise `Unsupported`, for both commands."""
    raise Unsupported("profiling is not offered by this server; its metrics are at /metrics")
