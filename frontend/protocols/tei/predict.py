"""POST /predict: the classes of texts, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.foreign.classes import ENTRY_NBYTES, ClassesPlan, ClassifyResource, labelled
from frontend.protocols.sie.render import json_list
from frontend.protocols.tei.schemas import PredictRequest


class PredictResource(ClassifyResource[PredictRequest]):
    """Classes of a text as one array, those of a batch as an array of arrays."""

    operation = "predict"
    body = PredictRequest
    field = "inputs"

    async def render(
        self,
        reply: Answer,
        plan: ClassesPlan,
        request: PredictRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """Score and label of each class."""
        found = labelled(reply)
        entries = found if request.is_batch else found[0]
        return await json_list(iter(entries), ENTRY_NBYTES * sum(map(len, found)))
