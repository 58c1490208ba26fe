"""The routes of infinity: POST /embeddings, /classify and /rerank, and GET /models with the abilities of each model.

All but the last go the way of SIE. Absent and null fields have their defaults, unknown fields are ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import falcon
import msgspec
import numpy as np
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.http.fields import check_count, check_texts
from frontend.protocols.foreign.scoring import (
    ENTRY_NBYTES,
    FAMILY,
    ClassesPlan,
    TextClassesResource,
    TextRankingResource,
    activation_option,
    function_option,
    labelled,
)
from frontend.protocols.foreign.server import BARE_FAULTS, BARE_FORM, BareError, ServerProtocol
from frontend.protocols.sie.encode import VectorsResource, unit_rows
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import Seen, names_at, require, seen_input
from frontend.protocols.sie.render import HOLE, base64_of, filled, json_list
from frontend.protocols.sie.schemas import FlatBody
from frontend.route_rows import Route, asking
from frontend.scope import RequestScope
from frontend.sending import Buffer
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

ModelName = Annotated[
    str | None,
    Meta(
        description="Name of the model; `default/not-specified`, as no name, is the only model that can answer."
    ),
]
RawScores = Annotated[bool | None, Meta(description="Give the bare logits.")]
Capability = Literal["embed", "image_embed", "rerank", "classify"]
_asking = partial(asking, tag="infinity", errors=BARE_FAULTS, error_code_header=False, timed=True)


class Naming(FlatBody, kw_only=True):
    """What all requests say. What is too long is cut, as infinity does."""

    model: ModelName = None


class MultimodalRequest(Naming, kw_only=True):
    """Body of POST /embeddings."""

    input: Annotated[str | list[str], Meta(description="A text or an image, or several of them.")]
    modality: Annotated[
        Literal["text", "image", "audio"] | None,
        Meta(description="What the inputs are; images are data URIs in base64, audio is refused."),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="Numbers, or base64 of little-endian float32.")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Only the first so many values of each vector; 0 for all."),
    ] = None

    @property
    def kind(self) -> str:
        """The kind of the inputs. Raises `InvalidInput` for audio."""
        if self.modality == "audio":
            raise InvalidInput("modality: 'audio' is not offered, only text and image")
        return self.modality or "text"

    @property
    def inputs(self) -> list[str]:
        """The inputs."""
        return [self.input] if isinstance(self.input, str) else self.input


class InfinityClassifyRequest(Naming, kw_only=True):
    """Body of POST /classify."""

    input: Annotated[list[str], Meta(description="The texts.")]
    raw_scores: RawScores = None

    @property
    def items(self) -> list[InputItem]:
        """The texts."""
        return list(map(InputItem, self.input))

    @property
    def options(self) -> dict[str, Any]:
        """Logits where they are wanted."""
        return function_option(bool(self.raw_scores))


class InfinityRerankRequest(Naming, kw_only=True):
    """Body of POST /rerank."""

    query: Annotated[str, Meta(description="What the documents should answer.")]
    documents: Annotated[list[str], Meta(description="The texts to order.")]
    return_documents: Annotated[bool | None, Meta(description="Repeat each document.")] = None
    raw_scores: RawScores = None
    top_n: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Only the best so many.")] = None

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return self.documents

    @property
    def most(self) -> int | None:
        """So many of the best, None for all."""
        return self.top_n

    @property
    def repeats(self) -> bool:
        """Whether the answer has the documents."""
        return bool(self.return_documents)

    @property
    def options(self) -> dict[str, Any]:
        """Logits where they are wanted."""
        return activation_option(bool(self.raw_scores))


class InfinityStats(msgspec.Struct):
    """Figures of a model. The figures of its queue are among the metrics."""

    batch_size: Annotated[int, Meta(description="Most items of a batch.")]


class InfinityModel(msgspec.Struct, kw_only=True):
    """One model."""

    id: Annotated[str, Meta(description="Name of the model.")]
    stats: Annotated[InfinityStats, Meta(description="Figures of the model.")]
    object: Annotated[Literal["model"], Meta(description="Names the form of this object.")] = "model"
    owned_by: Annotated[str, Meta(description="Always `penstock`.")] = "penstock"
    created: Annotated[int, Meta(description="When this process began, in seconds since 1970.")]
    backend: Annotated[Literal["torch"], Meta(description="What runs the model.")] = "torch"
    capabilities: Annotated[
        list[Capability], Meta(description="The kinds of requests that the model answers.")
    ]


class InfinityModels(msgspec.Struct, kw_only=True):
    """All models of these kinds."""

    data: Annotated[list[InfinityModel], Meta(description="The list.")]
    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")] = "list"


class InfinityUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of all inputs.")]
    total_tokens: Annotated[int, Meta(description="The same.")]


class _Answer(msgspec.Struct):
    model: Annotated[str, Meta(description="Name of the model that answered.")]
    usage: Annotated[InfinityUsage, Meta(description="Counts of tokens.")]
    id: Annotated[str, Meta(description="A new id of the answer.")]
    created: Annotated[int, Meta(description="When the answer was made, in seconds since 1970.")]


class InfinityVector(msgspec.Struct):
    """The vector of one input."""

    object: Annotated[Literal["embedding"], Meta(description="Names the form of this object.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64.")]
    index: Annotated[int, Meta(description="Place of the input in the request.")]


class MultimodalAnswer(_Answer):
    """Answer of /embeddings."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[InfinityVector], Meta(description="The list.")]


