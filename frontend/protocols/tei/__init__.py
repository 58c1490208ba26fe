"""The routes of Text Embeddings Inference, whose requests name no model.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.http.inference import InferenceRoute
from frontend.protocols import shared_routes
from frontend.protocols.tei import errors
from frontend.protocols.tei.embed import EmbedAllResource, EmbedResource, EmbedSparseResource
from frontend.protocols.tei.info import InfoResource
from frontend.protocols.tei.predict import PredictResource
from frontend.protocols.tei.rerank import RerankResource
from frontend.protocols.tei.similarity import SimilarityResource
from frontend.protocols.tei.tokens import DecodeResource, TokenizeResource
from frontend.services import Services
from ipc.errors import PenstockError

_RESOURCES: dict[str, type[InferenceRoute]] = {
    "/embed": EmbedResource,
    "/embed_all": EmbedAllResource,
    "/embed_sparse": EmbedSparseResource,
    "/similarity": SimilarityResource,
    "/rerank": RerankResource,
    "/predict": PredictResource,
    "/tokenize": TokenizeResource,
    "/decode": DecodeResource,
}


class TeiProtocol:
    """Routes and error form of TEI. A path that other servers have too is among `prefixes` once it was chosen."""

    name = "tei"

    def __init__(self) -> None:
        self.prefixes: Sequence[str] = ()

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        resources = {path: make(services) for path, make in _RESOURCES.items()}
        self.prefixes = shared_routes.mount(
            app, services, self.name, {**resources, "/info": InfoResource(services)}
        )

    def inference_at(self, path: str) -> tuple[str, str]:
        """The operation of a route; requests name no model."""
        resource = _RESOURCES.get(path)
        return resource.operation if resource else "", ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
