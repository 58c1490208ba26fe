"""Embed in the forms of Cohere's API, versions 1 and 2, and rerank in the form of version 2, over the flow of SIE.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports `frontend.protocols.sie` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.http.inference import InferenceRoute
from frontend.protocols.cohere import errors
from frontend.protocols.cohere.embed import EmbedResource, EmbedV1Resource
from frontend.protocols.cohere.rerank import RerankV2Resource
from frontend.services import Services
from ipc.errors import PenstockError

_ROUTES: dict[str, type[InferenceRoute]] = {
    "/v1/embed": EmbedV1Resource,
    "/v2/embed": EmbedResource,
    "/v2/rerank": RerankV2Resource,
}


class CohereProtocol:
    """Routes and error form of Cohere; `/v1/rerank` is a route of SIE and answers in both forms."""

    name = "cohere"
    prefixes: Sequence[str] = tuple(_ROUTES)

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        for path, resource in _ROUTES.items():
            app.add_route(path, resource(services))

    def inference_at(self, path: str) -> tuple[str, str]:
        """(operation, "") of `path`: the body names the model."""
        return (_ROUTES[path].operation if path in _ROUTES else ""), ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
