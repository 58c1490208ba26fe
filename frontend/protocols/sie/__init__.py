"""The SIE dialect: encode, score, extract, models, and embeddings and rerank in the forms of other APIs.

May be imported by the registry and tables of protocols, and by forms of other servers over its flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.sie import errors
from frontend.protocols.sie.embeddings import EmbeddingsResource
from frontend.protocols.sie.encode import EncodeResource
from frontend.protocols.sie.extract import ExtractResource
from frontend.protocols.sie.models import AdminResource, ModelResource, ModelsResource
from frontend.protocols.sie.rerank import RerankResource
from frontend.protocols.sie.score import ScoreResource
from frontend.services import Services
from ipc.errors import PenstockError, ResourceExhausted


def is_own_client(req: falcon.asgi.Request) -> bool:
    """Whether a client library of SIE sent the request, by its version header or its user agent."""
    agent = (req.get_header("User-Agent") or "").lower()
    return req.get_header("X-SIE-SDK-Version") is not None or any(name in agent for name in _PACKAGES)


_PACKAGES = ("sie-sdk", "sie_sdk")
OPERATIONS = frozenset(("encode", "score", "extract", "embeddings", "rerank"))


_OPENAI = ("/v1/embeddings", "/v1/rerank", "/v1/score")


def _renderer(path: str) -> errors.Render:
    """The form of errors on `path`."""
    if path in _OPENAI:
        return errors.render_openai
    return errors.render_model if path.startswith("/v1/models/") else errors.render


class SieProtocol:
    """Routes and error form of the SIE contract."""

    name = "sie"
    prefixes: Sequence[str] = ("/v1/", "/")

    def __init__(self) -> None:
        self._exhausted_retry_s: float | None = None

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        self._exhausted_retry_s = services.settings.limits.exhausted_retry_s
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

    def inference_at(self, path: str) -> tuple[str, str]:
        """The operation of an inference route, and the model where the path has it."""
        version, _, rest = path.removeprefix("/").partition("/")
        operation, _, model = rest.partition("/")
        return (operation, model) if version == "v1" and operation in OPERATIONS else ("", "")

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            error.retry_after_s = self._exhausted_retry_s
        return _renderer(path)(error, req is not None and is_own_client(req))

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
