"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.sie import chunking, render
from frontend.protocols.sie.convert import usage_of
from frontend.protocols.sie.dense import QUERIES, Wishes, check_width, check_wishes, plan_vectors
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.inputs import check_inputs, images_of, inputs_of, names_of, tokens_of
from frontend.protocols.sie.one_output import OutputPlan
from frontend.protocols.sie.outputs import dense_of
from frontend.protocols.sie.schemas import ENCODINGS, EmbeddingsRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import Chunking, InputItem, ModelStatus


class EmbeddingsResource(InferenceResource[EmbeddingsRequest, OutputPlan]):
    """Dense vectors in the OpenAI form; always JSON."""

    operation = "embeddings"
    body = EmbeddingsRequest
    always_json = True
    kept = "plain"

    def examine(self, request: EmbeddingsRequest) -> None:
        """A known encoding and overflow policy, and an input of one kind."""
        form = request.encoding_format
        if form is not None and form not in ENCODINGS:
            raise InvalidInput(f"encoding_format: {form[:64]!r} is not one of {', '.join(ENCODINGS)}")
        limits = self.services.settings.limits
        check_inputs(request.input, "input", limits)
        check_wishes(_wishes(request), names_of(request.input, "input"))
        if request.late_chunking:
            chunking.check_policy(request.overflow_policy, "overflow_policy")
            chunking.check_inputs(request.input, limits)

    def check(self, request: EmbeddingsRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts, images and token ids as workers take them."""
        inputs = inputs_of(request.input, "input", entry)
        return (
            [chunking.document_of([item.text or "" for item in inputs])] if request.late_chunking else inputs
        )

    def images(self, request: EmbeddingsRequest, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """Those of the inputs."""
        return images_of(inputs, "input[{}]")

    def plan(
        self,
        request: EmbeddingsRequest,
        entry: ModelEntry,
        inputs: list[InputItem],
        status: ModelStatus,
    ) -> OutputPlan:
        """A call for dense vectors with the options of the model's profile."""
        names = names_of(request.input, "input")
        plan = plan_vectors(self.services, entry, status, inputs, _wishes(request), names)
        check_width(request.dimensions, entry, status, "dimensions")
        if request.late_chunking:
            call = chunking.divided(plan.call, Chunking("spans"), chunking.IN_EMBEDDINGS)
            return OutputPlan(plan.model, call)
        return plan

    async def render(
        self,
        reply: Answer,
        plan: OutputPlan,
        request: EmbeddingsRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        usage = usage_of(tokens_of(plan.call.items, reply.tokens), reply.truncated)
        with reply:
            return await _body(reply, request, usage)


def _wishes(request: EmbeddingsRequest) -> Wishes:
    side = None if request.input_type is None else request.input_type in QUERIES
    return Wishes(side, request.prompt_name, request.instruction, request.overflow_policy)


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
