"""The SIE dialect: encode, models, and the OpenAI form of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon.asgi

from frontend.protocols.sie import errors
from frontend.protocols.sie.embeddings import EmbeddingsResource
from frontend.protocols.sie.encode import EncodeResource
from frontend.protocols.sie.models import ModelResource, ModelsResource
from frontend.protocols.sie.unbuilt import UnbuiltResource
from frontend.services import Services
from ipc.errors import PenstockError


class SieProtocol:
    """Routes and error form of the SIE contract."""

    name = "sie"
    prefixes: Sequence[str] = ("/v1/", "/")

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        app.add_route("/v1/encode/{model:path}", EncodeResource(services))
        app.add_route("/v1/embeddings", EmbeddingsResource(services))
        app.add_route("/v1/models", ModelsResource(services))
        app.add_route("/v1/models/{model:path}", ModelResource(services))
        for route in ("/v1/score/{model:path}", "/v1/extract/{model:path}"):
            app.add_route(route, UnbuiltResource(services))

    def render_error(self, error: PenstockError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        render = errors.render_openai if path == "/v1/embeddings" else errors.render
        return render(error)
