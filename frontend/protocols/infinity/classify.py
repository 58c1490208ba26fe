"""POST /classify: the classes of each text, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.foreign.classes import ENTRY_NBYTES, ClassesPlan, TextClassesResource, labelled
from frontend.protocols.infinity.envelope import around
from frontend.protocols.infinity.schemas import InfinityClassifyRequest
from frontend.protocols.sie.render import json_list
from frontend.protocols.sie.route import Form


class InfinityClassifyResource(TextClassesResource[InfinityClassifyRequest]):
    """Score and label of each class."""

    operation = "classify"
    body = InfinityClassifyRequest

    async def render(
        self,
        reply: Answer,
        plan: ClassesPlan,
        request: InfinityClassifyRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """The body."""
        found = await labelled(reply)
        nbytes = ENTRY_NBYTES * sum(map(len, found))
        return around("classify", scope, await json_list(iter(found), nbytes), reply)
