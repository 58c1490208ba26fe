"""The routes of TEI: vectors, classes, ranks and tokens of texts, the route of the model's task, facts about the model.

1. POST /embed, /embed_all and /embed_sparse: vectors. POST /similarity compares vectors.
2. POST /predict: the classes of texts, the likeliest first. A served classifier answers. Without a classifier the model
   that scores answers, as TEI has it for classifiers with one label: the score of a pair is its one class.
3. POST /rerank: texts in the order in which they answer a query.
4. POST /tokenize and /decode: texts to tokens with their places, and token ids to texts.
5. GET /info: facts about the model that this server stands for: the only served model, or the first of
   `server.default_models`.
6. POST /invocations, and POST / where the server answers like TEI: the first output of that model chooses the route.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import falcon
import msgspec
import numpy as np
import orjson
from falcon.asgi import Request, Response
from msgspec import UNSET

from frontend.engine.answer import Answer
from frontend.engine.planning import default_model, is_served
from frontend.http.fields import check_count, check_texts
from frontend.http.threads import off_loop_if
from frontend.protocols.foreign.scoring import (
    ENTRY_NBYTES,
    FAMILY,
    ClassesPlan,
    TextClassesResource,
    TextRankingResource,
    TokensPlan,
    TokensResource,
    activation_option,
    check_ids_together,
    check_texts_together,
    labelled,
)
from frontend.protocols.sie.encode import VectorsResource, Wishes, dense_json, normalized
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.outputs import INLINE_NBYTES
from frontend.protocols.sie.render import joined, json_list
from frontend.protocols.tei.contract import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    Info,
    PredictRequest,
    SimilarityRequest,
    TeiClass,
    TeiRank,
    TeiTerm,
    TeiToken,
    TextsRequest,
    TokenizeRequest,
)
from frontend.scope import RequestScope
from frontend.sending import Buffer, InferenceRoute
from frontend.services import Services
from ipc.catalog.entries import ENCODE_OUTPUTS, HubSource, ModelEntry
from ipc.errors import InvalidInput
from ipc.version import VERSION
from ipc.wire import tokens
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem, ModelStatus, ScoreCall
from ipc.wire.tokens import TextTokens

R = TypeVar("R", EmbedRequest, EmbedAllRequest)
_NAMES = FieldNames("inputs.sentences[{}]", "inputs.sentences[{}]", options="")
_ONLY_LABEL = "LABEL_0"
"""What transformers calls the only class of a model whose configuration names none."""
OUTPUTS = (*ENCODE_OUTPUTS, "score", "json")


class _Vectors(VectorsResource[R]):
    """One output of the inputs, as a bare array."""

    field = "inputs"
    output: ClassVar[str]

    def model_of(self, request: R) -> str:
        """The model that has the output."""
        return default_model(self.services.directory, self.services.settings, (self.output,))

    def output_of(self, request: R, entry: ModelEntry) -> str:
        """The one of the route."""
        return self.output

    def wishes_of(self, request: R) -> Wishes:
        """The prompt, and what becomes of long texts."""
        return request.wishes

    async def render(
        self, reply: Answer, plan: Plan[EncodeCall], request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body, which holds no view on the result."""
        with reply:
            return await self.listed(reply, request)

    @abstractmethod
    async def listed(self, reply: Answer, request: R) -> list[bytes]:
        """The array in pieces."""


class EmbedResource(_Vectors[EmbedRequest]):
    """Dense vectors."""

    operation = "embed"
    body = EmbedRequest
    output = "dense"

    def width_of(self, request: EmbedRequest) -> int | None:
        """The wanted width."""
        return request.dimensions

    async def listed(self, reply: Answer, request: EmbedRequest) -> list[bytes]:
        """The vectors, cut and then made as long as was asked."""
        return await dense_json(reply, request.dimensions, unit=request.normalize is not False)


class EmbedAllResource(_Vectors[EmbedAllRequest]):
    """One vector for each token."""

    operation = "embed_all"
    body = EmbedAllRequest
    output = "multivector"

    async def listed(self, reply: Answer, request: EmbedAllRequest) -> list[bytes]:
        """For each input an array of vectors."""
        values = reply.tensors()["multivector"]
        return await json_list((values[span] for span in reply.spans("multivector")), values.nbytes)


class EmbedSparseResource(_Vectors[EmbedAllRequest]):
    """Terms of the vocabulary and their weights."""

    operation = "embed_sparse"
    body = EmbedAllRequest
    output = "sparse"

    async def listed(self, reply: Answer, request: EmbedAllRequest) -> list[bytes]:
        """For each input an array of terms by index."""
        tensors = reply.tensors()
        indices, values = tensors["sparse.indices"], tensors["sparse.values"]
        terms = (_terms(indices[span], values[span]) for span in reply.spans("sparse.indices"))
        return await json_list(terms, 8 * values.nbytes)


