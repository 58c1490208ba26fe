"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.protocols.sie import chunking, render
from frontend.protocols.sie.convert import usage_of
from frontend.protocols.sie.encode import VectorsResource, Wishes, check_wishes, side_of_type
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.outputs import dense_of
from frontend.protocols.sie.schemas import ENCODINGS, EmbeddingsRequest
from frontend.resources.sending import Buffer
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import Chunking, EncodeCall, InputItem, ModelStatus


class EmbeddingsResource(VectorsResource[EmbeddingsRequest]):
    """Dense vectors in the OpenAI form; always JSON."""

    operation = "embeddings"
    body = EmbeddingsRequest

    def examine(self, request: EmbeddingsRequest) -> None:
        """A known encoding and overflow policy, and an input of one kind."""
        form = request.encoding_format
        if form is not None and form not in ENCODINGS:
            raise InvalidInput(f"encoding_format: {form[:64]!r} is not one of {', '.join(ENCODINGS)}")
        super().examine(request)
        check_wishes(self.wishes_of(request), self.names_of(request))
        if request.late_chunking:
            chunking.check_policy(request.overflow_policy, "overflow_policy")
            chunking.check_inputs(request.input, self.services.settings.limits)

    def wishes_of(self, request: EmbeddingsRequest) -> Wishes:
        """The side of the model, prompt and instruction, and what becomes of long texts."""
        side = side_of_type(request.input_type)
        return Wishes(side, request.prompt_name, request.instruction, request.overflow_policy)

    def width_of(self, request: EmbeddingsRequest) -> int | None:
        """The wanted width."""
        return request.dimensions

    def check(self, request: EmbeddingsRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts, images and token ids as workers take them."""
        inputs = super().check(request, entry)
        return (
            [chunking.document_of([item.text or "" for item in inputs])] if request.late_chunking else inputs
        )

    def plan(
        self,
        request: EmbeddingsRequest,
        entry: ModelEntry,
        inputs: list[InputItem],
        status: ModelStatus,
    ) -> Plan[EncodeCall]:
        """The call, divided into chunks where the request asks for late chunking."""
        plan = super().plan(request, entry, inputs, status)
        if request.late_chunking:
            call = chunking.divided(plan.call, Chunking("spans"), chunking.IN_EMBEDDINGS)
            return Plan(plan.model, call)
        return plan

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: EmbeddingsRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        usage = usage_of(sum(reply.tokens), reply.truncated)
        with reply:
            return await _body(reply, request, usage)


async def _body(reply: Answer, request: EmbeddingsRequest, usage: dict[str, Any]) -> list[Buffer]:
    name = "chunks" if request.late_chunking else "dense"
    rows = (await dense_of(reply, "float32", request.dimensions, name)).quantized.values

    def entry_at(index: int) -> dict[str, Any]:
        vector = rows[index]
        if request.encoding_format == "base64":
            vector = render.base64_of(vector)
        return {"object": "embedding", "index": index, "embedding": vector}

    data = await render.json_array(len(rows), rows.shape[1] * rows.itemsize, entry_at)
    return [
        b'{"object":"list","data":',
        *data,
        b',"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(usage) + b"}",
    ]
