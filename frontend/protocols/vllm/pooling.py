"""POST /pooling: one vector for each input, or one for each token, whichever the model has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.sie.inputs import check_inputs, inputs_of
from frontend.protocols.sie.render import base64_of, json_list
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.vectors import VectorsResource, Wishes
from frontend.protocols.vllm.envelope import around
from frontend.protocols.vllm.schemas import PoolingRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import EncodeCall, InputItem, ModelStatus

_OUTPUTS = {"embed": "dense", "token_embed": "multivector"}


class PoolingResource(VectorsResource[PoolingRequest]):
    """Vectors in the order of the inputs."""

    operation = "pooling"
    body = PoolingRequest

    def model_of(self, request: PoolingRequest) -> str:
        """The model that the request names, else the model that has the output."""
        outputs = (_OUTPUTS[request.task],) if request.task else tuple(_OUTPUTS.values())
        return model_named(request, self.services.catalog, self.services.settings, outputs)

    def examine(self, request: PoolingRequest) -> None:
        """Inputs of one kind."""
        check_inputs(request.input, "input", self.services.settings.limits)

    def check(self, request: PoolingRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        if self.output_of(request, entry) not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no vectors for the task {request.task or 'embed'}")
        return inputs_of(request.input, "input", entry)

    def output_of(self, request: PoolingRequest, entry: ModelEntry) -> str:
        """The output that the task means; without a task dense vectors, if the model has them."""
        if request.task:
            return _OUTPUTS[request.task]
        return next((name for name in _OUTPUTS.values() if name in entry.outputs), "dense")

    def wishes_of(self, request: PoolingRequest) -> Wishes:
        """Where texts are cut."""
        return Wishes(**request.cut)

    def width_of(self, request: PoolingRequest) -> int | None:
        """The wanted width."""
        return request.dimensions

    def plan(
        self, request: PoolingRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> Plan[EncodeCall]:
        """The call. Raises `InvalidInput` for a width of token vectors, and for a cut that the model cannot make."""
        request.check_cut(entry, status)
        if self.output_of(request, entry) == "multivector" and request.dimensions is not None:
            raise InvalidInput("dimensions: vectors of tokens cannot be cut")
        return super().plan(request, entry, inputs, status)

    async def render(
        self, reply: Answer, plan: Plan[EncodeCall], request: PoolingRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        [output] = plan.call.outputs
        with reply:
            values = reply.tensors()[output]
            if output == "dense":
                vectors = [row[: request.dimensions] for row in values]
            else:
                vectors = [values[span] for span in reply.spans(output)]
            write = base64_of if request.encoding_format == "base64" else np.asarray
            entries = (
                {"index": index, "object": "pooling", "data": write(vector)}
                for index, vector in enumerate(vectors)
            )
            return around("pool", scope, await json_list(entries, values.nbytes), reply)
