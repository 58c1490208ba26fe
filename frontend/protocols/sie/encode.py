"""POST /v1/encode/{model}: items to vectors, in JSON or msgpack. POST /v1/embeddings: vectors in the form of OpenAI.

`VectorsResource` is the base of the routes for vectors in the forms of other APIs: all inputs alike, one output,
options by name.

1. A route says where its inputs are, what it asks of a model beside the inputs (`Wishes`), and how wide vectors are.
2. `check_wishes` refuses wishes that no model could fulfil, or that exclude each other.
3. `VectorsResource.plan` refuses what the loaded model does not offer, and makes the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from frontend.engine.answer import Answer
from frontend.engine.planning import check_dimensions, check_options
from frontend.http.threads import off_loop_if
from frontend.protocols.sie import chunking, items, render
from frontend.protocols.sie.flow import Form, InferenceResource, Plan, Timing, faults_of, timing_of
from frontend.protocols.sie.inputs import check_inputs, images_of, inputs_of, names_of
from frontend.protocols.sie.outputs import INLINE_NBYTES, dense_of, outputs_of
from frontend.protocols.sie.plans import (
    EncodePlan,
    TokenUsage,
    check_used,
    plan_encode,
    usage_of,
)
from frontend.protocols.sie.render import EncodedItems, json_array, json_parts, msgpack_parts
from frontend.protocols.sie.schemas import ENCODINGS, Body, EmbeddingsRequest, EncodeParams, EncodeRequest
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import IN_PARAMS, FieldNames
from ipc.wire.messages import Chunking, EncodeCall, InputItem, ModelStatus

QUERIES = ("query", "search_query")
"""Values of `input_type` for the query side of a model."""
DOCUMENTS = ("document", "passage", "search_document")
"""Values of `input_type` for the side of documents. Every other value states no side."""
R = TypeVar("R", bound=Body)


def side_of_type(input_type: str | None) -> bool | None:
    """Whether the inputs are queries, by `input_type`; None where no side is stated."""
    return True if input_type in QUERIES else False if input_type in DOCUMENTS else None


class Wishes(NamedTuple):
    """What a request asks of a model beside its inputs; None: as the model has it.

    `is_query` chooses the side. `prompt_name` is the name of a stored prompt, or chooses the side too.
    `max_tokens` cuts each text, by `overflow_policy`.
    """

    is_query: bool | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    overflow_policy: str | None = None
    max_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The wishes that travel as options of the call."""
        return {
            "overflow_policy": self.overflow_policy,
            "prompt_name": self.prompt_name,
            "max_tokens": self.max_tokens,
        }


def check_wishes(wishes: Wishes, names: FieldNames) -> None:
    """Raise `InvalidInput` for an unknown overflow policy, and for two ways to choose a prompt."""
    check_options(wishes.options, names)
    if wishes.prompt_name is None:
        return
    if wishes.instruction is not None:
        raise InvalidInput("prompt_name: cannot be given with instruction")
    if wishes.is_query is not None:
        raise InvalidInput("prompt_name: cannot be given with input_type")


