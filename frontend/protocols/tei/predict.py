"""POST /predict: the classes of texts, the likeliest first; of pairs of texts the one class of a reranker too.

1. A served classifier answers. Without a classifier the model that scores answers, as TEI has it for classifiers with
   one label.
2. `ClassesResource` and `PairsResource` do all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from falcon.asgi import Request, Response

from frontend.engine.answer import Answer
from frontend.engine.default_models import default_model, is_served
from frontend.engine.scope import RequestScope
from frontend.http.inference import InferenceRoute
from frontend.http.sending import Buffer
from frontend.protocols.foreign.classes import (
    ENTRY_NBYTES,
    FAMILY,
    ClassesPlan,
    TextClassesResource,
    labelled,
)
from frontend.protocols.foreign.options import activation_option
from frontend.protocols.sie.render import json_list
from frontend.protocols.sie.route import Form
from frontend.protocols.tei.schemas import PredictRequest
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem, ModelStatus, ScoreCall

_ONLY_LABEL = "LABEL_0"
"""What transformers calls the only class of a model whose configuration names none."""


class ClassesResource(TextClassesResource[PredictRequest]):
    """Classes of a text as one array, classes of a batch as an array of arrays."""

    operation = "predict"
    body = PredictRequest
    field = "inputs"

    async def render(
        self, reply: Answer, plan: ClassesPlan, request: PredictRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body: an array for each input of a batch, or one array."""
        found = await self.entries(reply, plan)
        listed = found if request.is_batch else found[0]
        return await json_list(iter(listed), ENTRY_NBYTES * sum(map(len, found)))

    async def entries(self, reply: Answer, plan: ClassesPlan) -> list[list[dict[str, Any]]]:
        """Score and label of each class, for each input. The lease ends."""
        return await labelled(reply)


class PairsResource(ClassesResource):
    """The score of each pair as its one class."""

    capability = "score"

    def model_of(self, request: PredictRequest) -> str:
        """The model that scores."""
        return default_model(self.services.catalog, self.services.settings, ("score",))

    def check(self, request: PredictRequest, entry: ModelEntry) -> list[InputItem]:
        """The pairs. Raises `InvalidInput` for a text alone."""
        items = super().check(request, entry)
        for at, item in enumerate(items):
            if item.first is None:
                place = f"inputs[{at}]" if request.is_batch else "inputs"
                raise InvalidInput(f"{place}: model '{entry.id}' scores pairs of texts, got one text")
        return items

    def plan(
        self, request: PredictRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for scores."""
        options = {**request.overflow, **activation_option(bool(request.raw_scores))}
        found = self.resolve(entry, options, None, len(inputs), self.names)
        call = ScoreCall(
            inputs, InputItem(""), found.instruction, found.options, found.overflow, found.lora, self.names
        )
        return ClassesPlan(found.entry.id, call, status.labels or [_ONLY_LABEL])

    async def entries(self, reply: Answer, plan: ClassesPlan) -> list[list[dict[str, Any]]]:
        """Score and label of each pair. The lease ends."""
        with reply:
            scores = reply.tensors()["score"].tolist()
        return [[{"score": score, "label": plan.labels[0]}] for score in scores]


class PredictResource(InferenceRoute):
    """The form of the model that is served."""

    operation = "predict"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._classes, self._pairs = ClassesResource(services), PairsResource(services)

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """Classes, or scores where only they are served."""
        catalog = self.services.catalog
        scores = not is_served(catalog, ("json",), FAMILY) and is_served(catalog, ("score",))
        await (self._pairs if scores else self._classes).respond(req, resp, scope, target)
