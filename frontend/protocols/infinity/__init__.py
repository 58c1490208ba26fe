"""The routes of infinity: embeddings of texts and images, classes, rerank and models.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.http.inference import InferenceRoute
from frontend.protocols import shared_routes
from frontend.protocols.infinity.classify import InfinityClassifyResource
from frontend.protocols.infinity.embeddings import MultimodalResource
from frontend.protocols.infinity.models import InfinityModelsResource
from frontend.protocols.infinity.rerank import InfinityRerankResource
from frontend.protocols.sie import bare_errors
from frontend.services import Services
from ipc.errors import PenstockError

_RESOURCES: dict[str, type[InferenceRoute]] = {
    "/embeddings": MultimodalResource,
    "/classify": InfinityClassifyResource,
    "/rerank": InfinityRerankResource,
}


class InfinityProtocol:
    """Routes and error form of infinity. A path that other servers have too is a prefix once it was chosen."""

    name = "infinity"

    def __init__(self) -> None:
        self.prefixes: Sequence[str] = ()

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        resources = {path: make(services) for path, make in _RESOURCES.items()}
        self.prefixes = shared_routes.mount(
            app, services, self.name, {**resources, "/models": InfinityModelsResource(services)}
        )

    def inference_at(self, path: str) -> tuple[str, str]:
        """The operation of a route; the body names the model."""
        resource = _RESOURCES.get(path)
        return resource.operation if resource else "", ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error."""
        return bare_errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return bare_errors.render_http(error)
