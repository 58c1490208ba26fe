"""POST /rerank: texts in the order in which they answer a query."""

from __future__ import annotations

from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import default_model
from frontend.engine.options import Resolved, resolve
from frontend.engine.scope import RequestScope
from frontend.http.texts import check_count, check_shared, check_texts
from frontend.protocols.sie.score import Pairs, ScoringResource, ranking
from frontend.protocols.tei.schemas import TextsRequest
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem


class RerankResource(ScoringResource[TextsRequest]):
    """Scores of texts as a bare array, best first."""

    operation = "rerank"
    body = TextsRequest
    always_json = True
    names = FieldNames(item="texts[{}]", text="texts[{}]", query="query", options="")

    def model_of(self, request: TextsRequest) -> str:
        """The model that scores."""
        return default_model(self.services.catalog, self.services.settings, ("score",))

    def examine(self, request: TextsRequest) -> None:
        """A query and texts that some model could take."""
        limits = self.services.settings.limits
        check_count(len(request.texts), "texts", limits)
        check_texts(request.texts, "texts[{}]", limits)
        check_shared(request.query, "query", len(request.texts), limits)

    def check(self, request: TextsRequest, entry: ModelEntry) -> Pairs:
        """Query and texts."""
        return Pairs(InputItem(request.query), [InputItem(text) for text in request.texts])

    def resolve(self, request: TextsRequest, entry: ModelEntry, items: int) -> Resolved:
        """The options of the model's profile, and what becomes of texts that are too long."""
        catalog, limits = self.services.catalog, self.services.settings.limits
        options = {**request.options, "activation": "identity" if request.raw_scores else "sigmoid"}
        return resolve(entry, options, None, catalog, items, limits, self.names)

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
