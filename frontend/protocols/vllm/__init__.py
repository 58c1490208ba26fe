"""The routes of vLLM beside the routes of OpenAI: pooling, scores, classes and tokens.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.protocols.foreign.server import BARE_FORM, ServerProtocol
from frontend.protocols.vllm.routes import (
    DocumentsResource,
    PairScoreResource,
    PoolingResource,
    PromptResource,
    TokenIdsResource,
    VllmClassifyResource,
)
from frontend.resources.sending import InferenceRoute

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
        super().__init__("vllm", _INFERENCE, BARE_FORM, left_to_sie=("/v1/score",))
