"""POST /v1/score/{model}: how well each item answers the query, best first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.options import check_options
from frontend.http.fields import check_shared
from frontend.http.rendering import off_loop_if
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.items import check_items, images_in, input_of, inputs_of
from frontend.protocols.sie.render import ranked_parts
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.schemas import Body, ScoreRequest
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus, ScoreCall

INLINE_ENTRIES = 512
INLINE_NBYTES = 256 << 10
"""Answers with more entries than this, or that repeat more of the request, are written in a thread."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """A query and the items to score against the query, as workers take them."""

    query: InputItem
    items: list[InputItem]


R = TypeVar("R", bound=Body)


class ScoringResource(InferenceResource[R, Plan[ScoreCall]], Generic[R]):
    """What score and rerank share: pairs in, one score per pair out, all or nothing."""

    capability = "score"
    names: ClassVar[FieldNames]
    entries: ClassVar[str] = ""
    """The field of the answer that has the list, where the answer is an object."""

    def names_of(self, request: R) -> FieldNames:
        """How messages name query and items."""
        return self.names

    def plan(self, request: R, entry: ModelEntry, inputs: Pairs, status: ModelStatus) -> Plan[ScoreCall]:
        """The call with the options of the request."""
        options, instruction = self.options_of(request)
        names = self.names_of(request)
        found = self.resolve(entry, options, instruction, len(inputs.items), names)
        call = ScoreCall(
            inputs.items,
            inputs.query,
            found.instruction,
            found.options,
            found.overflow,
            found.lora,
            names,
        )
        return Plan(found.entry.id, call)

    @abstractmethod
    def options_of(self, request: R) -> tuple[dict[str, Any] | None, str | None]:
        """The options and the instruction of a request."""

    async def render(
        self, reply: Answer, plan: Plan[ScoreCall], request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The answer."""
        with reply:
            scores = np.array(reply.tensors()["score"])
        long = len(scores) > INLINE_ENTRIES or self.echoed_nbytes(request) > INLINE_NBYTES
        return await off_loop_if(long, self._write, request, scope, scores, reply, form)

    def _write(
        self, request: R, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> list[bytes]:
        return ranked_parts(self.answer(request, scope, scores, reply, form), self.entries, form.json)

    @abstractmethod
    def echoed_nbytes(self, request: R) -> int:
        """About how much of the request the answer repeats."""

    @abstractmethod
    def answer(
        self, request: R, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The body; `scores` is float32 [items] in request order, the lease of `reply` has ended."""


def ranking(scores: np.ndarray) -> list[tuple[int, float]]:
    """(input index, score), best first; ties keep the order of the input."""
    order = np.argsort(-scores, kind="stable")
    return list(zip(order.tolist(), scores[order].astype(np.float64).tolist(), strict=True))


class ScoreResource(ScoringResource[ScoreRequest]):
    """The SIE form, in JSON or msgpack."""

    operation = "score"
    body = ScoreRequest
    names = FieldNames(options="options.")
    entries = "scores"

    def examine(self, request: ScoreRequest) -> None:
        """Query, items and options that some model could take."""
        limits = self.services.settings.limits
        check_items(request.items, limits)
        check_shared(request.query.text or "", "query.text", len(request.items), limits)
        check_options(request.options, self.names)

    def params_of(self, request: ScoreRequest) -> ScoreRequest:
        """Options stand at top level."""
        return request

    def check(self, request: ScoreRequest, entry: ModelEntry) -> Pairs:
        """Query and items as workers take them. Raises `InvalidInput` that names the field."""
        limits = self.services.settings.limits
        query = input_of(request.query, "query", entry, limits)
        return Pairs(query, inputs_of(request.items, entry, limits))

    def images(self, request: ScoreRequest, inputs: Pairs) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of query and items."""
        return images_in(request.items, request.query)

    def options_of(self, request: ScoreRequest) -> tuple[dict[str, Any] | None, str | None]:
        """Options and instruction stand at top level."""
        return request.options, request.instruction

    def echoed_nbytes(self, request: ScoreRequest) -> int:
        """Ids."""
        return sum(len(item.id or "") for item in (request.query, *request.items))

    def answer(
        self, request: ScoreRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> dict[str, Any]:
        """`model`, `query_id`, the ranked `scores`, and what each pair took by input index."""
        names = [f"item-{index}" if item.id is None else item.id for index, item in enumerate(request.items)]
        entries = [
            {"item_id": names[index], "score": score, "rank": rank}
            for rank, (index, score) in enumerate(ranking(scores))
        ]
        return {
            "model": scope.model,
            "query_id": request.query.id,
            "scores": entries,
            **form.beside,
        }
