"""The routes of vLLM beside those of OpenAI: pooling, scores, classes and tokens.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.http.inference import InferenceRoute
from frontend.protocols import shared_routes
from frontend.protocols.sie import bare_errors
from frontend.protocols.vllm.classify import VllmClassifyResource
from frontend.protocols.vllm.pooling import PoolingResource
from frontend.protocols.vllm.scoring import DocumentsResource, PairScoreResource
from frontend.protocols.vllm.tokens import PromptResource, TokenIdsResource
from frontend.services import Services
from ipc.errors import PenstockError

_RESOURCES: dict[str, type[InferenceRoute]] = {
    "/pooling": PoolingResource,
    "/score": PairScoreResource,
    "/v1/score": PairScoreResource,
    "/rerank": DocumentsResource,
    "/classify": VllmClassifyResource,
    "/tokenize": PromptResource,
    "/detokenize": TokenIdsResource,
}
_OF_SIE = "/v1/score"
"""Below this path are routes of SIE, whose names of models follow."""


class VllmProtocol:
    """Routes and error form of vLLM. A path that other servers have too is among `prefixes` once it was chosen."""

    name = "vllm"

    def __init__(self) -> None:
        self.prefixes: Sequence[str] = ()

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        resources = {path: make(services) for path, make in _RESOURCES.items()}
        paths = shared_routes.mount(app, services, self.name, resources)
        self.prefixes = tuple(path for path in paths if path != _OF_SIE)

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
