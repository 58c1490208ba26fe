"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.openapi.operation import Operation, asking
from frontend.protocols.foreign.bare_errors import FAULTS
from frontend.protocols.sie.operations import CLIENT_FAULTS, SERVER_FAULTS, OpenAIErrorResponse, faults
from frontend.protocols.vllm.schemas import (
    ClassifyRequest,
    DocumentsRequest,
    PairScoreRequest,
    PoolingRequest,
    PromptRequest,
    TokenIdsRequest,
)

Place = Annotated[int, Meta(description="Place in the request.")]
Identity = Annotated[str, Meta(description="A new id of the answer.")]
Created = Annotated[int, Meta(description="When the answer was made, in seconds since 1970.")]
Name = Annotated[str, Meta(description="Name of the model that answered.")]


class PoolingUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]
    completion_tokens: Annotated[int, Meta(description="Always 0.")]
    prompt_tokens_details: Annotated[None, Meta(description="Always null.")]


class PooledInput(msgspec.Struct):
    """The vectors of one input."""

    index: Place
    object: Annotated[Literal["pooling"], Meta(description="Kind of what is told here.")]
    data: Annotated[
        list[float] | str, Meta(description="A vector, or base64; for `token_embed` an array of vectors.")
    ]


class ScoredText(msgspec.Struct):
    """The score of one text."""

    index: Place
    object: Annotated[Literal["score"], Meta(description="Kind of what is told here.")]
    score: Annotated[float, Meta(description="How well the text fits the first text.")]


class ClassifiedText(msgspec.Struct):
    """The classes of one text."""

    index: Place
    label: Annotated[str, Meta(description="The likeliest class.")]
    probs: Annotated[list[float], Meta(description="A number for each class, in the order of the model.")]
    num_classes: Annotated[int, Meta(description="How many classes the model has.")]


class _Listed(msgspec.Struct):
    id: Identity
    object: Annotated[Literal["list"], Meta(description="Kind of what is told here.")]
    created: Created
    model: Name


class PoolingAnswer(_Listed):
    """Answer of /pooling."""

    data: Annotated[list[PooledInput], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class PairScoreAnswer(_Listed):
    """Answer of /score and /v1/score."""

    data: Annotated[list[ScoredText], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class ClassifyAnswer(_Listed):
    """Answer of /classify."""

    data: Annotated[list[ClassifiedText], Meta(description="The list.")]
    usage: Annotated[PoolingUsage, Meta(description="Counts of tokens.")]


class RankedText(msgspec.Struct):
    """The text of a document."""

    text: Annotated[str, Meta(description="The text.")]


class RankedDocument(msgspec.Struct):
    """A document at its rank."""

    index: Place
    document: Annotated[RankedText, Meta(description="The document.")]
    relevance_score: Annotated[float, Meta(description="How well the document answers the query.")]


class RankUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all pairs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class DocumentsAnswer(msgspec.Struct):
    """Answer of /rerank."""

    id: Identity
    model: Name
    usage: Annotated[RankUsage, Meta(description="Counts of tokens.")]
    results: Annotated[list[RankedDocument], Meta(description="The documents, the best first.")]


class PromptTokens(msgspec.Struct):
    """Answer of /tokenize."""

    count: Annotated[int, Meta(description="How many tokens the text has.")]
    max_model_len: Annotated[int, Meta(description="The longest sequence of the model.")]
    tokens: Annotated[list[int], Meta(description="Numbers of the tokens.")]
    token_strs: Annotated[list[str] | None, Meta(description="The tokens, with `return_token_strs`.")]


class PromptText(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: Annotated[str, Meta(description="The text, with special tokens.")]


def _asking(
    path: str,
    summary: str,
    body: Any,
    answer: Any,
    example: dict[str, Any],
    errors: dict[int, type[msgspec.Struct] | None] = FAULTS,
) -> Operation:
    return asking(
        path,
        summary,
        body,
        answer,
        example,
        tag="vllm",
        errors=errors,
        error_code_header=errors is not FAULTS,
        timed=True,
    )


_PAIRS = {"text_1": "a question", "text_2": ["one", "two"]}

OPERATIONS = (
    _asking(
        "/pooling", "Vectors of inputs, in the form of vLLM.", PoolingRequest, PoolingAnswer, {"input": "a"}
    ),
    _asking("/score", "Scores of texts, in the form of vLLM.", PairScoreRequest, PairScoreAnswer, _PAIRS),
    _asking(
        "/v1/score",
        "Scores of texts, in the form of vLLM, with the errors of SIE.",
        PairScoreRequest,
        PairScoreAnswer,
        _PAIRS,
        faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=OpenAIErrorResponse),
    ),
    _asking(
        "/rerank",
        "Texts in the order in which they answer a query, in the form that `server.compatible` chooses.",
        DocumentsRequest,
        DocumentsAnswer,
        {"query": "a question", "documents": ["one", "two"]},
    ),
    _asking(
        "/classify",
        "Classes of texts, in the form that `server.compatible` chooses.",
        ClassifyRequest,
        ClassifyAnswer,
        {"input": ["a text"]},
    ),
    _asking(
        "/tokenize",
        "Tokens of texts, in the form that `server.compatible` chooses.",
        PromptRequest,
        PromptTokens,
        {"prompt": "a text"},
    ),
    _asking(
        "/detokenize",
        "The text of token ids, in the form of vLLM.",
        TokenIdsRequest,
        PromptText,
        {"tokens": [5]},
    ),
)
