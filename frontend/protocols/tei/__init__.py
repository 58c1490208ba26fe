"""The routes of Text Embeddings Inference, whose requests name no model.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.http.inference import InferenceRoute
from frontend.protocols.foreign.server import ServerProtocol
from frontend.protocols.tei import errors
from frontend.protocols.tei.embed import EmbedAllResource, EmbedResource, EmbedSparseResource
from frontend.protocols.tei.info import InfoResource
from frontend.protocols.tei.predict import PredictResource
from frontend.protocols.tei.rerank import RerankResource
from frontend.protocols.tei.similarity import SimilarityResource
from frontend.protocols.tei.task import TaskResource
from frontend.protocols.tei.tokens import DecodeResource, TokenizeResource

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
    """Routes and error form of TEI."""

    def __init__(self) -> None:
        super().__init__("tei", _INFERENCE, errors.FORM, others={"/info": InfoResource})
