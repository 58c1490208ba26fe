"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frontend.openapi.operation import Operation, asking
from frontend.protocols.foreign.bare_errors import FAULTS, BareError
from frontend.protocols.infinity.models import InfinityModels
from frontend.protocols.infinity.schemas import (
    InfinityClassifyRequest,
    InfinityRerankRequest,
    MultimodalRequest,
)


class InfinityUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class _Answer(msgspec.Struct):
    model: Annotated[str, Meta(description="Name of the model that answered.")]
    usage: Annotated[InfinityUsage, Meta(description="Counts of tokens.")]
    id: Annotated[str, Meta(description="A new id of the answer.")]
    created: Annotated[int, Meta(description="When the answer was made, in seconds since 1970.")]


class InfinityVector(msgspec.Struct):
    """The vector of one input."""

    object: Annotated[Literal["embedding"], Meta(description="Kind of what is told here.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64.")]
    index: Annotated[int, Meta(description="Place of the input in the request.")]


class MultimodalAnswer(_Answer):
    """Answer of /embeddings."""

    object: Annotated[Literal["list"], Meta(description="Kind of what is told here.")]
    data: Annotated[list[InfinityVector], Meta(description="The list.")]


class InfinityClass(msgspec.Struct):
    """A class of a text."""

    score: Annotated[float, Meta(description="How likely the class is; with `raw_scores` the logit.")]
    label: Annotated[str, Meta(description="Name of the class.")]


class InfinityClassifyAnswer(_Answer):
    """Answer of /classify: for each text its classes, the likeliest first."""

    object: Annotated[Literal["classify"], Meta(description="Kind of what is told here.")]
    data: Annotated[list[list[InfinityClass]], Meta(description="The list.")]


class InfinityRank(msgspec.Struct):
    """A document at its rank."""

    relevance_score: Annotated[float, Meta(description="How well the document answers the query.")]
    index: Annotated[int, Meta(description="Place of the document in the request.")]
    document: Annotated[str | None, Meta(description="The document, with `return_documents`.")]


class InfinityRerankAnswer(_Answer):
    """Answer of /rerank."""

    object: Annotated[Literal["rerank"], Meta(description="Kind of what is told here.")]
    results: Annotated[list[InfinityRank], Meta(description="The documents, the best first.")]


_asking = partial(asking, tag="infinity", errors=FAULTS, error_code_header=False, timed=True)

OPERATIONS = (
    _asking(
        "/embeddings",
        "Vectors of texts or images, in the form of infinity.",
        MultimodalRequest,
        MultimodalAnswer,
        {"input": ["first text", "second text"]},
    ),
    _asking(
        "/classify",
        "Classes of texts, in the form that `server.compatible` chooses.",
        InfinityClassifyRequest,
        InfinityClassifyAnswer,
        {"input": ["a text"]},
    ),
    _asking(
        "/rerank",
        "Texts in the order in which they answer a query, in the form that `server.compatible` chooses.",
        InfinityRerankRequest,
        InfinityRerankAnswer,
        {"query": "a question", "documents": ["one", "two"]},
    ),
    Operation(
        "get",
        "/models",
        "Models and what each can do, in the form of infinity.",
        "infinity",
        answer=InfinityModels,
        errors=dict.fromkeys((401, 403, 429), BareError),
        error_code_header=False,
    ),
)
