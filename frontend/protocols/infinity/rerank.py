"""POST /rerank: documents in the order in which they answer a query."""

from __future__ import annotations

from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.infinity.envelope import envelope
from frontend.protocols.infinity.schemas import InfinityRerankRequest
from frontend.protocols.sie.score import ranking
from frontend.protocols.sie.text_scoring import TextScoringResource
from ipc.wire.field_names import FieldNames


class InfinityRerankResource(TextScoringResource[InfinityRerankRequest]):
    """Documents best first."""

    operation = "rerank"
    body = InfinityRerankRequest
    entries = "results"
    names = FieldNames(item="documents[{}]", text="documents[{}]", query="query", options="")

    def echoed_nbytes(self, request: InfinityRerankRequest) -> int:
        """Documents that are returned."""
        return sum(map(len, request.documents)) if request.return_documents else 0

    def answer(
        self,
        request: InfinityRerankRequest,
        scope: RequestScope,
        scores: np.ndarray,
        reply: Answer,
        beside: dict[str, Any],
    ) -> dict[str, Any]:
        """`results`, at most `top_n`."""
        results = [
            {
                "relevance_score": score,
                "index": index,
                "document": request.documents[index] if request.return_documents else None,
            }
            for index, score in ranking(scores)[: request.top_n]
        ]
        return {**envelope("rerank", scope, reply), "results": results}
