"""The routes of ollama beside those of TensorRT Inference Server below /api, and the form of its errors.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import falcon
import msgspec
from msgspec import Meta

from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.ollama.models import (
    INSTEAD,
    InsteadResource,
    OllamaProcesses,
    OllamaShown,
    OllamaShowRequest,
    OllamaTags,
    OllamaVersion,
    ProcessesResource,
    ShowResource,
    TagsResource,
    VersionResource,
)
from frontend.protocols.ollama.requests import OllamaChatRequest, OllamaGenerateRequest
from frontend.protocols.ollama.texts import (
    LINES,
    PROTOCOL,
    ChatResource,
    GenerateResource,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    status_of,
)
from frontend.protocols.ollama.vectors import (
    EmbeddingsResource,
    EmbedResource,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from frontend.route_rows import JSON, Route, asking

_VECTORS = "sentence-transformers/all-MiniLM-L6-v2"
_UNKNOWN = (
    "there is nothing at this path: /api has the routes of ollama (docs/ollama.md) and those of TensorRT Inference "
    "Server, version 1 (docs/trtis.md)"
)


class OllamaError(msgspec.Struct):
    """An error in the form of ollama."""

    error: Annotated[str, Meta(description="The reason, with field, value and limit.")]


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 413, 429, 500, 503, 504), OllamaError
)
_asking = partial(asking, tag="ollama", errors=_FAULTS, error_code_header=False, pages=True)


def _get(path: str, resource: Any, summary: str, answer: type[msgspec.Struct]) -> Route:
    errors: dict[int, type[msgspec.Struct] | None] = dict.fromkeys((401, 403, 429), OllamaError)
    return Route(
        "get",
        path,
        resource,
        summary,
        "ollama",
        answer=answer,
        errors=errors,
        error_code_header=False,
        pages=True,
    )


ROUTES = (
    _asking(
        "/api/chat",
        ChatResource,
        "Continue a conversation, in the form of ollama.",
        OllamaChatRequest,
        OllamaChatAnswer,
        {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "stream": False},
        media=(JSON, LINES),
    ),
    _asking(
        "/api/generate",
        GenerateResource,
        "Answer a prompt, in the form of ollama.",
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        {"model": "default", "prompt": "Hello", "stream": False},
        media=(JSON, LINES),
    ),
    _asking(
        "/api/embed",
        EmbedResource,
        "Vectors of length 1, in the form of ollama.",
        OllamaEmbedRequest,
        OllamaEmbedAnswer,
        {"model": _VECTORS, "input": ["first text", "second text"]},
        timed=True,
    ),
    _asking(
        "/api/embeddings",
        EmbeddingsResource,
        "The vector of one text, in the older form of ollama.",
        OllamaEmbeddingsRequest,
        OllamaEmbeddingsAnswer,
        {"model": _VECTORS, "prompt": "a text"},
        timed=True,
    ),
    _asking(
        "/api/show",
        ShowResource,
        "What is known of one model, in the form of ollama.",
        OllamaShowRequest,
        OllamaShown,
        {"model": _VECTORS},
    ),
    _get(
        "/api/tags",
        TagsResource,
        "The models that generate text or give vectors, in the form of ollama.",
        OllamaTags,
    ),
    _get("/api/ps", ProcessesResource, "The loaded models, in the form of ollama.", OllamaProcesses),
    _get("/api/version", VersionResource, "The version of the server, in the form of ollama.", OllamaVersion),
    *(Route("post", path, partial(InsteadResource, reason)) for path, reason in INSTEAD.items()),
)


def _body(status: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(OllamaError(text))
    return body


class OllamaProtocol(ServerProtocol):
    """Routes and error form of ollama: `{"error": message}`, also for all paths below /api that no protocol has."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES, ErrorForm(status_of, _body), folders=("/api",))

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """(status, JSON body, headers) of an error of the framework."""
        if error.status_code == 404:
            return 404, _body(404, _UNKNOWN), {}
        return super().render_http(error, path)
