"""POST /embeddings: vectors of texts, or of images that travel inside of the request."""

from __future__ import annotations

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.default_models import model_named
from frontend.engine.scope import RequestScope
from frontend.http.texts import check_count, check_texts
from frontend.protocols.foreign.unit_vectors import unit_rows
from frontend.protocols.infinity.envelope import around
from frontend.protocols.infinity.schemas import MultimodalRequest
from frontend.protocols.sie.inputs import names_at
from frontend.protocols.sie.media import Seen, input_of, require
from frontend.protocols.sie.render import base64_of, json_list
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.vectors import VectorsResource
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem


class MultimodalResource(VectorsResource[MultimodalRequest]):
    """Dense vectors of length 1 in the order of the inputs, cut after that."""

    operation = "embeddings"
    body = MultimodalRequest
    capability = "dense"

    def model_of(self, request: MultimodalRequest) -> str:
        """The model that the request names, else the model that gives dense vectors."""
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

    def names_of(self, request: MultimodalRequest) -> FieldNames:
        """An input that is no list is named like the only one of a list."""
        return names_at("input[{}]")

    def width_of(self, request: MultimodalRequest) -> int | None:
        """The wanted width; 0 asks for that of the model."""
        return request.dimensions or None

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: MultimodalRequest,
        scope: RequestScope,
        form: Form,
    ) -> list[bytes]:
        """The body, which holds no view on the result."""
        write = base64_of if request.encoding_format == "base64" else np.asarray
        with reply:
            values = await unit_rows(reply.tensors()["dense"])
            entries = (
                {"object": "embedding", "embedding": write(row[: request.dimensions or None]), "index": index}
                for index, row in enumerate(values)
            )
            return around("list", scope, await json_list(entries, values.nbytes), reply)
