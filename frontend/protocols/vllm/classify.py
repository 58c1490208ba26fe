"""POST /classify: the likeliest class of each text, and the probabilities of all classes."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.foreign.classes import ClassesPlan, ClassifyResource, classes_of
from frontend.protocols.sie.inputs import check_inputs, inputs_of
from frontend.protocols.sie.render import json_list
from frontend.protocols.sie.route import Form
from frontend.protocols.vllm.envelope import around
from frontend.protocols.vllm.schemas import ClassifyRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import NoReplica
from ipc.wire.messages import InputItem, ModelStatus

_NUMBER_NBYTES = 20
"""About how long a number is."""


class VllmClassifyResource(ClassifyResource[ClassifyRequest]):
    """Probabilities in the order of the model's classes."""

    operation = "classify"
    body = ClassifyRequest

    def examine(self, request: ClassifyRequest) -> None:
        """Inputs of one kind."""
        check_inputs(request.input, "input", self.services.settings.limits)

    def check(self, request: ClassifyRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        return inputs_of(request.input, "input", entry)

    def plan(
        self, request: ClassifyRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for all classes."""
        request.check_cut(entry, status)
        return super().plan(request, entry, inputs, status)

    async def render(
        self, reply: Answer, plan: ClassesPlan, request: ClassifyRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body; the likeliest class comes first from the worker. Raises `NoReplica` for classes of another plan."""
        found = await classes_of(reply)
        if any({one.label for one in classes} != set(plan.labels) for classes in found):
            raise NoReplica(f"model '{plan.model}' was replaced by another during this request")
        entries = (
            {
                "index": index,
                "label": classes[0].label,
                "probs": [scores[label] for label in plan.labels],
                "num_classes": len(plan.labels),
            }
            for index, classes in enumerate(found)
            for scores in ({one.label: one.score for one in classes},)
        )
        nbytes = _NUMBER_NBYTES * sum(map(len, found))
        return around("classify", scope, await json_list(entries, nbytes), reply)
