"""POST /embeddings: vectors of texts, or of images that travel inside of the request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.http.texts import check_count, check_texts
from frontend.protocols.infinity.envelope import around
from frontend.protocols.infinity.schemas import MultimodalRequest
from frontend.protocols.sie.convert import check_dimensions
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.inputs import names_of
from frontend.protocols.sie.one_output import OutputPlan, plan_output
from frontend.protocols.sie.render import json_list
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import InputItem, ModelStatus

_SHOWN = 64


class MultimodalResource(InferenceResource[MultimodalRequest, OutputPlan]):
    """Dense vectors in the order of the inputs."""

    operation = "embeddings"
    body = MultimodalRequest
    always_json = True

    def model_of(self, request: MultimodalRequest) -> str:
        """The model that the request names, or the one that gives dense vectors."""
        return model_named(request, self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: MultimodalRequest) -> None:
        """Texts or images that some model could take."""
        limits = self.services.settings.limits
        check_count(len(request.inputs), "input", limits)
        if request.modality == "audio":
            raise InvalidInput("modality: 'audio' is not offered, only text and image")
        if request.modality != "image":
            check_texts(request.inputs, "input[{}]", limits)

    def check(self, request: MultimodalRequest, entry: ModelEntry) -> list[InputItem]:
        """The inputs as workers take them. Raises `InvalidInput` for a kind that the model does not take."""
        kind = request.modality or "text"
        if kind not in entry.inputs or "dense" not in entry.outputs:
            raise InvalidInput(f"modality: model '{entry.id}' gives no vectors of {kind}")
        if kind == "text":
            return [InputItem(text) for text in request.inputs]
        return [InputItem(images=[data]) for _, data in self.images(request)]

    def images(self, request: MultimodalRequest) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image."""
        if request.modality != "image":
            return []
        return [
            (place, _decoded(text, place))
            for place, text in ((f"input[{at}]", text) for at, text in enumerate(request.inputs))
        ]

    def plan(
        self, request: MultimodalRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> OutputPlan:
        """A call for dense vectors."""
        check_dimensions(request.dimensions or None, entry, status.dims.get("dense", 0), "dimensions")
        options = request.options if request.modality != "image" else {}
        names = names_of(request.inputs, "input")  # type: ignore[arg-type]
        return plan_output(self.services, entry, "dense", inputs, options, names)

    async def render(
        self,
        reply: Answer,
        plan: OutputPlan,
        request: MultimodalRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        form = _base64 if request.encoding_format == "base64" else np.asarray
        with reply:
            values = reply.tensors()["dense"]
            entries = (
                {"object": "embedding", "embedding": form(row[: request.dimensions or None]), "index": index}
                for index, row in enumerate(values)
            )
            return around("list", scope, await json_list(entries, values.nbytes), reply)


def _decoded(text: str, where: str) -> bytes:
    head, comma, data = text.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise InvalidInput(f"{where}: {text[:_SHOWN]!r} is no data URI in base64, and nothing is fetched")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"{where}: no base64 ({error})") from None


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
