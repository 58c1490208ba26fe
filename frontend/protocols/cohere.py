"""Cohere's API: embed in the forms of versions 1 and 2, rerank in the form of version 2, and the form of errors.

1. Texts, images or inputs become the inputs of one call over the flow of SIE; `input_type` chooses the side of the
   model. Unknown fields are ignored, null equals absent.
2. The vectors of the answer are cut to `output_dimension` once and brought into each of `embedding_types`.
3. Version 1 of embed answers without `embedding_types` with a list of vectors, all else with lists by type.
4. POST /v2/rerank answers with the documents of `/v1/rerank`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import falcon
import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.answer import Answer, quantize
from frontend.http.fields import check_count, check_texts
from frontend.http.threads import off_loop_if
from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.sie import CLIENT_FAULTS, HEADERS, SERVER_FAULTS, errors, faults
from frontend.protocols.sie.encode import VectorsResource, Wishes, check_wishes, side_of_type
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import ImageText, ImageUrl, Seen, joined, names_at, seen_input
from frontend.protocols.sie.outputs import INLINE_NBYTES, dense_of
from frontend.protocols.sie.render import HOLE, base64_of, filled, json_array
from frontend.protocols.sie.schemas import FlatBody, Key, Keys, ModelName, RerankRequest, keys_of
from frontend.protocols.sie.score import RerankResource, RerankResult, ranked_documents
from frontend.route_rows import asking
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput, PenstockError
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

Side = Literal["search_document", "search_query", "classification", "clustering", "image"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Truncate = Literal["NONE", "START", "END"]
Integers = list[list[int]] | UnsetType
_FLOATS = ("float", "base64")
_FIELDS = ("texts", "images", "inputs")
_POLICIES = {None: "truncate_text", "END": "truncate_text", "START": "truncate_left", "NONE": "error"}
_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
_TEXTS = {"model": _MODEL, "texts": ["first text", "second text"], "input_type": "search_document"}


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """A text of an input."""

    text: Annotated[str, Meta(description="The text.")]


class ImageContent(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image of an input."""

    image_url: Annotated[ImageUrl, Meta(description="The picture as a data URI.")]


class EmbedInput(msgspec.Struct):
    """One input: texts, which are joined, or one image."""

    content: Annotated[list[TextContent | ImageContent], Meta(description="What is said: a text or parts.")]

    def seen(self, where: str) -> Seen:
        """The text or image of the input. Raises `InvalidInput` for none, and for several."""
        texts = [part.text for part in self.content if isinstance(part, TextContent)]
        images = [
            Seen(None, part.image_url.url, f"{where}.content[{at}].image_url.url")
            for at, part in enumerate(self.content)
            if isinstance(part, ImageContent)
        ]
        return joined(texts, images, where)


class CohereEmbedV1Request(FlatBody, kw_only=True):
    """Body of POST /v1/embed."""

    model: ModelName
    texts: Annotated[list[str] | None, Meta(description="The texts to embed.")] = None
    images: Annotated[list[ImageText] | None, Meta(description="The images to embed.")] = None
    input_type: Annotated[
        Side | None, Meta(description="search_query chooses the query side of the model.")
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None, Meta(description="The forms of the vectors; float by default.")
    ] = None
    truncate: Annotated[
        Truncate | None, Meta(description="Where a text that is too long is cut; NONE refuses the text.")
    ] = None


class CohereEmbedRequest(CohereEmbedV1Request, kw_only=True):
    """Body of POST /v2/embed."""

    input_type: Annotated[Side, Meta(description="search_query chooses the query side of the model.")]
    inputs: Annotated[list[EmbedInput] | None, Meta(description="Texts and images in content parts.")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, description="Texts are cut to so many tokens.")] | None,
        Meta(description="Cut each input to so many tokens."),
    ] = None
    output_dimension: Annotated[
        int | None, Meta(description="Width of the vectors, by default that of the model.")
    ] = None

    def keys(self) -> Keys:
        """Names of fields, as `Body.keys`."""
        parts = [part for one in self.inputs or () for part in one.content]
        texts = sum(isinstance(part, TextContent) for part in parts)
        # Each part has the name of its field as its type too.
        counts = {
            "content": len(self.inputs or ()),
            "type": len(parts),
            "text": 2 * texts,
            "image_url": 2 * (len(parts) - texts),
            "url": len(parts) - texts,
        }
        return keys_of(CohereEmbedRequest), [(Key(name), times) for name, times in counts.items()]


class CohereError(msgspec.Struct):
    """An error in the form of Cohere."""

    message: Annotated[str, Meta(description="What is wrong, with field, value and limit.")]


