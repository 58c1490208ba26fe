"""The routes of Cohere: dense vectors of texts and images in one or more number types, and rerank of version 2.

1. Texts, images or inputs become the inputs of one call; `input_type` chooses the side of the model.
2. The vectors of the answer are cut to `output_dimension` once and brought into each of `embedding_types`.
3. Version 1 of embed answers without `embedding_types` with a list of vectors, all else with lists by type.
4. POST /v2/rerank answers with the documents of `/v1/rerank`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType

from frontend.engine.answer import Answer, quantize
from frontend.http.fields import check_count, check_texts
from frontend.http.rendering import off_loop_if
from frontend.protocols.cohere.contract import (
    BilledUnits,
    CohereEmbedRequest,
    CohereEmbedV1Request,
    CohereMeta,
    CohereRerankAnswer,
    EmbedAnswer,
    EmbeddingsByType,
)
from frontend.protocols.sie.encode import VectorsResource, Wishes, check_wishes, side_of_type
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import Seen, names_at, seen_input
from frontend.protocols.sie.outputs import INLINE_NBYTES, dense_of
from frontend.protocols.sie.render import HOLE, base64_of, filled, json_array
from frontend.protocols.sie.schemas import RerankRequest
from frontend.protocols.sie.score import RerankResource, ranked_documents
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

_FLOATS = ("float", "base64")


async def texts_of(texts: Sequence[str]) -> list[Buffer]:
    """JSON of the texts of a request."""
    return list(await json_array(len(texts), sum(map(len, texts)) // max(1, len(texts)), texts.__getitem__))


async def array_of(rows: np.ndarray, kind: str) -> list[Buffer]:
    """JSON of all vectors, float32 [n, d], in one type."""
    large = kind not in _FLOATS and rows.nbytes > INLINE_NBYTES
    values = rows if kind in _FLOATS else await off_loop_if(large, _packed, rows, kind)

    def entry_at(index: int) -> Any:
        if kind == "base64":
            return base64_of(values[index])
        return values[index]

    return list(await json_array(len(values), values[:1].nbytes, entry_at))


def _packed(rows: np.ndarray, kind: str) -> np.ndarray:
    """The vectors in an integer type; `binary` is `ubinary` less 128, as signed bytes."""
    values = quantize(rows, kind).values
    return (values ^ 0x80).view(np.int8) if kind == "binary" else values


TYPES = dict(zip(EmbeddingsByType.__struct_encode_fields__, EmbeddingsByType.__struct_fields__, strict=True))
"""Types of vectors in the order of an answer, and the fields of `EmbeddingsByType` that have them."""
_FIELDS = ("texts", "images", "inputs")
_POLICIES = {None: "truncate_text", "END": "truncate_text", "START": "truncate_left", "NONE": "error"}

R = TypeVar("R", bound=CohereEmbedV1Request)


class EmbedV1Resource(VectorsResource[R]):
    """Version 1."""

    operation = "embed"
    body: type[Any] = CohereEmbedV1Request
    width_field = "output_dimension"
    version = "1"

    def examine(self, request: R) -> None:
        """Inputs in one of the fields, none of which is too long for every model."""
        field, inputs = _inputs(request)
        check_count(len(inputs), field, self.services.settings.limits)
        check_texts([one.text or "" for one in inputs], f"{field}[{{}}]", self.services.settings.limits)
        if request.embedding_types == []:
            raise InvalidInput("embedding_types: may not be empty")
        check_wishes(self.wishes_of(request), self.names_of(request))

    def names_of(self, request: R) -> FieldNames:
        """The one field of inputs that the request has."""
        return names_at(f"{_inputs(request)[0]}[{{}}]")

    def wishes_of(self, request: R) -> Wishes:
        """The side of the model, and where texts are cut."""
        side = side_of_type(request.input_type)
        return Wishes(side, overflow_policy=_POLICIES[request.truncate])

    def check(self, request: R, entry: ModelEntry) -> list[InputItem]:
        """The texts and images as workers take them."""
        field, inputs = _inputs(request)
        return [seen_input(one, f"{field}[{at}]", entry) for at, one in enumerate(inputs)]

    async def render(
        self, reply: Answer, plan: Plan[EncodeCall], request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        items = plan.call.items
        meta = _meta(self.version, items, reply)
        with reply:
            rows = (await dense_of(reply, "float32", self.width_of(request))).quantized.values
            if request.embedding_types is None and self.version == "1":
                vectors = [await array_of(rows, "float")]
                answer = EmbedAnswer(_new_id(), "embeddings_floats", HOLE, HOLE, meta)
            else:
                kinds = [kind for kind in TYPES if kind in (request.embedding_types or ["float"])]
                vectors = [await array_of(rows, kind) for kind in kinds]
                by_type = EmbeddingsByType(**{TYPES[kind]: HOLE for kind in kinds})
                answer = EmbedAnswer(_new_id(), "embeddings_by_type", HOLE, by_type, meta)
        texts = await texts_of([item.text for item in items if item.text is not None])
        return filled(answer, texts, *vectors)


class EmbedResource(EmbedV1Resource[CohereEmbedRequest]):
    """Version 2."""

    body = CohereEmbedRequest
    version = "2"

    def wishes_of(self, request: CohereEmbedRequest) -> Wishes:
        """As version 1, and how many tokens are left of a text."""
        return super().wishes_of(request)._replace(max_tokens=request.max_tokens)

    def width_of(self, request: CohereEmbedRequest) -> int | None:
        """The wanted width of the vectors."""
        return request.output_dimension


def _inputs(request: CohereEmbedV1Request) -> tuple[str, list[Seen]]:
    """The field with the inputs of a request, and their texts and images. Raises `InvalidInput` unless one is set."""
    given = [name for name in _FIELDS if getattr(request, name, None) is not None]
    if len(given) != 1:
        known = [name for name in _FIELDS if name in request.__struct_fields__]
        raise InvalidInput(f"{', '.join(known)}: expected one of them, got {', '.join(given) or 'none'}")
    [field] = given
    if field == "texts":
        return field, [Seen(text) for text in request.texts or ()]
    if field == "images":
        return field, [Seen(None, image, f"images[{at}]") for at, image in enumerate(request.images or ())]
    return field, [one.seen(f"inputs[{at}]") for at, one in enumerate(getattr(request, field))]


def _new_id() -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _meta(version: str, items: Sequence[InputItem], reply: Answer) -> CohereMeta:
    used: dict[str, int] = {}
    for item, tokens in zip(items, reply.tokens, strict=True):
        kind = "image_tokens" if item.images else "input_tokens"
        used[kind] = used.get(kind, 0) + tokens
    if "image_tokens" in used:
        used["images"] = sum(bool(item.images) for item in items)
    warnings = _warnings("inputs", reply)
    return CohereMeta({"version": version}, BilledUnits(**used), warnings=warnings)


def _warnings(what: str, reply: Answer) -> list[str] | UnsetType:
    return [f"these {what} were cut: {', '.join(map(str, reply.truncated))}"] if reply.truncated else UNSET


class RerankV2Resource(RerankResource):
    """Documents in the order in which they answer a query."""

    def answer(
        self, request: RerankRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> CohereRerankAnswer:
        """The best documents, at most `top_n`, and the tokens of all pairs."""
        tokens, warnings = {"input_tokens": sum(reply.tokens)}, _warnings("documents", reply)
        meta = CohereMeta({"version": "2"}, BilledUnits(search_units=1), tokens, warnings)
        return CohereRerankAnswer(_new_id(), ranked_documents(request, scores), meta)
