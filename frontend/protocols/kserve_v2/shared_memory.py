"""/v2/systemsharedmemory and /v2/cudasharedmemory: status, register and unregister of clients' regions."""

from __future__ import annotations

import re
from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers
from frontend.protocols.kserve_v2.schemas import REGISTER_CUDA, REGISTER_SYSTEM
from frontend.services import Services
from ipc.errors import InvalidInput
from ipc.store.regions import Kind, RegionEntry

_TAIL = re.compile(r"(?:region/(?P<name>.*)/)?(?P<action>status|register|unregister)/?", re.DOTALL)


def entry_of(region: RegionEntry) -> dict[str, Any]:
    """One region as the status shows it."""
    if region.kind == "cuda":
        return {"name": region.name, "device_id": region.device, "byte_size": region.nbytes}
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.nbytes}


class SharedMemoryResource:
    """Everything below one of the two folders."""

    def __init__(self, services: Services, restrictions: Restrictions, kind: Kind) -> None:
        self._services, self._restrictions, self._kind = services, restrictions, kind

    async def on_get(self, req: Request, resp: Response, tail: str) -> None:
        """Status of all regions of the kind, or of one."""
        name, action = self._parse(req, tail)
        if action != "status":
            raise falcon.HTTPMethodNotAllowed(["POST"])
        regions = self._services.extensions.regions.status(self._kind, name)
        answers.send(resp, [entry_of(region) for region in regions])

    async def on_post(self, req: Request, resp: Response, tail: str) -> None:
        """Register one region; unregister one or all."""
        name, action = self._parse(req, tail)
        if action == "status":
            raise falcon.HTTPMethodNotAllowed(["GET"])
        regions = self._services.extensions.regions
        if action == "unregister" and name:
            regions.unregister(self._kind, name)
        elif action == "unregister":
            regions.unregister_all(self._kind)
        elif not name:
            raise InvalidInput("the path has no name for the region: .../region/NAME/register")
        elif self._kind == "system":
            asked = await answers.body_of(self._services, req, REGISTER_SYSTEM)
            regions.register_system(name, asked.key, asked.offset, asked.byte_size)
        else:
            asked = await answers.body_of(self._services, req, REGISTER_CUDA)
            regions.register_cuda(name, asked.raw_handle.b64, asked.device_id, asked.byte_size)
        answers.send_empty(resp)

    def _parse(self, req: Request, tail: str) -> tuple[str, str]:
        """Name of the region, "" for none, and what is asked."""
        self._restrictions.check("shared-memory", req.get_header)
        found = _TAIL.fullmatch(tail)
        if found is None:
            raise falcon.HTTPNotFound
        if found["name"] == "":
            raise InvalidInput("the path has an empty name for the region: .../region/NAME/...")
        return found["name"] or "", found["action"]
