"""The SIE dialect: encode, score, extract, models, and embeddings and rerank in the forms of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon.asgi

from frontend.protocols.sie import errors
from frontend.protocols.sie.admin import AdminResource
from frontend.protocols.sie.embeddings import EmbeddingsResource
from frontend.protocols.sie.encode import EncodeResource
from frontend.protocols.sie.extract import ExtractResource
from frontend.protocols.sie.models import ModelResource, ModelsResource
from frontend.protocols.sie.rerank import RerankResource
from frontend.protocols.sie.score import ScoreResource
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
        app.add_route("/v1/score/{model:path}", ScoreResource(services))
        app.add_route("/v1/rerank", RerankResource(services))
        app.add_route("/v1/extract/{model:path}", ExtractResource(services))

        if services.settings.server.admin:
            app.add_route("/v1/admin/load/{model:path}", AdminResource(services, load=True))
            app.add_route("/v1/admin/unload/{model:path}", AdminResource(services, load=False))

    def render_error(self, error: PenstockError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        render = errors.render_openai if path in ("/v1/embeddings", "/v1/rerank") else errors.render
        return render(error)
