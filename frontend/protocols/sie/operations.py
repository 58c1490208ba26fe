"""The routes of this contract for the API's description, one row each, and the bodies of their answers as types.

Answers about models are rendered from their types in `models`. Answers of inference are written by hand where they
are rendered, since they are large. Arrays are lists in JSON; in msgpack every
`values`, `indices`, `scale` and `offset` array is a msgpack-numpy map.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from frontend.openapi.operation import JSON, MSGPACK, Operation, Parameter, asking
from frontend.protocols.sie import listing, models, schemas
from ipc.wire.extraction import Classification, DetectedObject, Entity, Relation

Dtype = Literal["float32", "float16", "int8", "uint8", "binary"]
Number = int | float


class ItemFault(msgspec.Struct):
    """Why one item failed while its neighbours did not."""

    code: str
    message: str


class DenseVector(msgspec.Struct):
    """One vector; `scale` and `offset` come with int8 and uint8."""

    dims: int
    dtype: Dtype
    values: list[Number]
    scale: float | UnsetType = UNSET
    offset: float | UnsetType = UNSET


class SparseVector(msgspec.Struct):
    """Values at some of `dims` indices."""

    dims: int | None
    dtype: Dtype
    indices: list[int]
    values: list[Number]


class MultiVector(msgspec.Struct):
    """One vector per token; `scale` and `offset` hold one number per token."""

    token_dims: int
    num_tokens: int
    dtype: Dtype
    values: list[list[Number]]
    scale: list[float] | UnsetType = UNSET
    offset: list[float] | UnsetType = UNSET


class ChunkVectors(msgspec.Struct):
    """One vector per chunk of a document; `spans` are the characters of the chunks, from and up to."""

    dims: int
    num_chunks: int
    dtype: Dtype
    spans: list[tuple[int, int]]
    values: list[list[Number]]
    scale: list[float] | UnsetType = UNSET
    offset: list[float] | UnsetType = UNSET


class EncodeResult(msgspec.Struct):
    """The wanted outputs of an item, in the order of the request."""

    id: str | UnsetType = UNSET
    dense: DenseVector | UnsetType = UNSET
    sparse: SparseVector | UnsetType = UNSET
    multivector: MultiVector | UnsetType = UNSET
    chunks: ChunkVectors | UnsetType = UNSET
    error: ItemFault | UnsetType = UNSET


class Timing(msgspec.Struct):
    """Milliseconds by phase."""

    total_ms: float
    queue_ms: float
    tokenization_ms: float
    inference_ms: float
    postprocessing_ms: float | None


class EncodeUsage(msgspec.Struct):
    """Tokens of each item, and the indices of items that were cut."""

    tokens: list[int]
    truncated: list[int]


class EncodeResponse(msgspec.Struct):
    """Answer of encode; `warnings` are there when the request asks for them."""

    model: str
    items: list[EncodeResult]
    timing: Timing
    usage: EncodeUsage | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ScoreEntry(msgspec.Struct):
    """One item at its rank, 0 for the best."""

    item_id: str
    score: float
    rank: int


class ScoreResponse(msgspec.Struct):
    """Answer of score, best first; `warnings` as for encode."""

    model: str
    query_id: str | None
    scores: list[ScoreEntry]
    usage: EncodeUsage | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ExtractResult(msgspec.Struct):
    """The findings in an item; kinds that a model does not give are empty."""

    id: str
    entities: list[Entity]
    relations: list[Relation]
    classifications: list[Classification]
    objects: list[DetectedObject]
    data: dict[str, Any]
    error: ItemFault | UnsetType = UNSET


class ExtractResponse(msgspec.Struct):
    """Answer of extract; `warnings` as for encode."""

    model: str
    items: list[ExtractResult]
    usage: EncodeUsage | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    truncated: list[int] | UnsetType = UNSET


class Embedding(msgspec.Struct):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(msgspec.Struct):
    """Answer of embeddings, in the OpenAI form."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class RerankResult(msgspec.Struct):
    """A document by its place in the request."""

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET


class RerankResponse(msgspec.Struct):
    """Answer of rerank, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: dict[str, Any]


class ErrorDetail(msgspec.Struct):
    """Stable code and text of an error; some codes add fields."""

    code: str
    message: str


class ErrorResponse(msgspec.Struct):
    """An error; on unknown paths and wrong methods `detail` is a text."""

    detail: ErrorDetail | str


class OpenAIFault(msgspec.Struct):
    """The error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str


class ModelErrorResponse(ErrorResponse):
    """An error of the route of one model, with its message once more."""

    message: str


class OpenAIErrorResponse(msgspec.Struct):
    """An error in both forms."""

    error: OpenAIFault
    detail: ErrorDetail
    message: str


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
    *statuses: int, form: type[msgspec.Struct] = ErrorResponse
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
    return asking(
        path,
        summary,
        body,
        answer,
        example,
        tag="inference",
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=OpenAIErrorResponse),
        parameters=HEADERS,
        timed=True,
    )


def _admin(action: str, summary: str) -> Operation:
    return Operation(
        "post",
        f"/v1/admin/{action}/{{model}}",
        summary,
        "admin",
        body=schemas.AdminRequest,
        body_required=False,
        answer=models.ModelState,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        also={202: "Accepted."},
        parameters=HEADERS,
        example={"wait": True},
    )


_TEXTS = [{"id": "a", "text": "first text"}, {"text": "second text"}]
_PAGE = (
    Parameter(
        "limit",
        "query",
        "Most entries of a page; without it there is one page.",
        {"type": "integer", "minimum": 1, "maximum": listing.MAX_LIMIT},
    ),
    Parameter("after_id", "query", "The page begins behind this entry."),
    Parameter("before_id", "query", "The page ends before this entry."),
)

OPERATIONS = (
    _inference(
        "/v1/encode/{model}",
        "Vectors of texts and images.",
        schemas.EncodeRequest,
        EncodeResponse,
        {"items": _TEXTS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    ),
    _inference(
        "/v1/score/{model}",
        "How well items answer a query.",
        schemas.ScoreRequest,
        ScoreResponse,
        {"query": {"text": "a question"}, "items": _TEXTS},
    ),
    _inference(
        "/v1/extract/{model}",
        "Entities, relations, classifications, objects and structured data.",
        schemas.ExtractRequest,
        ExtractResponse,
        {"items": _TEXTS, "params": {"labels": ["person", "organization"]}},
    ),
    _openai(
        "/v1/embeddings",
        "Vectors in the OpenAI form.",
        schemas.EmbeddingsRequest,
        EmbeddingsResponse,
        {"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["first text", "second text"]},
    ),
    _openai(
        "/v1/rerank",
        "Documents in the order in which they answer a query, in the form of Cohere and Jina.",
        schemas.RerankRequest,
        RerankResponse,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
    Operation(
        "get",
        "/v1/models",
        "All models.",
        "models",
        answer=models.ModelsResponse,
        errors=faults(400, 401, 403, 429),
        parameters=_PAGE,
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "One model.",
        "models",
        answer=models.ModelDetails,
        errors=faults(401, 403, 404, 429, form=ModelErrorResponse),
    ),
    _admin("load", "Load a model; a recorded failure is forgotten."),
    _admin("unload", "Take a model out of memory once its work is done."),
)
