"""The table of routes of ollama, and the answers that the API's description tells of."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

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
from frontend.protocols.ollama.texts import LINES, ChatResource, GenerateResource
from frontend.protocols.ollama.vectors import (
    EmbeddingsResource,
    EmbedResource,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from frontend.routes import JSON, Route, asking


class OllamaError(msgspec.Struct):
    """An error in the form of ollama."""

    error: Annotated[str, Meta(description="The reason, with field, value and limit.")]


class OllamaEnd(msgspec.Struct, kw_only=True):
    """The fields that answers and lines share, and those that only an answer and the last line have.

    Times are in nanoseconds.
    """

    model: Annotated[str, Meta(description="Name of the model, as the request has it.")]
    created_at: Annotated[str, Meta(description="Time of the line, as RFC 3339.")]
    done: Annotated[bool, Meta(description="Whether this is the end.")]
    done_reason: Annotated[
        Literal["stop", "length", "load"] | UnsetType, Meta(description="Why the text ended.")
    ] = UNSET
    total_duration: Annotated[int | UnsetType, Meta(description="Time of the whole request.")] = UNSET
    load_duration: Annotated[int | UnsetType, Meta(description="Time until the model was loaded.")] = UNSET
    prompt_eval_count: Annotated[int | UnsetType, Meta(description="Tokens of the prompt.")] = UNSET
    prompt_eval_duration: Annotated[int | UnsetType, Meta(description="Time until the first token.")] = UNSET
    eval_count: Annotated[int | UnsetType, Meta(description="Generated tokens.")] = UNSET
    eval_duration: Annotated[int | UnsetType, Meta(description="Time behind the first token.")] = UNSET
    logprobs: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="Log probabilities of the tokens.")
    ] = UNSET


class OllamaAnswerMessage(msgspec.Struct):
    """What the model says, thinks and calls."""

    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[str, Meta(description="What is said.")]
    thinking: Annotated[str | UnsetType, Meta(description="What the model thought.")] = UNSET
    tool_calls: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="Functions that the model calls.")
    ] = UNSET


class OllamaChatAnswer(OllamaEnd, kw_only=True):
    """An answer, or one line of a stream."""

    message: Annotated[OllamaAnswerMessage, Meta(description="What is said.")]


class OllamaGenerateAnswer(OllamaEnd, kw_only=True):
    """An answer, or one line of a stream."""

    response: Annotated[str, Meta(description="The text.")]
    thinking: Annotated[str | UnsetType, Meta(description="What the model thought.")] = UNSET


class OllamaEmbedAnswer(msgspec.Struct):
    """Vectors of length 1."""

    model: Annotated[str, Meta(description="Name of the model, as the request has it.")]
    embeddings: Annotated[list[list[float]], Meta(description="A vector for each text.")]
    total_duration: Annotated[int, Meta(description="Time of the whole request in nanoseconds.")]
    prompt_eval_count: Annotated[int, Meta(description="Tokens of all texts.")]


class OllamaEmbeddingsAnswer(msgspec.Struct):
    """One vector."""

    embedding: Annotated[list[float], Meta(description="The vector, as the model gives it.")]


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 413, 429, 500, 503, 504), OllamaError
)
_asking = partial(asking, tag="ollama", errors=_FAULTS, error_code_header=False, pages=True)
_VECTORS = "sentence-transformers/all-MiniLM-L6-v2"


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