class BilledUnits(msgspec.Struct):
    """What a request took."""

    input_tokens: Annotated[int | UnsetType, Meta(description="Tokens of texts.")] = UNSET
    image_tokens: Annotated[int | UnsetType, Meta(description="Tokens or patches of images.")] = UNSET
    images: Annotated[int | UnsetType, Meta(description="Number of images.")] = UNSET
    search_units: Annotated[int | UnsetType, Meta(description="1 for a rerank.")] = UNSET


class CohereMeta(msgspec.Struct):
    """Facts of a request."""

    api_version: Annotated[dict[str, str], Meta(description="`version`: 1 or 2.")]
    billed_units: Annotated[BilledUnits, Meta(description="Tokens and images.")]
    tokens: Annotated[dict[str, int] | UnsetType, Meta(description="`input_tokens` of a rerank.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Which inputs were cut.")] = UNSET


class EmbeddingsByType(msgspec.Struct):
    """Vectors in the types of the request."""

    float_: Annotated[list[list[float]] | UnsetType, Meta(description="As the model gives them.")] = (
        msgspec.field(default=UNSET, name="float")
    )
    int8: Annotated[Integers, Meta(description="Values over the largest of the vector, times 127.")] = UNSET
    uint8: Annotated[Integers, Meta(description="0 for the least of the vector, 255 for the largest.")] = (
        UNSET
    )
    binary: Annotated[Integers, Meta(description="`ubinary` less 128.")] = UNSET
    ubinary: Annotated[Integers, Meta(description="A bit for each value above 0, in bytes.")] = UNSET
    base64: Annotated[list[str] | UnsetType, Meta(description="Little-endian float32.")] = UNSET


_ATTRIBUTES = {"float": "float_"}
"""Attributes of `EmbeddingsByType` whose fields have other names, by field."""


class EmbedAnswer(msgspec.Struct):
    """Answer of embed."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    response_type: Annotated[
        Literal["embeddings_floats", "embeddings_by_type"], Meta(description="The form of `embeddings`.")
    ]
    texts: Annotated[list[str], Meta(description="The texts of the request.")]
    embeddings: Annotated[
        EmbeddingsByType | list[list[float]],
        Meta(description="A list only in version 1, where the request names no types."),
    ]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]


class CohereRerankAnswer(msgspec.Struct):
    """Answer of rerank, best first."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    results: Annotated[list[RerankResult], Meta(description="Best first.")]
    meta: Annotated[CohereMeta, Meta(description="Facts of the request.")]


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
                requested = request.embedding_types or ["float"]
                kinds = [kind for kind in EmbeddingsByType.__struct_encode_fields__ if kind in requested]
                vectors = [await array_of(rows, kind) for kind in kinds]
                by_type = EmbeddingsByType(**{_ATTRIBUTES.get(kind, kind): HOLE for kind in kinds})
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


class _CohereForm(ErrorForm):
    """`{"message"}`, with the statuses and headers of the SIE contract, which Cohere has too."""

    def render(self, error: PenstockError) -> Rendered:
        """An error of a request."""
        status, _, headers = errors.render(error)
        return status, self.body(status, error.message), headers

    def render_http(self, error: falcon.HTTPError) -> Rendered:
        """An error of the framework, such as a wrong method."""
        message = error.description or error.title or HTTPStatus(error.status_code).phrase
        return error.status_code, self.body(error.status_code, message), {}


def _body(status: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(CohereError(text))
    return body


_FORM = _CohereForm(lambda error: errors.contract_code(error)[0], _body)


_asking = partial(
    asking,
    tag="inference",
    errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=CohereError),
    parameters=HEADERS,
    timed=True,
)


ROUTES = (
    _asking(
        "/v1/embed",
        EmbedV1Resource,
        "Vectors in the form of Cohere's version 1.",
        CohereEmbedV1Request,
        EmbedAnswer,
        _TEXTS,
    ),
    _asking(
        "/v2/embed",
        EmbedResource,
        "Vectors in the form of Cohere's version 2.",
        CohereEmbedRequest,
        EmbedAnswer,
        {**_TEXTS, "embedding_types": ["float", "int8"], "output_dimension": 128},
    ),
    _asking(
        "/v2/rerank",
        RerankV2Resource,
        "Documents in the order in which they answer a query, in the form of Cohere's version 2.",
        RerankRequest,
        CohereRerankAnswer,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
)


class CohereProtocol(ServerProtocol):
    """Routes and error form of Cohere; `/v1/rerank` is a route of SIE and answers in both forms."""

    def __init__(self) -> None:
        super().__init__("cohere", ROUTES, _FORM)