def _terms(indices: np.ndarray, values: np.ndarray) -> list[TeiTerm]:
    return list(map(TeiTerm, indices.tolist(), values.tolist()))


class SimilarityResource(VectorsResource[SimilarityRequest]):
    """The cosine of one text and each of several others."""

    operation = "similarity"
    body = SimilarityRequest

    def model_of(self, request: SimilarityRequest) -> str:
        """The model that gives dense vectors."""
        return default_model(self.services.directory, self.services.settings, ("dense",))

    def examine(self, request: SimilarityRequest) -> None:
        """Texts that some model could take."""
        limits, given = self.services.settings.limits, request.inputs
        check_texts([given.source_sentence], "inputs.source_sentence", limits)
        check_count(len(given.sentences), "inputs.sentences", limits)
        check_texts(given.sentences, "inputs.sentences[{}]", limits)

    def check(self, request: SimilarityRequest, entry: ModelEntry) -> list[InputItem]:
        """The sentences, and behind them the text that they are compared with."""
        return [InputItem(text) for text in (*request.inputs.sentences, request.inputs.source_sentence)]

    def names_of(self, request: SimilarityRequest) -> FieldNames:
        """The sentences."""
        return _NAMES

    def wishes_of(self, request: SimilarityRequest) -> Wishes:
        """The prompt, and what becomes of long texts."""
        return request.chosen.wishes

    async def render(
        self,
        reply: Answer,
        plan: Plan[EncodeCall],
        request: SimilarityRequest,
        scope: RequestScope,
        form: Form,
    ) -> Sequence[Buffer]:
        """A cosine for each sentence."""
        with reply:
            rows = reply.tensors()["dense"]
            return [await off_loop_if(rows.nbytes > INLINE_NBYTES, _cosines, rows)]


def _cosines(rows: np.ndarray) -> bytes:
    """JSON of the cosines of the last row and all others."""
    units = normalized(rows)
    return orjson.dumps((units[:-1] @ units[-1]).astype(np.float64).tolist())