class InfinityClass(msgspec.Struct):
    """A class of a text."""

    score: Annotated[float, Meta(description="How likely the class is; with `raw_scores` the logit.")]
    label: Annotated[str, Meta(description="Name of the class.")]


class InfinityClassifyAnswer(_Answer):
    """Answer of /classify: for each text its classes, the likeliest first."""

    object: Annotated[Literal["classify"], Meta(description="Names the form of this object.")]
    data: Annotated[list[list[InfinityClass]], Meta(description="The list.")]


class InfinityRank(msgspec.Struct):
    """A document at its rank."""

    relevance_score: Annotated[float, Meta(description="How well the document answers the query.")]
    index: Annotated[int, Meta(description="Place of the document in the request.")]
    document: Annotated[str | None, Meta(description="The document, with `return_documents`.")]


class InfinityRerankAnswer(_Answer):
    """Answer of /rerank."""

    object: Annotated[Literal["rerank"], Meta(description="Names the form of this object.")]
    results: Annotated[list[InfinityRank], Meta(description="The documents, the best first.")]


A = TypeVar("A", MultimodalAnswer, InfinityClassifyAnswer, InfinityRerankAnswer)


def around(form: type[A], kind: Any, entries: list[Any], scope: RequestScope, reply: Answer) -> A:
    """The answer around a list of entries."""
    used = sum(reply.tokens)
    usage, identity = InfinityUsage(used, used), f"infinity-{uuid.uuid4()}"
    return form(scope.model, usage, identity, int(time.time()), kind, entries)


class MultimodalResource(VectorsResource[MultimodalRequest]):
    """Dense vectors of length 1 in the order of the inputs, cut after that."""

    operation = "embeddings"
    body = MultimodalRequest
    capability = "dense"

    def model_of(self, request: MultimodalRequest) -> str:
        """The model that the request names, else the model that gives dense vectors."""
        return model_named(request, self.services.directory, self.services.settings, ("dense",))

    def examine(self, request: MultimodalRequest) -> None:
        """Texts or images that some model could take."""
        limits = self.services.settings.limits
        check_count(len(request.inputs), "input", limits)
        if request.kind == "text":
            check_texts(request.inputs, "input[{}]", limits)

    def check(self, request: MultimodalRequest, entry: ModelEntry) -> list[InputItem]:
        """The inputs as workers take them. Raises `InvalidInput` for a kind that the model does not take."""
        require(request.kind, "modality", entry)
        items = []
        for at, given in enumerate(request.inputs):
            place = f"input[{at}]"
            items.append(
                seen_input(Seen(given) if request.kind == "text" else Seen(None, given, place), place, entry)
            )
        return items

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
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        write: Callable[[np.ndarray], Any] = base64_of if request.encoding_format == "base64" else np.asarray
        with reply:
            values = await unit_rows(reply.tensors()["dense"])
            entries = (
                InfinityVector("embedding", write(row[: request.dimensions or None]), index)
                for index, row in enumerate(values)
            )
            pieces = await json_list(entries, values.nbytes)
        return filled(around(MultimodalAnswer, "list", HOLE, scope, reply), pieces)


