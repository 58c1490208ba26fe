"""Before and after every request: ids, headers, error rendering, counting, one log line for failures."""

from __future__ import annotations

import logging
import time
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend import context
from frontend.protocols.registry import WireProtocol, protocol_of
from frontend.services import Services
from ipc import logs
from ipc.errors import Cancelled, Draining, PenstockError

log = logging.getLogger(__name__)


class RequestMiddleware:
    """Makes the request's context, sets the common headers, and records the outcome."""

    def __init__(self, services: Services, known: list[WireProtocol]) -> None:
        self._services, self._known = services, known

    async def process_request(self, req: Request, resp: Response) -> None:
        """Ids and deadline; while draining, inference is still answered, since the connection was accepted before."""
        made = context.make(req, self._services.settings.limits)
        req.context.penstock = made
        logs.request_id.set(made.request_id)
        context.shorten(made, req, self._services.settings.limits)

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Common headers and metrics."""
        made: context.RequestContext | None = getattr(req.context, "penstock", None)
        if made is None:
            made = req.context.penstock = context.make_plain()
        resp.set_header("X-Request-ID", made.request_id)
        resp.set_header("X-Trace-ID", made.trace_id)
        resp.set_header("X-SIE-Server-Version", self._services.settings.server.version_header)
        if made.operation and self._services.started:
            made.phases.setdefault("total", (time.perf_counter() - made.started) * 1e3)
            protocol = protocol_of(req.path, self._known).name
            self._services.recorder.finished(
                protocol, made.operation, made.model, str(resp.status_code), made.error, made.phases
            )


class ErrorRenderer:
    """Turns exceptions into the protocol's form of an error."""

    def __init__(self, known: list[WireProtocol]) -> None:
        self._known = known

    async def penstock(
        self, req: Request, resp: Response, error: PenstockError, params: dict[str, Any]
    ) -> None:
        """An error of the tree."""
        made = getattr(req.context, "penstock", None)
        if made is not None:
            made.error = error.code
        if isinstance(error, Cancelled):
            resp.status = 499
            return
        status, body, headers = protocol_of(req.path, self._known).render_error(error, req.path)
        resp.status = status
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(body)
        resp.set_headers(headers)
        if status >= 500 and not isinstance(error, Draining) and not error.retryable:
            log.warning("%s %s answered %d %s: %s", req.method, req.path, status, error.code, error.message)

    async def unexpected(
        self, req: Request, resp: Response, error: Exception, params: dict[str, Any]
    ) -> None:
        """A bug: its text stays in the log."""
        log.error("%s %s failed", req.method, req.path, exc_info=error)
        await self.penstock(req, resp, PenstockError("internal error"), params)

    @staticmethod
    async def http(req: Request, resp: Response, error: falcon.HTTPError, params: dict[str, Any]) -> None:
        """Unknown path, wrong method, and Falcon's own refusals of bad headers."""
        resp.status = error.status
        if error.headers:
            resp.set_headers(error.headers)
        title = error.title or falcon.code_to_http_status(error.status)[4:]
        detail: Any = title
        if resp.status_code not in (404, 405):
            detail = {"code": "INVALID_INPUT", "message": error.description or title}
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(
            {"detail": {404: "Not Found", 405: "Method Not Allowed"}.get(resp.status_code, detail)}
        )