class ClassesResource(TextClassesResource[PredictRequest]):
    """Classes of a text as one array, classes of a batch as an array of arrays."""

    operation = "predict"
    body = PredictRequest
    field = "inputs"

    async def render(
        self, reply: Answer, plan: ClassesPlan, request: PredictRequest, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The body: an array for each input of a batch, or one array."""
        classes = await self.entries(reply, plan)
        listed = classes if request.is_batch else classes[0]
        return await json_list(iter(listed), ENTRY_NBYTES * sum(map(len, classes)))

    async def entries(self, reply: Answer, plan: ClassesPlan) -> list[list[TeiClass]]:
        """The classes of each input. The lease ends."""
        return await labelled(reply, TeiClass)


class PairsResource(ClassesResource):
    """The score of each pair as its one class."""

    capability = "score"

    def model_of(self, request: PredictRequest) -> str:
        """The model that scores."""
        return default_model(self.services.directory, self.services.settings, ("score",))

    def check(self, request: PredictRequest, entry: ModelEntry) -> list[InputItem]:
        """The pairs. Raises `InvalidInput` for a text alone."""
        items = super().check(request, entry)
        for at, item in enumerate(items):
            if item.first is None:
                place = f"inputs[{at}]" if request.is_batch else "inputs"
                raise InvalidInput(f"{place}: model '{entry.id}' scores pairs of texts, got one text")
        return items

    def plan(
        self, request: PredictRequest, entry: ModelEntry, inputs: list[InputItem], status: ModelStatus
    ) -> ClassesPlan:
        """A call for scores."""
        options = {**request.overflow, **activation_option(bool(request.raw_scores))}
        resolved = self.resolve(entry, options, None, len(inputs), self.names)
        call = ScoreCall(
            inputs,
            InputItem(""),
            resolved.instruction,
            resolved.options,
            resolved.overflow,
            resolved.lora,
            self.names,
        )
        return ClassesPlan(resolved.entry.id, call, status.labels or [_ONLY_LABEL])

    async def entries(self, reply: Answer, plan: ClassesPlan) -> list[list[TeiClass]]:
        """The one class of each pair. The lease ends."""
        with reply:
            scores = reply.tensors()["score"].tolist()
        return [[TeiClass(score, plan.labels[0])] for score in scores]


class PredictResource(InferenceRoute):
    """The form of the model that is served."""

    operation = "predict"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._classes, self._pairs = ClassesResource(services), PairsResource(services)

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """Classes, or scores where only they are served."""
        catalog = self.services.catalog
        scores = not is_served(catalog, ("json",), FAMILY) and is_served(catalog, ("score",))
        await (self._pairs if scores else self._classes).respond(req, resp, scope, target)


class RerankResource(TextRankingResource[TextsRequest], field="texts"):
    """Scores of texts as a bare array."""

    body = TextsRequest

    def entry(self, index: int, score: float, text: str | None) -> TeiRank:
        """Index, score, and text if the request asks for texts."""
        return TeiRank(index, score, UNSET if text is None else text)

    def around(self, best: list[TeiRank], scope: RequestScope, reply: Answer) -> list[TeiRank]:
        """The entries alone."""
        return best


class TokenizeResource(TokensResource[TokenizeRequest]):
    """The tokens of each text."""

    operation = "tokenize"
    body = TokenizeRequest
    names = FieldNames("inputs[{}]", "inputs[{}]")

    def examine(self, request: TokenizeRequest) -> None:
        """Texts within their limit."""
        check_texts_together(request.texts, "inputs", self.services.settings.limits)

    def check(self, request: TokenizeRequest, entry: ModelEntry) -> list[InputItem]:
        """The texts."""
        return [InputItem(text) for text in request.texts]

    def special(self, request: TokenizeRequest) -> bool:
        """Special tokens are added unless the request says otherwise."""
        return request.add_special_tokens is not False

    def write(self, request: TokenizeRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """For each text an array of tokens."""
        return joined(_arrays(request.texts, results))


def _arrays(texts: list[str], results: list[bytes]) -> Iterator[bytes]:
    for index, (text, data) in enumerate(zip(texts, results, strict=True)):
        yield b",[" if index else b"[["
        yield from _entries(text, tokens.unpack(data))
        yield b"]"
    yield b"]"


def _entries(text: str, found: TextTokens) -> Iterator[bytes]:
    columns = zip(found.ids, found.strings, found.starts, found.ends, found.special, strict=True)
    for place, (number, string, start, stop, special) in enumerate(columns):
        entry = TeiToken(number, string, special, None, None)
        if not special:
            entry.text, entry.start, entry.stop = text[start:stop], start, stop
        yield (b"," if place else b"") + msgspec.json.encode(entry)


class DecodeResource(TokensResource[DecodeRequest]):
    """The text of each list of token ids."""

    operation = "decode"
    body = DecodeRequest
    names = FieldNames("ids[{}]", "ids[{}]")

    def examine(self, request: DecodeRequest) -> None:
        """Token ids within their limit."""
        check_ids_together(request.lists, "ids", self.services.settings.limits)

    def check(self, request: DecodeRequest, entry: ModelEntry) -> list[InputItem]:
        """The lists of ids."""
        return [InputItem(None, ids) for ids in request.lists]

    def special(self, request: DecodeRequest) -> bool:
        """Special tokens are left out unless the request says otherwise."""
        return request.skip_special_tokens is False

    def write(self, request: DecodeRequest, plan: TokensPlan, results: list[bytes]) -> list[bytes]:
        """An array of texts."""
        return [msgspec.json.encode([text.decode() for text in results])]


class InfoResource:
    """The model that requests without a model mean."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON. Raises `ModelNotFound` where several models could be meant."""
        services = self._services
        entry = services.directory.find(default_model(services.directory, services.settings, OUTPUTS))
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(self._info(entry))

    def _info(self, entry: ModelEntry) -> Info:
        settings, status = self._services.settings, self._services.directory.status(entry.id)
        source = entry.source
        return Info(
            entry.id,
            source.revision if isinstance(source, HubSource) else None,
            entry.precision or settings.worker.precision,
            next(iter(entry.served_names), entry.id),
            _kind(entry, status.labels),
            settings.server.max_connections,
            status.max_sequence_length or entry.max_sequence_length or None,
            entry.max_batch_tokens or settings.batch.max_tokens,
            settings.batch.max_items,
            settings.limits.max_items,
            True,
            settings.worker.prepare_threads,
            VERSION,
        )


def _kind(entry: ModelEntry, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The type of the model. `labels` are empty until a classifier is loaded."""
    if entry.encode_outputs:
        return {"embedding": {"pooling": entry.loadtime.get("pooling")}}
    by_place = {str(place): label for place, label in enumerate(labels)}
    by_label = {label: place for place, label in enumerate(labels)}
    known = {"id2label": by_place, "label2id": by_label}
    return {"reranker" if "score" in entry.outputs else "classifier": known}


_ROUTES: dict[str, type[InferenceRoute]] = {
    "dense": EmbedResource,
    "sparse": EmbedSparseResource,
    "multivector": EmbedAllResource,
    "score": RerankResource,
    "json": ClassesResource,
}


class TaskResource(InferenceRoute):
    """A request in the form of the route that the model is for."""

    operation = "invocations"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._routes = {output: route(services) for output, route in _ROUTES.items()}

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """The answer of that route. Raises `ModelNotFound` where several models could be meant."""
        services = self.services
        entry = services.directory.find(default_model(services.directory, services.settings, OUTPUTS))
        route = next(route for output, route in self._routes.items() if output in entry.outputs)
        scope.operation = route.operation
        await route.respond(req, resp, scope, target)
