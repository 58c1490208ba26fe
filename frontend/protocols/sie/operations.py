"""The routes of this contract, one row each, and the bodies of their answers as types.

Answers about models are rendered from their types in `models`. Answers of inference are written by hand where they
are rendered, since they are large. Arrays are lists in JSON; in msgpack every
`values`, `indices`, `scale` and `offset` array is a msgpack-numpy map.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.protocols.sie import models, schemas
from frontend.protocols.sie.encode import EmbeddingsResource, EncodeResource
from frontend.protocols.sie.errors import ErrorResponse, ModelErrorResponse, OpenAIErrorResponse
from frontend.protocols.sie.extract import ExtractResource
from frontend.protocols.sie.score import RerankResource, ScoreResource
from frontend.routes import JSON, MSGPACK, Parameter, Route, asking
from ipc.wire.extraction import Classification, DetectedObject, Entity, Relation

Dtype = Literal["float32", "float16", "int8", "uint8", "binary"]
Number = int | float
SCORE = "/v1/score"
"""A path of vLLM above routes of this contract, whose form of errors the path has."""


class ItemFault(msgspec.Struct):
    """Why one item failed while its neighbours did not."""

    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]


class DenseVector(msgspec.Struct):
    """One vector; `scale` and `offset` come with int8 and uint8."""

    dims: Annotated[int, Meta(description="Length of a vector.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    values: Annotated[list[Number], Meta(description="The numbers.")]
    scale: Annotated[
        float | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[float | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class SparseVector(msgspec.Struct):
    """Values at some of `dims` indices."""

    dims: Annotated[int | None, Meta(description="Length of a vector.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    indices: Annotated[list[int], Meta(description="Ids of the terms, ascending.")]
    values: Annotated[list[Number], Meta(description="The numbers.")]


class MultiVector(msgspec.Struct):
    """One vector per token; `scale` and `offset` hold one number per token."""

    token_dims: Annotated[int, Meta(description="Length of a token's vector.")]
    num_tokens: Annotated[int, Meta(description="Number of vectors.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    values: Annotated[list[list[Number]], Meta(description="The numbers.")]
    scale: Annotated[
        list[float] | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[list[float] | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class ChunkVectors(msgspec.Struct):
    """One vector per chunk of a document; `spans` are the characters of the chunks, from and up to."""

    dims: Annotated[int, Meta(description="Length of a vector.")]
    num_chunks: Annotated[int, Meta(description="Number of chunks.")]
    dtype: Annotated[Dtype, Meta(description="Type of the numbers.")]
    spans: Annotated[
        list[tuple[int, int]],
        Meta(description="First character of each chunk, and the character behind its last one."),
    ]
    values: Annotated[list[list[Number]], Meta(description="The numbers.")]
    scale: Annotated[
        list[float] | UnsetType,
        Meta(
            description="Scale of integers: the largest magnitude for int8, the range of the values for uint8."
        ),
    ] = UNSET
    offset: Annotated[list[float] | UnsetType, Meta(description="The least value, for uint8.")] = UNSET


class EncodeResult(msgspec.Struct):
    """The wanted outputs of an item, in the order of the request."""

    id: Annotated[str | UnsetType, Meta(description="Id that the request gave the item.")] = UNSET
    dense: Annotated[DenseVector | UnsetType, Meta(description="One vector.")] = UNSET
    sparse: Annotated[SparseVector | UnsetType, Meta(description="Weights of terms.")] = UNSET
    multivector: Annotated[MultiVector | UnsetType, Meta(description="A vector for each token.")] = UNSET
    chunks: Annotated[
        ChunkVectors | UnsetType, Meta(description="A vector for each chunk of the document.")
    ] = UNSET
    error: Annotated[ItemFault | UnsetType, Meta(description="What went wrong.")] = UNSET


class Timing(msgspec.Struct):
    """Milliseconds by phase."""

    total_ms: Annotated[float, Meta(description="From arrival to answer.")]
    queue_ms: Annotated[float, Meta(description="Waiting for the device.")]
    tokenization_ms: Annotated[float, Meta(description="Preparing the inputs.")]
    inference_ms: Annotated[float, Meta(description="On the device.")]
    postprocessing_ms: Annotated[float | None, Meta(description="Behind the device.")]


class EncodeUsage(msgspec.Struct):
    """Tokens of each item, and the indices of items that were cut."""

    tokens: Annotated[list[int], Meta(description="Tokens that the model read.")]
    truncated: Annotated[list[int], Meta(description="Places of items that were cut.")]


class EncodeResponse(msgspec.Struct):
    """Answer of encode; `warnings` are there when the request asks for them."""

    model: Annotated[str, Meta(description="Name of the model.")]
    items: Annotated[list[EncodeResult], Meta(description="The items, in order.")]
    timing: Annotated[Timing, Meta(description="Milliseconds by phase.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


class ScoreEntry(msgspec.Struct):
    """One item at its rank, 0 for the best."""

    item_id: Annotated[str, Meta(description="Id of the item.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")]
    rank: Annotated[int, Meta(description="Place among all items; 0 is the best.")]


class ScoreResponse(msgspec.Struct):
    """Answer of score, best first; `warnings` as for encode."""

    model: Annotated[str, Meta(description="Name of the model.")]
    query_id: Annotated[str | None, Meta(description="Id of the query.")]
    scores: Annotated[list[ScoreEntry], Meta(description="The items, the best first.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


class ExtractResult(msgspec.Struct):
    """The findings in an item; kinds that a model does not give are empty."""

    id: Annotated[
        str, Meta(description="Id that the request gave the item, else `item-` and the place of the item.")
    ]
    entities: Annotated[list[Entity], Meta(description="Places in the text that have a label.")]
    relations: Annotated[list[Relation], Meta(description="Relations between entities.")]
    classifications: Annotated[list[Classification], Meta(description="Classes of the whole item.")]
    objects: Annotated[list[DetectedObject], Meta(description="Objects in the picture.")]
    data: Annotated[dict[str, Any], Meta(description="The answer of models that fill in a form.")]
    error: Annotated[ItemFault | UnsetType, Meta(description="What went wrong.")] = UNSET


class ExtractResponse(msgspec.Struct):
    """Answer of extract; `warnings` as for encode."""

    model: Annotated[str, Meta(description="Name of the model.")]
    items: Annotated[list[ExtractResult], Meta(description="The items, in order.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]
    truncated: Annotated[list[int] | UnsetType, Meta(description="Places of items that were cut.")] = UNSET


class Embedding(msgspec.Struct):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Annotated[Literal["embedding"], Meta(description="Names the form of this object.")]
    index: Annotated[int, Meta(description="Place in the request's list.")]
    embedding: Annotated[list[float] | str, Meta(description="The vector, or its bytes in base64.")]


class EmbeddingsResponse(msgspec.Struct):
    """Answer of embeddings, in the OpenAI form."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[Embedding], Meta(description="The list.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]


