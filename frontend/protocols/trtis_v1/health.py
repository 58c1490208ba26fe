"""GET /api/health/{live,ready}: the HTTP status is the answer, the code says whether the question was understood."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.protocols.trtis_v1 import server_status
from frontend.protocols.trtis_v1.answering import Resource
from frontend.protocols.trtis_v1.codes import UnknownMode
from frontend.services import Services


def is_healthy(services: Services, mode: str) -> bool:
    """Whether the server is `live` or `ready`. Raises `UnknownMode`, and `Draining` while the server stops."""
    if mode not in ("live", "ready"):
        raise UnknownMode(f"unknown health mode {mode[:64]!a}; known are live and ready")
    server_status.check_running(services)
    return True if mode == "live" else server_status.is_ready(services)


class HealthResource(Resource):
    """Both modes; every other one is answered with code UNKNOWN."""

    kind = "health"

    async def on_get(self, req: Request, resp: Response, mode: str = "") -> None:
        """200 or 400, without a body."""
        await self.answer(req, resp, self._look(resp, mode))

    async def _look(self, resp: Response, mode: str) -> None:
        if not is_healthy(self.services, mode):
            resp.status = 400
