"""The routes of vLLM beside the routes of OpenAI: pooling, scores, classes and tokens.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.http.inference import InferenceRoute
from frontend.protocols.foreign import bare_errors
from frontend.protocols.foreign.server import ServerProtocol
from frontend.protocols.vllm.classify import VllmClassifyResource
from frontend.protocols.vllm.pooling import PoolingResource
from frontend.protocols.vllm.scoring import DocumentsResource, PairScoreResource
from frontend.protocols.vllm.tokens import PromptResource, TokenIdsResource

_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/pooling": PoolingResource,
    "/score": PairScoreResource,
    "/v1/score": PairScoreResource,
    "/rerank": DocumentsResource,
    "/classify": VllmClassifyResource,
    "/tokenize": PromptResource,
    "/detokenize": TokenIdsResource,
}


class VllmProtocol(ServerProtocol):
    """Routes and error form of vLLM."""

    def __init__(self) -> None:
        super().__init__("vllm", _INFERENCE, bare_errors.FORM, left_to_sie=("/v1/score",))
