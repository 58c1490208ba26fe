"""POST /embeddings: vectors of texts, or of images that travel inside of the request."""

from __future__ import annotations

from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.engine.scope import RequestScope
from frontend.http.texts import check_count, check_texts
from frontend.protocols.foreign.unit_vectors import unit_rows
from frontend.protocols.infinity.envelope import around
from frontend.protocols.infinity.schemas import MultimodalRequest
from frontend.protocols.sie.dense import Wishes, check_width, plan_vectors
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.inputs import images_of, names_at
from frontend.protocols.sie.media import Seen, input_of, require
from frontend.protocols.sie.one_output import OutputPlan
from frontend.protocols.sie.render import base64_of, json_list
from ipc.catalog.entries import ModelEntry
from ipc.wire.messages import InputItem, ModelStatus


class MultimodalResource(InferenceResource[MultimodalRequest, OutputPlan]):
    """Dense vectors of length 1 in the order of the inputs, cut after that."""

    operation = "embeddings"
    body = MultimodalRequest
    always_json = True
    capability = "dense"

    def model_of(self, request: MultimodalRequest) -> str:
        """The model that the request names, or the one that gives dense vectors."""
        return model_named(request, self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: MultimodalRequest) -> None:
        """Texts or images that some model could take."""
        limits = self.services.settings.limits
        check_count(len(request.inputs), "input", limits)
        if request.kind == "text":
            check_texts(request.inputs, "input[{}]", limits)

    def check(self, request: MultimodalRequest, entry: ModelEntry) -> list[InputItem]:
        """The inputs as workers take them. Raises `InvalidInput` for a kind that the model does not take."""
        require(request.kind, "modality", entry)
        found = []
        for at, given in enumerate(request.inputs):
            place = f"input[{at}]"
            found.append(
                input_of(Seen(given) if request.kind == "text" else Seen(None, given, place), place, entry)
            )
        return found

    def images(self, request: MultimodalRequest, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """Those of the inputs."""
        return images_of(inputs, "input[{}]")

    def plan(
        self, request: MultimodalRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> OutputPlan:
        """A call for dense vectors."""
        check_width(request.dimensions or None, entry, status, "dimensions")
        return plan_vectors(self.services, entry, status, inputs, Wishes(), names_at("input[{}]"))

    async def render(
        self,
        reply: Answer,
        plan: OutputPlan,
        request: MultimodalRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> list[bytes]:
        """The body, which holds no view on the result."""
        form = base64_of if request.encoding_format == "base64" else np.asarray
        with reply:
            values = await unit_rows(reply.tensors()["dense"])
            entries = (
                {"object": "embedding", "embedding": form(row[: request.dimensions or None]), "index": index}
                for index, row in enumerate(values)
            )
            return around("list", scope, await json_list(entries, values.nbytes), reply)
