"""Falcon's part: pages of other sites get leave, refusals are raised, grants become part of the request's context."""

from __future__ import annotations

import logging
from typing import Any

from falcon.asgi import Request, Response, WebSocket

from frontend.access.cors import CorsMiddleware
from frontend.access.gate import Decision, Grant, decision_of
from frontend.services import Services
from ipc import logs
from ipc.metrics.families import NO_KEY

log = logging.getLogger(__name__)


class AccessMiddleware:
    """Applies the decision that `Gate.admit` kept in the scope. Runs after the middleware that makes the context."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def process_request(self, req: Request, resp: Response) -> None:
        """Note the caller. Raises the `AccessRefused`."""
        req.context.penstock.grant = self._apply(req)

    async def process_request_ws(self, req: Request, ws: WebSocket) -> None:
        """Note the caller of a WebSocket. Raises the `AccessRefused`, which refuses the handshake."""
        req.context.penstock.grant = self._apply(req)
        self._count(decision_of(req.scope), "101")

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Count the request for its key; a change of the server is logged with the name of the key."""
        decision = decision_of(req.scope)
        self._count(decision, str(resp.status_code))
        name = decision.grant.name
        if decision.grant.admin:
            log.info("%s %s answered %d for key %s", req.method, req.path, resp.status_code, name)

    def _apply(self, req: Request) -> Grant:
        decision = decision_of(req.scope)
        logs.caller.set(decision.grant.name)
        if decision.refusal is not None:
            if self._services.started:
                self._services.recorder.refused(decision.refusal.code.lower())
            raise decision.refusal
        return decision.grant

    def _count(self, decision: Decision, code: str) -> None:
        if self._services.started and (decision.grant.name or decision.refusal is not None):
            self._services.recorder.called(decision.grant.name or NO_KEY, code)


def access_middleware(services: Services) -> list[Any]:
    """The middleware of this package, in its order: a preflight is answered before anybody asks for a key."""
    return [CorsMiddleware(services.settings.server.cors_origins), AccessMiddleware(services)]