class InfinityClassifyResource(TextClassesResource[InfinityClassifyRequest]):
    """Score and label of each class."""

    operation = "classify"
    body = InfinityClassifyRequest

    async def render(
        self,
        reply: Answer,
        plan: ClassesPlan,
        request: InfinityClassifyRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """The body."""
        classes = await labelled(reply, InfinityClass)
        pieces = await json_list(iter(classes), ENTRY_NBYTES * sum(map(len, classes)))
        return filled(around(InfinityClassifyAnswer, "classify", HOLE, scope, reply), pieces)


class InfinityRerankResource(TextRankingResource[InfinityRerankRequest]):
    """Scores of documents, each with its text where that was asked for."""

    body = InfinityRerankRequest

    def entry(self, index: int, score: float, text: str | None) -> InfinityRank:
        """Score, index, and document or null."""
        return InfinityRank(score, index, text)

    def around(self, best: list[InfinityRank], scope: RequestScope, reply: Answer) -> InfinityRerankAnswer:
        """The documents beside model and usage."""
        return around(InfinityRerankAnswer, "rerank", best, scope, reply)


class InfinityModelsResource:
    """The list."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON; models that can do nothing of this are left out."""
        services = self._services
        stats = InfinityStats(services.settings.batch.max_items)
        models = [
            InfinityModel(id=entry.id, stats=stats, created=int(services.started_at), capabilities=able)
            for entry in services.catalog.entries
            if (able := _capabilities(entry))
        ]
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(InfinityModels(data=models))


def _capabilities(entry: ModelEntry) -> list[Capability]:
    able: dict[Capability, bool] = {
        "embed": "dense" in entry.outputs and "text" in entry.inputs,
        "image_embed": "dense" in entry.outputs and "image" in entry.inputs,
        "rerank": "score" in entry.outputs,
        "classify": entry.adapter == FAMILY,
    }
    return [name for name, can in able.items() if can]


ROUTES = (
    _asking(
        "/embeddings",
        MultimodalResource,
        "Vectors of texts or images, in the form of infinity.",
        MultimodalRequest,
        MultimodalAnswer,
        {"input": ["first text", "second text"]},
    ),
    _asking(
        "/classify",
        InfinityClassifyResource,
        "Classes of texts, in the form that server.compatible chooses.",
        InfinityClassifyRequest,
        InfinityClassifyAnswer,
        {"input": ["a text"]},
        shared=True,
    ),
    _asking(
        "/rerank",
        InfinityRerankResource,
        "Texts in the order in which they answer a query, in the form that server.compatible chooses.",
        InfinityRerankRequest,
        InfinityRerankAnswer,
        {"query": "a question", "documents": ["one", "two"]},
        shared=True,
    ),
    Route(
        "get",
        "/models",
        InfinityModelsResource,
        "Models and what each can do, in the form of infinity.",
        "infinity",
        answer=InfinityModels,
        errors=dict.fromkeys((401, 403, 429), BareError),
        error_code_header=False,
    ),
)


class InfinityProtocol(ServerProtocol):
    """Routes and error form of infinity."""

    def __init__(self) -> None:
        super().__init__("infinity", ROUTES, BARE_FORM)
