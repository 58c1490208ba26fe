"""The routes of ollama beside those of TensorRT Inference Server below /api, and the form of its errors.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports the flow of SIE.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import falcon

from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.ollama.models import (
    INSTEAD,
    InsteadResource,
    ProcessesResource,
    ShowResource,
    TagsResource,
    VersionResource,
)
from frontend.protocols.ollama.texts import PROTOCOL, ChatResource, GenerateResource, status_of
from frontend.protocols.ollama.vectors import EmbeddingsResource, EmbedResource
from frontend.resources.sending import InferenceRoute
from frontend.services import Services

_FOLDER = "/api"
_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/api/chat": ChatResource,
    "/api/generate": GenerateResource,
    "/api/embed": EmbedResource,
    "/api/embeddings": EmbeddingsResource,
}
_OTHERS: dict[str, Callable[[Services], Any]] = {
    "/api/tags": TagsResource,
    "/api/ps": ProcessesResource,
    "/api/show": ShowResource,
    "/api/version": VersionResource,
    **{path: partial(InsteadResource, reason) for path, reason in INSTEAD.items()},
}
_UNKNOWN = (
    "there is nothing at this path: /api has the routes of ollama (docs/ollama.md) and those of TensorRT Inference "
    "Server, version 1 (docs/trtis.md)"
)


def _body(status: int, text: str) -> dict[str, Any]:
    return {"error": text}


class OllamaProtocol(ServerProtocol):
    """Routes and error form of ollama: `{"error": message}`, also for all paths below /api that no protocol has."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, _INFERENCE, ErrorForm(status_of, _body), others=_OTHERS, folder=_FOLDER)

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """(status, JSON body, headers) of an error of the framework."""
        if error.status_code == 404:
            return 404, _body(404, _UNKNOWN), {}
        return super().render_http(error, path)
