"""POST /v2/rerank: the documents of `/v1/rerank`, answered in the form of version 2."""

from __future__ import annotations

import random
import uuid
from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.protocols.sie.rerank import RerankResource
from frontend.protocols.sie.route import Form
from frontend.protocols.sie.schemas import RerankRequest


class RerankV2Resource(RerankResource):
    """Documents in the order in which they answer a query."""

    def answer(
        self, request: RerankRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> dict[str, Any]:
        """`results` best first, at most `top_n`, and the tokens of all pairs."""
        found = super().answer(request, scope, scores, reply, form)
        name = str(uuid.UUID(int=random.getrandbits(128), version=4))
        meta = {"api_version": {"version": "2"}, **found["meta"]}
        if reply.truncated:
            meta["warnings"] = [f"these documents were cut: {', '.join(map(str, reply.truncated))}"]
        return {"id": name, "results": found["results"], "meta": meta}
