"""POST /v1/admin/load/{model} and /v1/admin/unload/{model}: models in and out of memory by hand."""

from __future__ import annotations

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.http.disconnect import until_disconnect
from frontend.protocols.sie.schemas import AdminRequest, read_aside
from frontend.services import Services
from ipc.errors import DeadlineExceeded


class AdminResource:
    """Both routes; `load` says which one."""

    def __init__(self, services: Services, *, load: bool) -> None:
        self._services, self._load = services, load

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """200 with the final state, 202 with the present one when nobody waits for the end or it takes too long."""
        services, context = self._services, req.context.penstock
        async with services.bodies.hold(req, context.deadline_ns) as body:
            given = (body or b"{}", "application/json", AdminRequest, services.settings.limits)
            wait = (await read_aside(*given)).wait
        entry = services.directory.find(model)
        state = await until_disconnect(self._run(entry.id, wait is not False, context.deadline_ns), req.scope)
        final = state == ("loaded" if self._load else "available")
        resp.status = falcon.HTTP_200 if final else falcon.HTTP_202
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps({"name": entry.id, "state": state})

    async def _run(self, model: str, wait: bool, deadline_ns: int) -> str:
        directory = self._services.directory
        try:
            return await (directory.load if self._load else directory.unload)(model, wait, deadline_ns)
        except DeadlineExceeded:
            return directory.status(model).state
