"""POST /embed: one vector for each input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import default_model
from frontend.engine.scope import RequestScope
from frontend.http.rendering import off_loop_if
from frontend.http.sending import Buffer
from frontend.protocols.sie.convert import check_dimensions
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.inputs import check_inputs, inputs_of, names_of
from frontend.protocols.sie.one_output import OutputPlan, plan_output
from frontend.protocols.sie.outputs import INLINE_NBYTES
from frontend.protocols.sie.render import json_array
from frontend.protocols.tei.schemas import EmbedRequest, is_query
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import InputItem, ModelStatus


class EmbedResource(InferenceResource[EmbedRequest, OutputPlan]):
    """Dense vectors as a bare array of arrays."""

    operation = "embed"
    body = EmbedRequest
    always_json = True

    def model_of(self, request: EmbedRequest) -> str:
        """The model that gives dense vectors."""
        return default_model(self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: EmbedRequest) -> None:
        """Inputs of one kind, and a prompt that has a name."""
        check_inputs(request.inputs, "inputs", self.services.settings.limits)
        is_query(request.prompt_name)

    def check(self, request: EmbedRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        return inputs_of(request.inputs)

    def plan(
        self, request: EmbedRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> OutputPlan:
        """A call for dense vectors."""
        check_dimensions(request.dimensions, entry, status.dims.get("dense", 0), "dimensions")
        names, query = names_of(request.inputs, "inputs"), is_query(request.prompt_name)
        return plan_output(self.services, entry, "dense", inputs, request.options, names, query)

    async def render(
        self,
        reply: Answer,
        plan: OutputPlan,
        request: EmbedRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The vectors, cut and then made as long as was asked."""
        with reply:
            rows = reply.tensors()["dense"][:, : request.dimensions]
            if request.normalize is not False:
                rows = await off_loop_if(rows.nbytes > INLINE_NBYTES, normalized, rows)
            return await json_array(len(rows), rows.shape[1] * rows.itemsize, rows.__getitem__)


def normalized(rows: np.ndarray) -> np.ndarray:
    """float32 rows of length 1; a row of zeros stays."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    found: np.ndarray = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return found
