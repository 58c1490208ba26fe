"""The routes of infinity: embeddings of texts and images, classes, rerank and models.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.http.inference import InferenceRoute
from frontend.protocols.foreign import bare_errors
from frontend.protocols.foreign.server import ServerProtocol
from frontend.protocols.infinity.classify import InfinityClassifyResource
from frontend.protocols.infinity.embeddings import MultimodalResource
from frontend.protocols.infinity.models import InfinityModelsResource
from frontend.protocols.infinity.rerank import InfinityRerankResource

_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/embeddings": MultimodalResource,
    "/classify": InfinityClassifyResource,
    "/rerank": InfinityRerankResource,
}


class InfinityProtocol(ServerProtocol):
    """Routes and error form of infinity."""

    def __init__(self) -> None:
        super().__init__("infinity", _INFERENCE, bare_errors.FORM, others={"/models": InfinityModelsResource})
