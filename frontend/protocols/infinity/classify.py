"""POST /classify: the classes of each text, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.infinity.envelope import around
from frontend.protocols.infinity.schemas import InfinityClassifyRequest
from frontend.protocols.sie.classes import ClassesPlan, classes_of
from frontend.protocols.sie.classify import ClassifyResource
from frontend.protocols.sie.render import json_list

_ENTRY_NBYTES = 64
"""About how long an entry of an answer is."""


class InfinityClassifyResource(ClassifyResource[InfinityClassifyRequest]):
    """Score and label of each class."""

    operation = "classify"
    body = InfinityClassifyRequest

    async def render(
        self,
        reply: Answer,
        plan: ClassesPlan,
        request: InfinityClassifyRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The body."""
        found = classes_of(reply)
        entries = ([{"score": one.score, "label": one.label} for one in item] for item in found)
        nbytes = _ENTRY_NBYTES * sum(map(len, found))
        return around("classify", scope, await json_list(entries, nbytes), reply)
