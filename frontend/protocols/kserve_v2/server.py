"""GET /v2, and the health of the server."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers, describing
from frontend.services import Services
from ipc.errors import InvalidInput


class ServerResource:
    """GET /v2: name, version, extensions."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response) -> None:
        """The metadata of the server."""
        self._restrictions.check("metadata", req.get_header)
        answers.send(resp, describing.server_metadata(self._services))

    on_head = on_get


class LiveResource:
    """GET /v2/health/live."""

    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def on_get(self, req: Request, resp: Response) -> None:
        """200 while the process turns over."""
        self._restrictions.check("health", req.get_header)
        answers.send(resp, {"live": True})

    on_head = on_get


class ReadyResource:
    """GET /v2/health/ready."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response) -> None:
        """200 when requests are answered; else 400, as the contract has it, with the reason."""
        self._restrictions.check("health", req.get_header)
        ready, why = self._services.engine.ready()
        if not ready:
            raise InvalidInput(f"the server is not ready: {why}")
        answers.send(resp, {"ready": True})

    on_head = on_get
