"""Embed in the forms of Cohere's API, versions 1 and 2, rerank in the form of version 2, and the form of its errors.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

import falcon
import msgspec

from frontend.protocols.cohere.contract import (
    CohereEmbedRequest,
    CohereEmbedV1Request,
    CohereError,
    CohereRerankAnswer,
    EmbedAnswer,
)
from frontend.protocols.cohere.routes import EmbedResource, EmbedV1Resource, RerankV2Resource
from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.sie import CLIENT_FAULTS, HEADERS, SERVER_FAULTS, errors, faults
from frontend.protocols.sie.schemas import RerankRequest
from frontend.routes import asking
from ipc.errors import PenstockError


class _CohereForm(ErrorForm):
    """`{"message"}`, with the statuses and headers of the SIE contract, which Cohere has too."""

    def render(self, error: PenstockError) -> Rendered:
        """An error of a request."""
        status, _, headers = errors.render(error)
        return status, self.body(status, error.message), headers

    def render_http(self, error: falcon.HTTPError) -> Rendered:
        """An error of the framework, such as a wrong method."""
        message = error.description or error.title or HTTPStatus(error.status_code).phrase
        return error.status_code, self.body(error.status_code, message), {}


def _body(status: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(CohereError(text))
    return body


_FORM = _CohereForm(lambda error: errors.contract_code(error)[0], _body)


_asking = partial(
    asking,
    tag="inference",
    errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=CohereError),
    parameters=HEADERS,
    timed=True,
)

_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_TEXTS = {"model": _MODEL, "texts": ["first text", "second text"], "input_type": "search_document"}

ROUTES = (
    _asking(
        "/v1/embed",
        EmbedV1Resource,
        "Vectors in the form of Cohere's version 1.",
        CohereEmbedV1Request,
        EmbedAnswer,
        _TEXTS,
    ),
    _asking(
        "/v2/embed",
        EmbedResource,
        "Vectors in the form of Cohere's version 2.",
        CohereEmbedRequest,
        EmbedAnswer,
        {**_TEXTS, "embedding_types": ["float", "int8"], "output_dimension": 128},
    ),
    _asking(
        "/v2/rerank",
        RerankV2Resource,
        "Documents in the order in which they answer a query, in the form of Cohere's version 2.",
        RerankRequest,
        CohereRerankAnswer,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
)


class CohereProtocol(ServerProtocol):
    """Routes and error form of Cohere; `/v1/rerank` is a route of SIE and answers in both forms."""

    def __init__(self) -> None:
        super().__init__("cohere", ROUTES, _FORM)
