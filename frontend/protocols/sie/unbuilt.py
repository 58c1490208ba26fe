"""Routes of the contract that this build does not serve: they say so, in the contract's error form."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.services import Services
from ipc.errors import InvalidInput


class UnbuiltResource:
    """No model of this build has these capabilities: 404 for an unknown model, 400 for a known one."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """Raise `ModelNotFound` or `InvalidInput`."""
        context = req.context.penstock
        context.model, context.operation = model, req.path.split("/")[2]
        entry = self._services.engine.find(model)
        raise InvalidInput(
            f"model '{entry.id}' does not support {context.operation}; this build offers encode only"
        )