class VectorsResource(InferenceResource[R, Plan[EncodeCall]], Generic[R]):
    """One output of all inputs; always JSON.

    `field` is the field of the request that has the inputs, `width_field` the one that has the width of vectors.
    """

    always_json = True
    field: ClassVar[str] = "input"
    width_field: ClassVar[str] = "dimensions"

    def examine(self, request: R) -> None:
        """Inputs of one kind that some model could take."""
        check_inputs(getattr(request, self.field), self.field, self.services.settings.limits)

    def check(self, request: R, entry: ModelEntry) -> list[InputItem]:
        """The texts, images and token ids as workers take them."""
        return inputs_of(getattr(request, self.field), self.field, entry)

    def names_of(self, request: R) -> FieldNames:
        """How messages name the inputs."""
        return names_of(getattr(request, self.field), self.field)

    def output_of(self, request: R, entry: ModelEntry) -> str:
        """The output of the model that the answer has."""
        return "dense"

    def wishes_of(self, request: R) -> Wishes:
        """What the request asks of the model beside its inputs."""
        return Wishes()

    def width_of(self, request: R) -> int | None:
        """The width of dense vectors; None for that of the model."""
        return None

    def images(self, request: R, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image among the inputs."""
        return images_of(inputs, self.names_of(request).item)

    def plan(
        self, request: R, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> Plan[EncodeCall]:
        """A call for the output with the options of the model's profile below those of the request."""
        output, wishes, names = (
            self.output_of(request, entry),
            self.wishes_of(request),
            self.names_of(request),
        )
        if output not in entry.outputs:
            raise InvalidInput(f"model: '{entry.id}' has no {output} output")
        check_used(wishes.options, entry, status)
        check_dimensions(self.width_of(request), entry, status.dims.get("dense", 0), self.width_field)
        resolved = self.resolve(entry, wishes.options, wishes.instruction, len(inputs), names)
        return Plan(resolved.entry.id, resolved.encode(inputs, [output], wishes.is_query, names))


async def dense_json(reply: Answer, width: int | None, *, unit: bool) -> list[bytes]:
    """JSON of the dense vectors, cut to `width` and then, if `unit`, brought to length 1; a copy."""
    rows = reply.tensors()["dense"][:, :width]
    if unit:
        rows = await unit_rows(rows)
    return await json_array(len(rows), rows.shape[1] * rows.itemsize, rows.__getitem__)


async def unit_rows(rows: np.ndarray) -> np.ndarray:
    """`normalized`, in a thread for many rows."""
    return await off_loop_if(rows.nbytes > INLINE_NBYTES, normalized, rows)


def normalized(rows: np.ndarray) -> np.ndarray:
    """float32 rows of length 1; a row of zeros stays."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units: np.ndarray = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return units


class EncodeResource(InferenceResource[EncodeRequest, EncodePlan]):
    """Dense, sparse and token vectors of items."""

    operation: ClassVar[str] = "encode"
    body = EncodeRequest
    itemized = True

    def examine(self, request: EncodeRequest) -> None:
        """Items and options that some model could take."""
        items.check_items(request.items, self.services.settings.limits)
        options = request.params.options if request.params else None
        check_options(options)
        if options and options.get(chunking.OPTION):
            texts = [item.text or "" for item in request.items]
            chunking.check(options[chunking.OPTION], texts, f"{IN_PARAMS.options}{chunking.OPTION}")

    def check(self, request: EncodeRequest, entry: ModelEntry) -> list[InputItem]:
        """The items as workers take them."""
        return items.inputs_of(request.items, entry, self.services.settings.limits)

    def images(self, request: EncodeRequest, inputs: list[InputItem]) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of the items."""
        return items.images_in(request.items)

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

        def timing() -> Timing:
            scope.phases["encode"] = (time.perf_counter() - began) * 1e3
            return timing_of(scope.phases, scope.elapsed_ms())

        answer = EncodedItems(
            scope.model,
            [item.id for item in request.items],
            await outputs_of(reply, plan),
            faults_of(reply),
            form.beside,
        )
        if not form.json:
            return await msgpack_parts(answer, timing)
        with reply:
            return await json_parts(answer, timing)


class Embedding(msgspec.Struct):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Annotated[Literal["embedding"], Meta(description="Names the form of this object.")]
    index: Annotated[int, Meta(description="Place in the request's list.")]
    embedding: Annotated[list[float] | str, Meta(description="The vector, or its bytes in base64.")]


class EmbeddingsResponse(msgspec.Struct):
    """Answer of embeddings, in the OpenAI form."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[Embedding], Meta(description="The list.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    usage: Annotated[TokenUsage, Meta(description="Counts of tokens.")]


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


async def _body(reply: Answer, request: EmbeddingsRequest, usage: TokenUsage) -> list[Buffer]:
    name = "chunks" if request.late_chunking else "dense"
    rows = (await dense_of(reply, "float32", request.dimensions, name)).quantized.values

    def entry_at(index: int) -> Embedding:
        vector: Any = rows[index]
        if request.encoding_format == "base64":
            vector = render.base64_of(vector)
        return Embedding("embedding", index, vector)

    data = await render.json_array(len(rows), rows.shape[1] * rows.itemsize, entry_at)
    return render.filled(EmbeddingsResponse("list", render.HOLE, request.model, usage), data)
