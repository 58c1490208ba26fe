"""POST /v1/encode/{model}: items to vectors, in JSON or msgpack."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from frontend.engine.answer import Answer
from frontend.engine.options import check_options
from frontend.protocols.sie import chunking
from frontend.protocols.sie.convert import EncodePlan, plan_encode
from frontend.protocols.sie.flow import InferenceResource, timing_of
from frontend.protocols.sie.items import check_items, images_in, inputs_of
from frontend.protocols.sie.outputs import outputs_of
from frontend.protocols.sie.render import EncodedItems, json_parts, msgpack_parts
from frontend.protocols.sie.route import Form
from frontend.protocols.sie.schemas import EncodeParams, EncodeRequest
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import InputItem, ModelStatus


class EncodeResource(InferenceResource[EncodeRequest, EncodePlan]):
    """Dense, sparse and token vectors of items."""

    operation: ClassVar[str] = "encode"
    body = EncodeRequest
    itemized = True
    kept = "timed"

    def examine(self, request: EncodeRequest) -> None:
        """Items and options that some model could take."""
        check_items(request.items, self.services.settings.limits)
        options = request.params.options if request.params else None
        check_options(options)
        if options and options.get(chunking.OPTION):
            texts = [item.text or "" for item in request.items]
            chunking.check(options[chunking.OPTION], texts, f"{IN_PARAMS.options}{chunking.OPTION}")

    def check(self, request: EncodeRequest, entry: ModelEntry) -> list[InputItem]:
        """The items as workers take them."""
        return inputs_of(request.items, entry, self.services.settings.limits)

    def images(self, request: EncodeRequest, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of the items."""
        return images_in(request.items)

    def plan(
        self, request: EncodeRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> EncodePlan:
        """The call and its rendering."""
        params = request.params or EncodeParams()
        resolved = self.resolve(entry, params.options, params.instruction, len(inputs))
        return plan_encode(inputs, resolved, params, status.dims, self.services.settings.arena.bytes)

    def params_of(self, request: EncodeRequest) -> EncodeParams | None:
        """The parameters of the request."""
        return request.params

    async def render(
        self, reply: Answer, plan: EncodePlan, request: EncodeRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body. A JSON body holds no view on the result, so the lease ends here."""
        began = time.perf_counter()

        def timing() -> dict[str, float | None]:
            scope.phases["encode"] = (time.perf_counter() - began) * 1e3
            return timing_of(scope.phases, scope.elapsed_ms())

        answer = EncodedItems(
            scope.model,
            [item.id for item in request.items],
            await outputs_of(reply, plan),
            {error.index: {"code": error.code, "message": error.message} for error in reply.errors},
            form.beside,
        )
        if not form.json:
            return await msgpack_parts(answer, timing)
        with reply:
            return await json_parts(answer, timing)
