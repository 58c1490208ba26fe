"""POST /score, /v1/score and /rerank: how well texts answer another text, in their order or best first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.sie.score import ranking
from frontend.protocols.sie.text_scoring import TextScoringResource
from frontend.protocols.vllm.envelope import envelope, usage_of
from frontend.protocols.vllm.schemas import DocumentsRequest, PairScoreRequest
from ipc.wire.field_names import FieldNames


class PairScoreResource(TextScoringResource[PairScoreRequest]):
    """Scores in the order of the texts."""

    operation = "score"
    body = PairScoreRequest
    entries = "data"
    names = FieldNames(item="text_2[{}]", text="text_2[{}]", query="text_1", options="")

    def answer(
        self,
        request: PairScoreRequest,
        scope: RequestScope,
        scores: np.ndarray,
        reply: Answer,
        beside: dict[str, Any],
    ) -> dict[str, Any]:
        """`data` with a score for each text."""
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(scores.tolist())
        ]
        return {**envelope("score", scope), "data": data, "usage": usage_of(reply)}


class DocumentsResource(TextScoringResource[DocumentsRequest]):
    """Documents best first, each with its text."""

    operation = "rerank"
    body = DocumentsRequest
    entries = "results"
    names = FieldNames(item="documents[{}]", text="documents[{}]", query="query", options="")

    def echoed_nbytes(self, request: DocumentsRequest) -> int:
        """All documents."""
        return sum(map(len, request.documents))

    def answer(
        self,
        request: DocumentsRequest,
        scope: RequestScope,
        scores: np.ndarray,
        reply: Answer,
        beside: dict[str, Any],
    ) -> dict[str, Any]:
        """`results`, at most `top_n`."""
        results = [
            {"index": index, "document": {"text": request.documents[index]}, "relevance_score": score}
            for index, score in ranking(scores)[: request.top_n or None]
        ]
        used = sum(reply.tokens)
        return {
            "id": f"rerank-{random.getrandbits(128):032x}",
            "model": scope.model,
            "usage": {"prompt_tokens": used, "total_tokens": used},
            "results": results,
        }
