"""POST /rerank: texts in the order in which they answer a query."""

from __future__ import annotations

from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.sie.score import ranking
from frontend.protocols.sie.text_scoring import TextScoringResource
from frontend.protocols.tei.schemas import TextsRequest
from ipc.wire.field_names import FieldNames


class RerankResource(TextScoringResource[TextsRequest]):
    """Scores of texts as a bare array, best first."""

    operation = "rerank"
    body = TextsRequest
    names = FieldNames(item="texts[{}]", text="texts[{}]", query="query", options="")

    def echoed_nbytes(self, request: TextsRequest) -> int:
        """Texts that are returned."""
        return sum(map(len, request.texts)) if request.return_text else 0

    def answer(
        self,
        request: TextsRequest,
        scope: RequestScope,
        scores: np.ndarray,
        reply: Answer,
        beside: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Index, text where it was asked for, and score of each text."""
        entries: list[dict[str, Any]] = []
        for index, score in ranking(scores):
            text = {"text": request.texts[index]} if request.return_text else {}
            entries.append({"index": index, **text, "score": score})
        return entries
