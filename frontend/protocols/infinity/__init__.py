"""The routes of infinity: embeddings of texts and images, classes, rerank and models.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from functools import partial

from frontend.protocols.foreign.server import BARE_FAULTS, BARE_FORM, BareError, ServerProtocol
from frontend.protocols.infinity.contract import (
    InfinityClassifyAnswer,
    InfinityClassifyRequest,
    InfinityModels,
    InfinityRerankAnswer,
    InfinityRerankRequest,
    MultimodalAnswer,
    MultimodalRequest,
)
from frontend.protocols.infinity.routes import (
    InfinityClassifyResource,
    InfinityModelsResource,
    InfinityRerankResource,
    MultimodalResource,
)
from frontend.routes import Route, asking

_asking = partial(asking, tag="infinity", errors=BARE_FAULTS, error_code_header=False, timed=True)

ROUTES = (
    _asking(
        "/embeddings",
        MultimodalResource,
        "Vectors of texts or images, in the form of infinity.",
        MultimodalRequest,
        MultimodalAnswer,
        {"input": ["first text", "second text"]},
    ),
    _asking(
        "/classify",
        InfinityClassifyResource,
        "Classes of texts, in the form that `server.compatible` chooses.",
        InfinityClassifyRequest,
        InfinityClassifyAnswer,
        {"input": ["a text"]},
        shared=True,
    ),
    _asking(
        "/rerank",
        InfinityRerankResource,
        "Texts in the order in which they answer a query, in the form that `server.compatible` chooses.",
        InfinityRerankRequest,
        InfinityRerankAnswer,
        {"query": "a question", "documents": ["one", "two"]},
        shared=True,
    ),
    Route(
        "get",
        "/models",
        InfinityModelsResource,
        "Models and what each can do, in the form of infinity.",
        "infinity",
        answer=InfinityModels,
        errors=dict.fromkeys((401, 403, 429), BareError),
        error_code_header=False,
    ),
)


class InfinityProtocol(ServerProtocol):
    """Routes and error form of infinity."""

    def __init__(self) -> None:
        super().__init__("infinity", ROUTES, BARE_FORM)
