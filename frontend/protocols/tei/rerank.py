"""POST /rerank: texts in the order in which they answer a query."""

from __future__ import annotations

from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.foreign.text_scoring import TextRankingResource
from frontend.protocols.tei.schemas import TextsRequest


class RerankResource(TextRankingResource[TextsRequest], field="texts"):
    """Scores of texts as a bare array."""

    body = TextsRequest

    def entry(self, index: int, score: float, text: str | None) -> dict[str, Any]:
        """Index, text if the request asks for texts, and score."""
        return {"index": index, **({} if text is None else {"text": text}), "score": score}

    def around(self, best: list[dict[str, Any]], scope: RequestScope, reply: Answer) -> list[dict[str, Any]]:
        """The entries alone."""
        return best
