"""Falcon's part: refusals are raised, grants become part of the request's context, both are counted."""

from __future__ import annotations

import logging

from falcon.asgi import Request, Response, WebSocket

from frontend.access.gate import Grant, Outcome, outcome_of
from frontend.services import Services
from ipc import logs
from ipc.metrics.families import NO_KEY

log = logging.getLogger(__name__)


class AccessMiddleware:
    """Applies the outcome that `Gate.admit` kept in the scope. Runs after the middleware that makes the context."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def process_request(self, req: Request, resp: Response) -> None:
        """Note the caller. Raises the `AccessRefused`."""
        req.context.penstock.grant = self._apply(req)

    async def process_request_ws(self, req: Request, ws: WebSocket) -> None:
        """Note the caller of a WebSocket. Raises the `AccessRefused`, which refuses the handshake."""
        req.context.penstock.grant = self._apply(req)
        self._count(outcome_of(req.scope), "101")

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Count the request for its key; a change of the server is logged with the name of the key."""
        outcome = outcome_of(req.scope)
        self._count(outcome, str(resp.status_code))
        name = outcome.grant.name
        if outcome.grant.admin:
            log.info("%s %s answered %d for key %s", req.method, req.path, resp.status_code, name)

    def _apply(self, req: Request) -> Grant:
        outcome = outcome_of(req.scope)
        logs.caller.set(outcome.grant.name)
        if outcome.refusal is not None:
            if self._services.started:
                self._services.recorder.refused(outcome.refusal.code.lower())
            raise outcome.refusal
        return outcome.grant

    def _count(self, outcome: Outcome, code: str) -> None:
        if self._services.started and (outcome.grant.name or outcome.refusal is not None):
            self._services.recorder.called(outcome.grant.name or NO_KEY, code)
