"""The routes below /api/sharedmemorycontrol: regions of clients registered, listed and forgotten.

status
register/<name>/<key with its slash>/<offset>/<byte_size>
cudaregister/<name>/<byte_size>/<device>       the body is the raw handle
unregister/<name>, unregister/all, unregisterall

Any other path is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

import falcon
from falcon.asgi import Request, Response

from frontend.protocols.trtis_v1.answering import Resource, set_message
from frontend.protocols.trtis_v1.patterns import number_of
from ipc.protos import trtis_v1_pb2 as pb
from ipc.store.regions import RegionEntry


def listed(entries: Iterable[RegionEntry]) -> list[pb.SharedMemoryRegion]:
    """Regions in the form of this contract."""
    return [_region(entry) for entry in entries]


def _region(entry: RegionEntry) -> pb.SharedMemoryRegion:
    region = pb.SharedMemoryRegion(name=entry.name, byte_size=entry.nbytes)
    if entry.kind == "cuda":
        region.cuda_shared_memory.device_id = entry.device
    else:
        region.system_shared_memory.shared_memory_key = entry.key
        region.system_shared_memory.offset = entry.offset
    return region


class RegionStatusResource(Resource):
    """All regions."""

    kind = "regions"

    async def on_get(self, req: Request, resp: Response) -> None:
        """A SharedMemoryStatus, as text or in the wire format."""
        await self.answer(req, resp, self._list(req, resp))

    async def _list(self, req: Request, resp: Response) -> None:
        found = self.services.extensions.regions.status(None)
        set_message(req, resp, pb.SharedMemoryStatus(shared_memory_region=listed(found)))


class RegionResource(Resource):
    """One region, or all of them."""

    kind = "regions"

    async def on_post(self, req: Request, resp: Response, rest: str) -> None:
        """200 or 400, without a body."""
        await self.answer(req, resp, self._change(req, rest))

    async def _change(self, req: Request, rest: str) -> None:
        regions, (action, _, path) = self.services.extensions.regions, rest.partition("/")
        name, _, more = path.partition("/")
        if rest in ("unregister/all", "unregisterall"):
            regions.unregister_all(None)
        elif action == "unregister" and name and not more:
            regions.unregister(None, name)
        elif action == "register" and name and more.count("/") >= 2:
            key, offset, nbytes = more.rsplit("/", 2)
            regions.register_system(name, key, _number(offset), _number(nbytes))
        elif action == "cudaregister" and name and more.count("/") == 1:
            size, device = map(_number, more.split("/"))
            async with self.services.bodies.hold(req, req.context.penstock.deadline_ns) as handle:
                regions.register_cuda(name, bytes(handle), device, size)
        else:
            raise falcon.HTTPRouteNotFound


def _number(text: str) -> int:
    """A number of the path. Raises `HTTPRouteNotFound` for what is none."""
    found = number_of(text)
    if found is None:
        raise falcon.HTTPRouteNotFound
    return found
