"""The routes of vLLM beside the routes of OpenAI: pooling, scores, classes and tokens.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from functools import partial

from frontend.protocols.foreign.server import BARE_FAULTS, BARE_FORM, ServerProtocol
from frontend.protocols.sie import CLIENT_FAULTS, SCORE, SERVER_FAULTS, faults
from frontend.protocols.sie.errors import OpenAIErrorResponse
from frontend.protocols.vllm.contract import (
    ClassifyAnswer,
    ClassifyRequest,
    DocumentsAnswer,
    DocumentsRequest,
    PairScoreAnswer,
    PairScoreRequest,
    PoolingAnswer,
    PoolingRequest,
    PromptRequest,
    PromptText,
    PromptTokens,
    TokenIdsRequest,
)
from frontend.protocols.vllm.routes import (
    DocumentsResource,
    PairScoreResource,
    PoolingResource,
    PromptResource,
    TokenIdsResource,
    VllmClassifyResource,
)
from frontend.route_rows import asking

_asking = partial(asking, tag="vllm", timed=True)
_own = partial(_asking, errors=BARE_FAULTS, error_code_header=False)

_PAIRS = {"text_1": "a question", "text_2": ["one", "two"]}

ROUTES = (
    _own(
        "/pooling",
        PoolingResource,
        "Vectors of inputs, in the form of vLLM.",
        PoolingRequest,
        PoolingAnswer,
        {"input": "a"},
    ),
    _own(
        "/score",
        PairScoreResource,
        "Scores of texts, in the form of vLLM.",
        PairScoreRequest,
        PairScoreAnswer,
        _PAIRS,
    ),
    _asking(
        SCORE,
        PairScoreResource,
        "Scores of texts, in the form of vLLM, with the errors of SIE.",
        PairScoreRequest,
        PairScoreAnswer,
        _PAIRS,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=OpenAIErrorResponse),
    ),
    _own(
        "/rerank",
        DocumentsResource,
        "Texts in the order in which they answer a query, in the form that server.compatible chooses.",
        DocumentsRequest,
        DocumentsAnswer,
        {"query": "a question", "documents": ["one", "two"]},
        shared=True,
    ),
    _own(
        "/classify",
        VllmClassifyResource,
        "Classes of texts, in the form that server.compatible chooses.",
        ClassifyRequest,
        ClassifyAnswer,
        {"input": ["a text"]},
        shared=True,
    ),
    _own(
        "/tokenize",
        PromptResource,
        "Tokens of texts, in the form that server.compatible chooses.",
        PromptRequest,
        PromptTokens,
        {"prompt": "a text"},
        shared=True,
    ),
    _own(
        "/detokenize",
        TokenIdsResource,
        "The text of token ids, in the form of vLLM.",
        TokenIdsRequest,
        PromptText,
        {"tokens": [5]},
    ),
)


class VllmProtocol(ServerProtocol):
    """Routes and error form of vLLM. Errors of `/v1/score` are in the form of SIE, whose routes lie below the path."""

    def __init__(self) -> None:
        super().__init__("vllm", ROUTES, BARE_FORM)
