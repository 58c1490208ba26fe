"""/v2/logging and /v2/trace/setting, the latter also for one model."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers, describing
from frontend.protocols.kserve_v2.paths import Target
from frontend.protocols.kserve_v2.schemas import LOGGING, TRACE
from frontend.services import Services


class LoggingResource:
    """What the server logs."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response) -> None:
        """The present state."""
        self._restrictions.check("logging", req.get_header)
        answers.send(resp, self._services.extensions.log_settings.get())

    async def on_post(self, req: Request, resp: Response) -> None:
        """Change what the body names; the answer is the complete new state."""
        self._restrictions.check("logging", req.get_header)
        changes = await answers.body_of(self._services, req, LOGGING)
        until_ns = req.context.penstock.deadline_ns
        answers.send(resp, await self._services.extensions.log_settings.update(changes, until_ns))


class TraceResource:
    """What is traced, by the server or for one model."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, target: Target | None = None) -> None:
        """The present state."""
        model = self._model(req, target)
        answers.send(resp, self._services.extensions.trace_settings.get(model))

    async def on_post(self, req: Request, resp: Response, target: Target | None = None) -> None:
        """Change what the body names; null resets. The answer is the complete new state."""
        model = self._model(req, target)
        changes = await answers.body_of(self._services, req, TRACE)
        settings, until_ns = self._services.extensions.trace_settings, req.context.penstock.deadline_ns
        answers.send(resp, await settings.update(changes, until_ns, model))

    def _model(self, req: Request, target: Target | None) -> str:
        """Full name of the model, "" for the server. Raises `InvalidInput` for an unknown one."""
        self._restrictions.check("trace", req.get_header)
        return "" if target is None else describing.traced_model(self._services, target.name)
