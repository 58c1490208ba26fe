"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.openapi.operation import asking
from frontend.protocols.cohere.requests import CohereEmbedRequest, CohereEmbedV1Request
from frontend.protocols.sie.operations import CLIENT_FAULTS, HEADERS, SERVER_FAULTS, RerankResult, faults
from frontend.protocols.sie.schemas import RerankRequest

Integers = list[list[int]] | UnsetType


class CohereError(msgspec.Struct):
    """An error in the form of Cohere."""

    message: Annotated[str, Meta(description="What is wrong, with field, value and limit.")]


class BilledUnits(msgspec.Struct):
    """What a request took."""

    input_tokens: Annotated[int | UnsetType, Meta(description="Tokens of texts.")] = UNSET
    image_tokens: Annotated[int | UnsetType, Meta(description="Tokens or patches of images.")] = UNSET
    images: Annotated[int | UnsetType, Meta(description="Number of images.")] = UNSET
    search_units: Annotated[int | UnsetType, Meta(description="1 for a rerank.")] = UNSET


class CohereMeta(msgspec.Struct):
    """Facts of a request."""

    api_version: Annotated[dict[str, str], Meta(description="`version`: 1 or 2.")]
    billed_units: Annotated[BilledUnits, Meta(description="Tokens and images.")]
    tokens: Annotated[dict[str, int] | UnsetType, Meta(description="`input_tokens` of a rerank.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Which inputs were cut.")] = UNSET


class EmbeddingsByType(msgspec.Struct):
    """Vectors in the types of the request."""

    float_: Annotated[list[list[float]] | UnsetType, Meta(description="As the model gives them.")] = (
        msgspec.field(default=UNSET, name="float")
    )
    int8: Annotated[Integers, Meta(description="Values over the largest of the vector, times 127.")] = UNSET
    uint8: Annotated[Integers, Meta(description="0 for the least of the vector, 255 for the largest.")] = (
        UNSET
    )
    binary: Annotated[Integers, Meta(description="`ubinary` less 128.")] = UNSET
    ubinary: Annotated[Integers, Meta(description="A bit for each value above 0, in bytes.")] = UNSET
    base64: Annotated[list[str] | UnsetType, Meta(description="Little-endian float32.")] = UNSET


class EmbedAnswer(msgspec.Struct):
    """Answer of embed."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    response_type: Annotated[
        Literal["embeddings_floats", "embeddings_by_type"], Meta(description="The form of `embeddings`.")
    ]
    texts: Annotated[list[str], Meta(description="The texts of the request.")]
    embeddings: Annotated[
        EmbeddingsByType | list[list[float]],
        Meta(description="A list only in version 1, where the request names no types."),
    ]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]


class CohereRerankAnswer(msgspec.Struct):
    """Answer of rerank, best first."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    results: Annotated[list[RerankResult], Meta(description="Best first.")]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]


_asking = partial(
    asking,
    tag="inference",
    errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=CohereError),
    parameters=HEADERS,
    timed=True,
)

_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_TEXTS = {"model": _MODEL, "texts": ["first text", "second text"], "input_type": "search_document"}

OPERATIONS = (
    _asking(
        "/v1/embed", "Vectors in the form of Cohere's version 1.", CohereEmbedV1Request, EmbedAnswer, _TEXTS
    ),
    _asking(
        "/v2/embed",
        "Vectors in the form of Cohere's version 2.",
        CohereEmbedRequest,
        EmbedAnswer,
        {**_TEXTS, "embedding_types": ["float", "int8"], "output_dimension": 128},
    ),
    _asking(
        "/v2/rerank",
        "Documents in the order in which they answer a query, in the form of Cohere's version 2.",
        RerankRequest,
        CohereRerankAnswer,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
)
