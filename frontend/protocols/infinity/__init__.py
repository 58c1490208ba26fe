"""The routes of infinity: embeddings of texts and images, classes, rerank and models.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.protocols.foreign.server import BARE_FORM, ServerProtocol
from frontend.protocols.infinity.routes import (
    InfinityClassifyResource,
    InfinityModelsResource,
    InfinityRerankResource,
    MultimodalResource,
)
from frontend.resources.sending import InferenceRoute

_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/embeddings": MultimodalResource,
    "/classify": InfinityClassifyResource,
    "/rerank": InfinityRerankResource,
}


class InfinityProtocol(ServerProtocol):
    """Routes and error form of infinity."""

    def __init__(self) -> None:
        super().__init__("infinity", _INFERENCE, BARE_FORM, others={"/models": InfinityModelsResource})
