"""The base of every POST route that runs a model: one place that ends the work of a client that goes away.

A protocol's route is one subclass, whose `respond` parses the request, runs it and renders the answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from falcon.asgi import Request, Response

from frontend.http.disconnect import until_disconnect
from frontend.scope import RequestScope
from frontend.services import Services


class InferenceRoute(ABC):
    """One route; `operation` names it in metrics, logs and traces."""

    operation: ClassVar[str]

    def __init__(self, services: Services) -> None:
        self.services = services

    async def on_post(self, req: Request, resp: Response, target: Any = "", model: str = "") -> None:
        """One request; `target` or `model` comes from the path. Raises a `PenstockError`, which ends the request."""
        scope: RequestScope = req.context.penstock
        scope.operation = self.operation
        if not self.respond_at_once(req, resp, scope, target or model):
            await until_disconnect(self.respond(req, resp, scope, target or model), req.scope)

    def respond_at_once(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> bool:
        """Answer a request for which nothing need be awaited; returns whether there was such an answer."""
        return False

    @abstractmethod
    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """Parse, run, render. Cancelled when the client goes away."""
