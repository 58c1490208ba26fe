"""POST /v1/embeddings: the OpenAI form over the same engine."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from frontend.engine.answer import Answer
from frontend.engine.options import check_options, resolve
from frontend.engine.scope import RequestScope
from frontend.http.sending import Buffer
from frontend.protocols.sie import chunking, render
from frontend.protocols.sie.convert import check_dimensions, options_of, require_texts, usage_of
from frontend.protocols.sie.flow import InferenceResource
from frontend.protocols.sie.inputs import check_inputs, inputs_of, names_of, tokens_of
from frontend.protocols.sie.outputs import dense_of
from frontend.protocols.sie.schemas import EmbeddingsRequest
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.messages import Chunking, EncodeCall, InputItem, ModelStatus


@dataclass(frozen=True, slots=True)
class EmbeddingsPlan:
    """What to run and on which entry."""

    model: str
    call: EncodeCall


class EmbeddingsResource(InferenceResource[EmbeddingsRequest, EmbeddingsPlan]):
    """Dense vectors in the OpenAI form; always JSON."""

    operation = "embeddings"
    body = EmbeddingsRequest
    always_json = True

    def examine(self, request: EmbeddingsRequest) -> None:
        """A known encoding and overflow policy, and an input of one kind."""
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidInput(
                f"encoding_format: {request.encoding_format[:64]!r} is not one of float, base64"
            )
        limits = self.services.settings.limits
        check_inputs(request.input, "input", limits)
        check_options(options_of(request), names_of(request.input, "input"))
        if request.late_chunking:
            chunking.check_policy(request.overflow_policy, "overflow_policy")
            chunking.check_inputs(request.input, limits)

    def check(self, request: EmbeddingsRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts and token ids as workers take them."""
        require_texts(entry)
        if request.late_chunking:
            return [chunking.document_of(request.input)]  # type: ignore[arg-type]
        return inputs_of(request.input)

    def plan(
        self,
        request: EmbeddingsRequest,
        entry: ModelEntry,
        inputs: list[InputItem],
        status: ModelStatus,
    ) -> EmbeddingsPlan:
        """A call for dense vectors with the options of the model's profile."""
        if "dense" not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no dense output")
        check_dimensions(request.dimensions, entry, status.dims.get("dense", 0), "dimensions")
        limits, names = self.services.settings.limits, names_of(request.input, "input")
        found = resolve(entry, options_of(request), None, self.services.catalog, len(inputs), limits, names)
        is_query = bool(found.options.get("is_query"))
        call = EncodeCall(
            inputs, ["dense"], found.instruction, is_query, found.options, found.overflow, found.lora, names
        )
        if request.late_chunking:
            call = chunking.divided(call, Chunking("spans"), chunking.IN_EMBEDDINGS)
        return EmbeddingsPlan(entry.id, call)

    async def render(
        self,
        reply: Answer,
        plan: EmbeddingsPlan,
        request: EmbeddingsRequest,
        scope: RequestScope,
        beside: dict[str, Any],
        json: bool,
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        usage = usage_of(tokens_of(plan.call.items, reply.tokens), reply.truncated)
        with reply:
            return await _body(reply, request, usage)


async def _body(reply: Answer, request: EmbeddingsRequest, usage: dict[str, Any]) -> list[Buffer]:
    name = "chunks" if request.late_chunking else "dense"
    rows = (await dense_of(reply, "float32", request.dimensions, name)).quantized.values

    def entry_at(index: int) -> dict[str, Any]:
        vector = rows[index]
        if request.encoding_format == "base64":
            vector = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return {"object": "embedding", "index": index, "embedding": vector}

    data = await render.json_array(len(rows), rows.shape[1] * rows.itemsize, entry_at)
    return [
        b'{"object":"list","data":',
        *data,
        b',"model":' + orjson.dumps(request.model) + b',"usage":' + orjson.dumps(usage) + b"}",
    ]
