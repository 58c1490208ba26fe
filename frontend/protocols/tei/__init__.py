"""The routes of Text Embeddings Inference, whose requests name no model, and the form of its errors.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from frontend.protocols.foreign.server import ErrorForm, ServerProtocol
from frontend.protocols.tei.contract import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    Info,
    PredictRequest,
    SimilarityRequest,
    TeiClass,
    TeiError,
    TeiKind,
    TeiRank,
    TeiTerm,
    TeiToken,
    TextsRequest,
    TokenizeRequest,
)
from frontend.protocols.tei.texts import (
    DecodeResource,
    EmbedAllResource,
    EmbedResource,
    EmbedSparseResource,
    InfoResource,
    PredictResource,
    RerankResource,
    SimilarityResource,
    TaskResource,
    TokenizeResource,
)
from frontend.route_rows import Route, asking
from ipc.errors import PenstockError

_STATUSES = {
    "INVALID_INPUT": 422,
    "MODEL_NOT_FOUND": 424,
    "MODEL_LOAD_FAILED": 424,
    "DEPENDENCY_CONFLICT": 424,
    "INFERENCE_ERROR": 424,
    "UNEXPECTED_OUTPUT": 424,
    "QUEUE_FULL": 429,
    "RESOURCE_EXHAUSTED": 429,
    "SHM_EXHAUSTED": 429,
}
"""Statuses of this contract that differ from Penstock's own, by code."""
_KINDS: dict[int, TeiKind] = {429: "Overloaded", 503: "Unhealthy"}
_BACKEND = (424, 500, 501, 502, 504)


def _status_of(error: PenstockError) -> int:
    return _STATUSES.get(error.code, error.status)


def _body(status: int, text: str) -> dict[str, Any]:
    kind: TeiKind = "Backend" if status in _BACKEND else _KINDS.get(status, "Validation")
    body: dict[str, Any] = msgspec.to_builtins(TeiError(text, kind))
    return body


_FORM = ErrorForm(_status_of, _body)


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (401, 403, 408, 413, 422, 424, 429, 500, 501, 503, 504), TeiError
)


_asking = partial(asking, tag="tei", errors=_FAULTS, error_code_header=False, timed=True)

ROUTES = (
    _asking(
        "/embed",
        EmbedResource,
        "Vectors of texts, in the form of TEI.",
        EmbedRequest,
        list[list[float]],
        {"inputs": ["first text", "second text"]},
    ),
    _asking(
        "/embed_all",
        EmbedAllResource,
        "A vector for each token of texts, in the form of TEI.",
        EmbedAllRequest,
        list[list[list[float]]],
        {"inputs": ["first text"]},
    ),
    _asking(
        "/embed_sparse",
        EmbedSparseResource,
        "Terms of texts and their weights, in the form of TEI.",
        EmbedAllRequest,
        list[list[TeiTerm]],
        {"inputs": ["first text"]},
    ),
    _asking(
        "/similarity",
        SimilarityResource,
        "How alike one text and others are, in the form of TEI.",
        SimilarityRequest,
        list[float],
        {"inputs": {"source_sentence": "a text", "sentences": ["one", "two"]}},
    ),
    _asking(
        "/predict",
        PredictResource,
        "Classes of texts, in the form of TEI.",
        PredictRequest,
        (list[TeiClass], list[list[TeiClass]]),
        {"inputs": "a text"},
    ),
    _asking(
        "/tokenize",
        TokenizeResource,
        "Tokens of texts, in the form that server.compatible chooses.",
        TokenizeRequest,
        list[list[TeiToken]],
        {"inputs": ["first text"]},
        shared=True,
    ),
    _asking(
        "/decode",
        DecodeResource,
        "Texts of token ids, in the form of TEI.",
        DecodeRequest,
        list[str],
        {"ids": [[101, 102]]},
    ),
    _asking(
        "/rerank",
        RerankResource,
        "Texts in the order in which they answer a query, in the form that server.compatible chooses.",
        TextsRequest,
        list[TeiRank],
        {"query": "a question", "texts": ["one", "two"]},
        shared=True,
    ),
    *(
        _asking(
            "/invocations",
            TaskResource,
            "The route of the model's task; POST / is the same where server.compatible has tei.",
            body,
            answer,
            example,
            shared=True,
            root=True,
        )
        for body, answer, example in (
            (EmbedRequest, list[list[float]], {"inputs": ["first text"]}),
            (EmbedAllRequest, list[list[TeiTerm]], {"inputs": ["first text"]}),
            (TextsRequest, list[TeiRank], {"query": "a question", "texts": ["one", "two"]}),
            (PredictRequest, list[list[TeiClass]], {"inputs": [["a text"]]}),
        )
    ),
    Route(
        "get",
        "/info",
        InfoResource,
        "The model of requests that name none, in the form of TEI.",
        "tei",
        answer=Info,
        errors=dict.fromkeys((401, 403, 424, 429), TeiError),
        error_code_header=False,
    ),
)


class TeiProtocol(ServerProtocol):
    """Routes and error form of TEI: `{"error": message, "error_type": kind}`.

    1. A value that is too long and a request that is wrong in another way are 422 Validation, as in TEI since 1.9.
    2. A model that cannot do what was asked, or that failed, is 424 Backend. So is a request without a clear model.
    3. A full server and a caller over its rate are 429 Overloaded, and a server without a worker 503 Unhealthy.
    """

    def __init__(self) -> None:
        super().__init__("tei", ROUTES, _FORM)
