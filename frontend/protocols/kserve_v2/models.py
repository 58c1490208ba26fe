"""All paths below /v2/models: what a path ends with decides which endpoint answers."""

from __future__ import annotations

from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import paths
from frontend.protocols.kserve_v2.generate import GenerateResource
from frontend.protocols.kserve_v2.infer import InferResource
from frontend.protocols.kserve_v2.model import ConfigResource, MetadataResource, ModelReadyResource
from frontend.protocols.kserve_v2.server_settings import TraceResource
from frontend.protocols.kserve_v2.statistics import StatisticsResource
from frontend.services import Services
from frontend.tensors import served

ALL_STATISTICS = "stats"


class ModelsResource:
    """The routes of one model, and the statistics of all."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services = services
        given = (services, restrictions)
        self._statistics = StatisticsResource(*given)
        infer = InferResource(*given)
        self._actions: dict[str, Any] = {
            "": MetadataResource(*given),
            "ready": ModelReadyResource(*given),
            "infer": infer,
            "config": ConfigResource(*given),
            "stats": self._statistics,
            "generate": GenerateResource(infer, stream=False),
            "generate_stream": GenerateResource(infer, stream=True),
            "trace/setting": TraceResource(*given),
        }

    async def on_get(self, req: Request, resp: Response, tail: str) -> None:
        """A GET by its path."""
        if tail.rstrip("/") == ALL_STATISTICS:
            await self._statistics.on_get(req, resp)
            return
        await self._answer(req, resp, tail, "on_get")

    async def on_head(self, req: Request, resp: Response, tail: str) -> None:
        """A HEAD by its path, where a GET has no effect."""
        await self._answer(req, resp, tail, "on_head")

    async def on_post(self, req: Request, resp: Response, tail: str) -> None:
        """A POST by its path."""
        if tail.rstrip("/") == ALL_STATISTICS:
            raise falcon.HTTPMethodNotAllowed(["GET"])
        await self._answer(req, resp, tail, "on_post")

    async def _answer(self, req: Request, resp: Response, tail: str, method: str) -> None:
        target = paths.parse(tail)
        if target is None or (target.action == "trace/setting" and target.version is not None):
            raise falcon.HTTPNotFound
        resource = self._actions[target.action]
        responder = getattr(resource, method, None)
        if responder is None:
            if not target.action:
                # The rest of the path may be no model at all.
                served.states(self._services, target.name)
            raise falcon.HTTPMethodNotAllowed(_methods(resource))
        await responder(req, resp, target)


def _methods(resource: Any) -> list[str]:
    return [name for name in ("GET", "HEAD", "POST") if hasattr(resource, f"on_{name.lower()}")]