class RerankResult(msgspec.Struct):
    """A document by its place in the request."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    relevance_score: Annotated[float, Meta(description="How well the document fits; higher is better.")]
    document: Annotated[dict[str, Any] | UnsetType, Meta(description="The document.")] = UNSET


class RerankResponse(msgspec.Struct):
    """Answer of rerank, best first."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    results: Annotated[list[RerankResult], Meta(description="The documents, the best first.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]
    meta: Annotated[dict[str, Any], Meta(description="Version of the contract, and what is billed.")]


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


def _inference(
    path: str, resource: Any, summary: str, body: Any, answer: Any, example: dict[str, Any]
) -> Route:
    return Route(
        "post",
        path,
        resource,
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


def _openai(path: str, resource: Any, summary: str, body: Any, answer: Any, example: dict[str, Any]) -> Route:
    return asking(
        path,
        resource,
        summary,
        body,
        answer,
        example,
        tag="inference",
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=OpenAIErrorResponse),
        parameters=HEADERS,
        timed=True,
    )


def _admin(action: Literal["load", "unload"], summary: str) -> Route:
    return Route(
        "post",
        f"/v1/admin/{action}/{{model:path}}",
        lambda services: models.AdminResource(services, load=action == "load"),
        summary,
        "admin",
        body=schemas.AdminRequest,
        body_required=False,
        answer=models.ModelState,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        also={202: "Accepted."},
        parameters=HEADERS,
        example={"wait": True},
        need="admin",
        switch="admin",
    )


_TEXTS = [{"id": "a", "text": "first text"}, {"text": "second text"}]
_PAGE = (
    Parameter(
        "limit",
        "query",
        "Most entries of a page; without it there is one page.",
        {"type": "integer", "minimum": 1, "maximum": models.MAX_LIMIT},
    ),
    Parameter("after_id", "query", "The page begins behind this entry."),
    Parameter("before_id", "query", "The page ends before this entry."),
)


ROUTES = (
    _inference(
        "/v1/encode/{model:path}",
        EncodeResource,
        "Vectors of texts and images.",
        schemas.EncodeRequest,
        EncodeResponse,
        {"items": _TEXTS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    ),
    _inference(
        f"{SCORE}/{{model:path}}",
        ScoreResource,
        "How well items answer a query.",
        schemas.ScoreRequest,
        ScoreResponse,
        {"query": {"text": "a question"}, "items": _TEXTS},
    ),
    _inference(
        "/v1/extract/{model:path}",
        ExtractResource,
        "Entities, relations, classifications, objects and structured data.",
        schemas.ExtractRequest,
        ExtractResponse,
        {"items": _TEXTS, "params": {"labels": ["person", "organization"]}},
    ),
    _openai(
        "/v1/embeddings",
        EmbeddingsResource,
        "Vectors in the OpenAI form.",
        schemas.EmbeddingsRequest,
        EmbeddingsResponse,
        {"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["first text", "second text"]},
    ),
    _openai(
        "/v1/rerank",
        RerankResource,
        "Documents in the order in which they answer a query, in the form of Cohere and Jina.",
        schemas.RerankRequest,
        RerankResponse,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
    Route(
        "get",
        "/v1/models",
        models.ModelsResource,
        "All models.",
        "models",
        answer=models.ModelsResponse,
        errors=faults(400, 401, 403, 429),
        parameters=_PAGE,
    ),
    Route(
        "get",
        "/v1/models/{model:path}",
        models.ModelResource,
        "One model.",
        "models",
        answer=models.ModelDetails,
        errors=faults(401, 403, 404, 429, form=ModelErrorResponse),
    ),
    _admin("load", "Load a model; a recorded failure is forgotten."),
    _admin("unload", "Take a model out of memory once its work is done."),
)

OPENAI_FORM = frozenset(
    (SCORE, *(route.path for route in ROUTES if OpenAIErrorResponse in route.errors.values()))
)
"""The paths whose errors are in the form of OpenAI too."""
MODEL_FORM = tuple(f"{route.stem}/" for route in ROUTES if ModelErrorResponse in route.errors.values())
"""The folders whose errors repeat their message for clients of OpenAI."""
