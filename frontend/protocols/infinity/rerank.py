"""POST /rerank: documents in the order in which they answer a query."""

from __future__ import annotations

from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.foreign.text_scoring import TextRankingResource
from frontend.protocols.infinity.envelope import envelope
from frontend.protocols.infinity.schemas import InfinityRerankRequest


class InfinityRerankResource(TextRankingResource[InfinityRerankRequest]):
    """Scores of documents, each with its text where that was asked for."""

    body = InfinityRerankRequest
    entries = "results"

    def entry(self, index: int, score: float, text: str | None) -> dict[str, Any]:
        """Score, index, and document or null."""
        return {"relevance_score": score, "index": index, "document": text}

    def around(self, best: list[dict[str, Any]], scope: RequestScope, reply: Answer) -> dict[str, Any]:
        """`results` beside model and usage."""
        return {**envelope("rerank", scope, reply), "results": best}
