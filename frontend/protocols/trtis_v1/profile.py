"""GET /api/profile: not offered, and says so."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.protocols.trtis_v1.answering import Resource
from ipc.errors import Unsupported


async def refuse() -> None:
    """Raise `Unsupported`."""
    raise Unsupported("profiling is not offered by this server; its metrics are at /metrics")


class ProfileResource(Resource):
    """Both commands get the same answer."""

    kind = "profile"

    async def on_get(self, req: Request, resp: Response) -> None:
        """400 with code UNSUPPORTED."""
        await self.answer(req, resp, refuse())
