"""Routes of the contract that this build does not serve yet answer so, in the contract's error form."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.services import Services
from ipc.errors import Unsupported


class UnbuiltResource:
    """Answers 501 after the model has been found, so that an unknown model stays a 404."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """Raise `Unsupported`, or `ModelNotFound`."""
        self._services.engine.find(model)
        operation = req.path.split("/")[2]
        raise Unsupported(f"{operation} is not offered by this build of Penstock")
