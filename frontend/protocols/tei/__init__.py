"""The routes of Text Embeddings Inference, whose requests name no model.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols import shared_routes
from frontend.protocols.tei import errors
from frontend.protocols.tei.embed import EmbedResource
from frontend.protocols.tei.info import InfoResource
from frontend.protocols.tei.rerank import RerankResource
from frontend.services import Services
from ipc.errors import PenstockError

_OPERATIONS = {
    "/embed": EmbedResource.operation,
    "/rerank": RerankResource.operation,
}


class TeiProtocol:
    """Routes and error form of TEI. A path that other servers have too is among `prefixes` once it was chosen."""

    name = "tei"

    def __init__(self) -> None:
        self.prefixes: Sequence[str] = ()

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        self.prefixes = shared_routes.mount(
            app,
            services,
            self.name,
            {
                "/embed": EmbedResource(services),
                "/rerank": RerankResource(services),
                "/info": InfoResource(services),
            },
        )

    def inference_at(self, path: str) -> tuple[str, str]:
        """The operation of a route; requests name no model."""
        return _OPERATIONS.get(path, ""), ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
