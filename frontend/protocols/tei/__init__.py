"""The routes of Text Embeddings Inference, whose requests name no model, and the form of its errors.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports the flow of SIE.
"""

from __future__ import annotations

from typing import Any

from frontend.protocols.foreign.server import ErrorForm, ServerProtocol
from frontend.protocols.tei.texts import (
    DecodeResource,
    InfoResource,
    PredictResource,
    RerankResource,
    TaskResource,
    TokenizeResource,
)
from frontend.protocols.tei.vectors import (
    EmbedAllResource,
    EmbedResource,
    EmbedSparseResource,
    SimilarityResource,
)
from frontend.resources.sending import InferenceRoute
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
_KINDS = {429: "Overloaded", 503: "Unhealthy"}
_BACKEND = (424, 500, 501, 502, 504)


def _status_of(error: PenstockError) -> int:
    return _STATUSES.get(error.code, error.status)


def _body(status: int, text: str) -> dict[str, Any]:
    kind = "Backend" if status in _BACKEND else _KINDS.get(status, "Validation")
    return {"error": text, "error_type": kind}


_FORM = ErrorForm(_status_of, _body)


_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/embed": EmbedResource,
    "/embed_all": EmbedAllResource,
    "/embed_sparse": EmbedSparseResource,
    "/similarity": SimilarityResource,
    "/rerank": RerankResource,
    "/predict": PredictResource,
    "/tokenize": TokenizeResource,
    "/decode": DecodeResource,
    "/invocations": TaskResource,
}


class TeiProtocol(ServerProtocol):
    """Routes and error form of TEI: `{"error": message, "error_type": kind}`.

    1. A value that is too long and a request that is wrong in another way are 422 Validation, as in TEI since 1.9.
    2. A model that cannot do what was asked, or that failed, is 424 Backend. So is a request without a clear model.
    3. A full server and a caller over its rate are 429 Overloaded, and a server without a worker 503 Unhealthy.
    """

    def __init__(self) -> None:
        super().__init__("tei", _INFERENCE, _FORM, others={"/info": InfoResource})
