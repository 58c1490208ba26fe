"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.openapi.operation import Operation, asking
from frontend.protocols.tei.info import Info
from frontend.protocols.tei.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    PredictRequest,
    SimilarityRequest,
    TextsRequest,
    TokenizeRequest,
)


class TeiError(msgspec.Struct):
    """An error in the form of TEI."""

    error: Annotated[str, Meta(description="What went wrong.")]
    error_type: Annotated[
        Literal["Backend", "Overloaded", "Unhealthy", "Validation"], Meta(description="Kind of the error.")
    ]


class TeiRank(msgspec.Struct):
    """A text at its rank."""

    index: Annotated[int, Meta(description="Place of the text in the request.")]
    score: Annotated[float, Meta(description="How well the text answers the query.")]
    text: Annotated[str | UnsetType, Meta(description="The text, with `return_text`.")] = UNSET


class TeiTerm(msgspec.Struct):
    """A term of the vocabulary."""

    index: Annotated[int, Meta(description="Number of the term.")]
    value: Annotated[float, Meta(description="Weight of the term.")]


class TeiClass(msgspec.Struct):
    """A class of a text."""

    score: Annotated[float, Meta(description="How likely the class is; with `raw_scores` the logit.")]
    label: Annotated[str, Meta(description="Name of the class.")]


class TeiToken(msgspec.Struct):
    """A token of a text."""

    id: Annotated[int, Meta(description="Number of the token.")]
    text: Annotated[str, Meta(description="Its piece of the text; of a special token the token itself.")]
    special: Annotated[bool, Meta(description="Whether the token was added around the text.")]
    start: Annotated[int | None, Meta(description="First character of the piece.")]
    stop: Annotated[int | None, Meta(description="End of the piece, exclusive.")]


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (401, 403, 408, 413, 422, 424, 429, 500, 501, 503, 504), TeiError
)


_asking = partial(asking, tag="tei", errors=_FAULTS, error_code_header=False, timed=True)

OPERATIONS = (
    _asking(
        "/embed",
        "Vectors of texts, in the form of TEI.",
        EmbedRequest,
        list[list[float]],
        {"inputs": ["first text", "second text"]},
    ),
    _asking(
        "/embed_all",
        "A vector for each token of texts, in the form of TEI.",
        EmbedAllRequest,
        list[list[list[float]]],
        {"inputs": ["first text"]},
    ),
    _asking(
        "/embed_sparse",
        "Terms of texts and their weights, in the form of TEI.",
        EmbedAllRequest,
        list[list[TeiTerm]],
        {"inputs": ["first text"]},
    ),
    _asking(
        "/similarity",
        "How alike one text and others are, in the form of TEI.",
        SimilarityRequest,
        list[float],
        {"inputs": {"source_sentence": "a text", "sentences": ["one", "two"]}},
    ),
    _asking(
        "/predict",
        "Classes of texts, in the form of TEI.",
        PredictRequest,
        (list[TeiClass], list[list[TeiClass]]),
        {"inputs": "a text"},
    ),
    _asking(
        "/tokenize",
        "Tokens of texts, in the form that `server.compatible` chooses.",
        TokenizeRequest,
        list[list[TeiToken]],
        {"inputs": ["first text"]},
    ),
    _asking(
        "/decode",
        "Texts of token ids, in the form of TEI.",
        DecodeRequest,
        list[str],
        {"ids": [[101, 102]]},
    ),
    _asking(
        "/rerank",
        "Texts in the order in which they answer a query, in the form that `server.compatible` chooses.",
        TextsRequest,
        list[TeiRank],
        {"query": "a question", "texts": ["one", "two"]},
    ),
    *(
        _asking(
            "/invocations",
            "The route of the model's task; `POST /` is the same where `server.compatible` has `tei`.",
            body,
            answer,
            example,
        )
        for body, answer, example in (
            (EmbedRequest, list[list[float]], {"inputs": ["first text"]}),
            (EmbedAllRequest, list[list[TeiTerm]], {"inputs": ["first text"]}),
            (TextsRequest, list[TeiRank], {"query": "a question", "texts": ["one", "two"]}),
            (PredictRequest, list[list[TeiClass]], {"inputs": [["a text"]]}),
        )
    ),
    Operation(
        "get",
        "/info",
        "The model of requests that name none, in the form of TEI.",
        "tei",
        answer=Info,
        errors=dict.fromkeys((401, 403, 424, 429), TeiError),
        error_code_header=False,
    ),
)
