"""GET /api/status and /api/status/<model>: text by default, wire format or JSON where asked for."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1.answering import Resource, set_message, wants_binary, wants_json
from frontend.protocols.trtis_v1.releases import as_of_1_4
from frontend.protocols.trtis_v1.server_status import server_status
from ipc.protos import trtis_v1_pb2 as pb

INLINE_MODELS = 32
"""Statuses of more models are rendered in a thread."""


class StatusResource(Resource):
    """The server and all its models, or one of them."""

    kind = "status"

    async def on_get(self, req: Request, resp: Response, model: str = "") -> None:
        """A ServerStatus; the answer to a failure is empty."""
        req.context.penstock.model = model
        await self.answer(req, resp, self._show(req, resp, model))

    async def _show(self, req: Request, resp: Response, model: str) -> None:
        status = await server_status(self.services, self.statuses.server_id, model)
        await off_loop_if(len(status.model_status) > INLINE_MODELS, _set, req, resp, status)


def _set(req: Request, resp: Response, status: pb.ServerStatus) -> None:
    """The whole status in JSON and in the wire format; in text what release 1.4 knows."""
    whole = wants_json(req) or wants_binary(req)
    set_message(req, resp, status if whole else as_of_1_4(status))
