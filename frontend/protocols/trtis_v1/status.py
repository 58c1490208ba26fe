"""GET /api/status and /api/status/<model>: text by default, wire format or JSON where asked for."""

from __future__ import annotations

from falcon.asgi import Request, Response
from google.protobuf import json_format

from frontend.protocols.trtis_v1.answering import Resource, set_message, wants_binary
from frontend.protocols.trtis_v1.server_status import server_status


class StatusResource(Resource):
    """The server and all its models, or one of them."""

    kind = "status"

    async def on_get(self, req: Request, resp: Response, model: str = "") -> None:
        """A ServerStatus; the answer to a failure is empty."""
        req.context.penstock.model = model
        await self.answer(req, resp, self._show(req, resp, model))

    async def _show(self, req: Request, resp: Response, model: str) -> None:
        status = await server_status(self.services, self.statuses.server_id, model)
        if not wants_binary(req) and "application/json" in (req.get_header("Accept") or ""):
            resp.content_type = "application/json"
            resp.data = json_format.MessageToJson(status, preserving_proto_field_name=True).encode()
        else:
            set_message(req, resp, status)
