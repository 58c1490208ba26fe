"""The routes of this contract for the schema, one row each."""

from __future__ import annotations

from typing import Any

import msgspec

from frontend.openapi.operation import JSON, MSGPACK, Operation, Parameter
from frontend.protocols.sie import answers, schemas

CLIENT_FAULTS = (400, 401, 403, 404, 408, 409, 413, 429)
SERVER_FAULTS = (500, 501, 502, 503, 504)
HEADERS = (
    Parameter("X-Request-ID", "header", "Id to echo and log."),
    Parameter(
        "X-Request-Timeout", "header", "Seconds to answer in.", {"type": "number", "exclusiveMinimum": 0}
    ),
    Parameter("traceparent", "header", "W3C trace context."),
)

ASKING = (
    Parameter("X-Penstock-Item-Errors", "header", "1: an item that fails has an error of its own."),
    Parameter("X-Penstock-Warnings", "header", "1: the answer names what the model did not read."),
)


def faults(
    *statuses: int, form: type[msgspec.Struct] = answers.ErrorResponse
) -> dict[int, type[msgspec.Struct] | None]:
    """Errors of these statuses, in `form`."""
    return dict.fromkeys(statuses, form)


def _inference(path: str, summary: str, body: Any, answer: Any, example: dict[str, Any]) -> Operation:
    return Operation(
        "post",
        path,
        summary,
        "inference",
        body=body,
        answer=answer,
        media=(JSON, MSGPACK),
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        parameters=(*HEADERS, *ASKING),
        timed=True,
        example=example,
    )


def _openai(path: str, summary: str, body: Any, answer: Any, example: dict[str, Any]) -> Operation:
    return Operation(
        "post",
        path,
        summary,
        "inference",
        body=body,
        answer=answer,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=answers.OpenAIErrorResponse),
        parameters=HEADERS,
        timed=True,
        example=example,
    )


def _admin(action: str, summary: str) -> Operation:
    return Operation(
        "post",
        f"/v1/admin/{action}/{{model}}",
        summary,
        "admin",
        body=schemas.AdminRequest,
        body_required=False,
        answer=answers.ModelState,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        also={202: "Accepted."},
        parameters=HEADERS,
        example={"wait": True},
    )


_TEXTS = [{"id": "a", "text": "first text"}, {"text": "second text"}]
OPERATIONS = (
    _inference(
        "/v1/encode/{model}",
        "Vectors of texts and images.",
        schemas.EncodeRequest,
        answers.EncodeResponse,
        {"items": _TEXTS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    ),
    _inference(
        "/v1/score/{model}",
        "How well items answer a query.",
        schemas.ScoreRequest,
        answers.ScoreResponse,
        {"query": {"text": "a question"}, "items": _TEXTS},
    ),
    _inference(
        "/v1/extract/{model}",
        "Entities, relations, classifications, objects and structured data.",
        schemas.ExtractRequest,
        answers.ExtractResponse,
        {"items": _TEXTS, "params": {"labels": ["person", "organization"]}},
    ),
    _openai(
        "/v1/embeddings",
        "Vectors in the OpenAI form.",
        schemas.EmbeddingsRequest,
        answers.EmbeddingsResponse,
        {"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["first text", "second text"]},
    ),
    _openai(
        "/v1/rerank",
        "Documents in the order in which they answer a query, in the form of Cohere and Jina.",
        schemas.RerankRequest,
        answers.RerankResponse,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
    Operation(
        "get",
        "/v1/models",
        "All models.",
        "models",
        answer=answers.ModelsResponse,
        errors=faults(401, 403, 429),
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "One model.",
        "models",
        answer=answers.ModelDetails,
        errors=faults(401, 403, 404, 429),
    ),
    _admin("load", "Load a model; a recorded failure is forgotten."),
    _admin("unload", "Take a model out of memory once its work is done."),
)
