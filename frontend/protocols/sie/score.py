"""POST /v1/score/{model}: how well each item answers the query, best first.

POST /v1/rerank: the form of Cohere and Jina over the same engine as score; always JSON.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.answer import Answer
from frontend.engine.planning import check_options
from frontend.http.fields import check_count, check_shared, check_texts
from frontend.http.threads import off_loop_if
from frontend.protocols.sie.flow import EncodeUsage, Form, InferenceResource, Plan
from frontend.protocols.sie.inputs import MediaInput, Seen, images_of, seen, seen_input
from frontend.protocols.sie.items import check_items, images_in, input_of, inputs_of
from frontend.protocols.sie.plans import TokenUsage, check_used, usage_of
from frontend.protocols.sie.render import listed_parts
from frontend.protocols.sie.schemas import Body, RerankRequest, ScoreRequest
from frontend.scope import RequestScope
from frontend.sending import Buffer
from ipc.catalog.entries import ModelEntry
from ipc.decoding import learnt
from ipc.errors import InvalidInput
from ipc.wire.codec import long_integer_in
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem, ModelStatus, ScoreCall

INLINE_ENTRIES = 512
INLINE_NBYTES = 256 << 10
"""Answers with more entries than this, or that repeat more of the request, are written in a thread."""
_MEDIA = ("image", "image_url", "content")
_SHOWN = 64


class ScoreEntry(msgspec.Struct):
    """One item at its rank, 0 for the best."""

    item_id: Annotated[str, Meta(description="Id of the item.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")]
    rank: Annotated[int, Meta(description="Place among all items; 0 is the best.")]


class ScoreResponse(msgspec.Struct):
    """Answer of score, best first; `warnings` as for encode."""

    model: Annotated[str, Meta(description="Name of the model.")]
    query_id: Annotated[str | None, Meta(description="Id of the query.")]
    scores: Annotated[list[ScoreEntry], Meta(description="The items, the best first.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


@dataclass(frozen=True, slots=True)
class Pairs:
    """A query and the items to score against the query, as workers take them."""

    query: InputItem
    items: list[InputItem]


R = TypeVar("R", bound=Body)


class ScoringResource(InferenceResource[R, Plan[ScoreCall]], Generic[R]):
    """What score and rerank share: pairs in, one score per pair out, all or nothing."""

    capability = "score"
    names: ClassVar[FieldNames]

    def names_of(self, request: R) -> FieldNames:
        """How messages name query and items."""
        return self.names

    def plan(self, request: R, entry: ModelEntry, inputs: Pairs, status: ModelStatus) -> Plan[ScoreCall]:
        """The call with the options of the request."""
        options, instruction = self.options_of(request)
        names = self.names_of(request)
        resolved = self.resolve(entry, options, instruction, len(inputs.items), names)
        return Plan(resolved.entry.id, resolved.score(inputs.items, inputs.query, names))

    @abstractmethod
    def options_of(self, request: R) -> tuple[dict[str, Any] | None, str | None]:
        """The options and the instruction of a request."""

    async def render(
        self, reply: Answer, plan: Plan[ScoreCall], request: R, scope: RequestScope, form: Form
    ) -> Sequence[Buffer]:
        """The answer."""
        with reply:
            scores = np.array(reply.tensors()["score"])
        long = len(scores) > INLINE_ENTRIES or self.echoed_nbytes(request) > INLINE_NBYTES
        return await off_loop_if(long, self._write, request, scope, scores, reply, form)

    def _write(
        self, request: R, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> list[bytes]:
        return listed_parts(self.answer(request, scope, scores, reply, form), form.json)

    @abstractmethod
    def echoed_nbytes(self, request: R) -> int:
        """About how much of the request the answer repeats."""

    @abstractmethod
    def answer(
        self, request: R, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The body; `scores` is float32 [items] in request order, the lease of `reply` has ended."""


def ranking(scores: np.ndarray) -> list[tuple[int, float]]:
    """(input index, score), best first; ties keep the order of the input."""
    order = np.argsort(-scores, kind="stable")
    return list(zip(order.tolist(), scores[order].astype(np.float64).tolist(), strict=True))


class ScoreResource(ScoringResource[ScoreRequest]):
    """The SIE form, in JSON or msgpack."""

    operation = "score"
    body = ScoreRequest
    names = FieldNames(options="options.")

    def examine(self, request: ScoreRequest) -> None:
        """Query, items and options that some model could take."""
        limits = self.services.settings.limits
        check_items(request.items, limits)
        check_shared(request.query.text or "", "query.text", len(request.items), limits)
        check_options(request.options, self.names)

    def params_of(self, request: ScoreRequest) -> ScoreRequest:
        """Options stand at top level."""
        return request

    def check(self, request: ScoreRequest, entry: ModelEntry) -> Pairs:
        """Query and items as workers take them. Raises `InvalidInput` that names the field."""
        limits = self.services.settings.limits
        query = input_of(request.query, "query", entry, limits)
        return Pairs(query, inputs_of(request.items, entry, limits))

    def images(self, request: ScoreRequest, inputs: Pairs) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of query and items."""
        return images_in(request.items, request.query)

    def options_of(self, request: ScoreRequest) -> tuple[dict[str, Any] | None, str | None]:
        """Options and instruction stand at top level."""
        return request.options, request.instruction

    def echoed_nbytes(self, request: ScoreRequest) -> int:
        """Ids."""
        return sum(len(item.id or "") for item in (request.query, *request.items))

    def answer(
        self, request: ScoreRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> ScoreResponse:
        """The ranked scores, and the tokens of each pair by input index."""
        names = [f"item-{index}" if item.id is None else item.id for index, item in enumerate(request.items)]
        entries = [
            ScoreEntry(names[index], score, rank) for rank, (index, score) in enumerate(ranking(scores))
        ]
        return ScoreResponse(scope.model, request.query.id, entries, **form.beside)


class RerankResult(msgspec.Struct):
    """A document by its place in the request."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    relevance_score: Annotated[float, Meta(description="How well the document fits; higher is better.")]
    document: Annotated[dict[str, Any] | UnsetType, Meta(description="The document.")] = UNSET


class RerankResponse(msgspec.Struct):
    """Answer of rerank, best first."""

    id: Annotated[str, Meta(description="Id of the answer.")]
    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    results: Annotated[list[RerankResult], Meta(description="The documents, the best first.")]
    usage: Annotated[TokenUsage, Meta(description="Counts of tokens.")]
    meta: Annotated[dict[str, Any], Meta(description="Version of the contract, and what is billed.")]


def documents_of(request: RerankRequest) -> list[Seen]:
    """The text or image of each document. Raises `InvalidInput` that names the document."""
    return [
        Seen(one) if isinstance(one, str) else _seen(one, f"documents[{at}]", request.rank_fields)
        for at, one in enumerate(request.documents)
    ]


def _seen(document: dict[str, Any], where: str, rank_fields: list[str] | None) -> Seen:
    if rank_fields:
        texts = [_text(document, name, where) for name in rank_fields if document.get(name) is not None]
        if not texts:
            raise InvalidInput(f"{where}: has none of the rank_fields {', '.join(rank_fields)[:_SHOWN]}")
        return Seen("\n".join(texts))
    if document.get("text") is not None:
        return Seen(_text(document, "text", where))
    if any(document.get(name) is not None for name in _MEDIA):
        try:
            return seen(msgspec.convert(document, learnt(MediaInput)), where)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{where}: {error}") from None
    raise InvalidInput(f"{where}.text: missing")


def _text(document: dict[str, Any], name: str, where: str) -> str:
    text = document[name]
    if not isinstance(text, str):
        raise InvalidInput(f"{where}.{name[:_SHOWN]}: expected str, got {type(text).__name__}")
    return text


def _check_echo(documents: list[str | dict[str, Any]]) -> None:
    """Raise `InvalidInput` that names the document which JSON cannot carry back: its text is one that came as JSON."""
    for index, document in enumerate(documents):
        if isinstance(document, str):
            continue
        try:
            orjson.dumps({name: value for name, value in document.items() if name != "text"})
        except TypeError as error:
            why = long_integer_in(document) or error
            raise InvalidInput(f"documents[{index}]: cannot be returned ({why})") from error


class RerankResource(ScoringResource[RerankRequest]):
    """Documents in the order in which they answer a query."""

    operation = "rerank"
    body = RerankRequest
    always_json = True
    names = FieldNames(item="documents[{}]", text="documents[{}]", query="query", options="")

    def examine(self, request: RerankRequest) -> None:
        """Query, documents and a policy that some model could take, and an echo that JSON can carry."""
        limits = self.services.settings.limits
        check_count(len(request.documents), "documents", limits)
        check_texts([document.text or "" for document in documents_of(request)], "documents[{}]", limits)
        check_shared(seen(request.query, "query").text or "", "query", len(request.documents), limits)
        check_options(_options(request), self.names)
        if request.return_documents:
            _check_echo(request.documents)

    def check(self, request: RerankRequest, entry: ModelEntry) -> Pairs:
        """Query and documents."""
        documents = documents_of(request)
        return Pairs(
            seen_input(seen(request.query, "query"), "query", entry),
            [seen_input(one, f"documents[{at}]", entry) for at, one in enumerate(documents)],
        )

    def images(self, request: RerankRequest, inputs: Pairs) -> list[tuple[str, bytes]]:
        """JSON path and bytes of each image of query and documents."""
        return [*images_of([inputs.query], "query"), *images_of(inputs.items, "documents[{}]")]

    def plan(
        self, request: RerankRequest, entry: ModelEntry, inputs: Pairs, status: ModelStatus
    ) -> Plan[ScoreCall]:
        """The call; `status` says whether the model can cut documents."""
        check_used({"max_tokens_per_doc": request.max_tokens_per_doc}, entry, status)
        return super().plan(request, entry, inputs, status)

    def options_of(self, request: RerankRequest) -> tuple[dict[str, Any], str | None]:
        """What becomes of texts that are too long, and the instruction."""
        return _options(request), request.instruction

    def echoed_nbytes(self, request: RerankRequest) -> int:
        """Documents that are returned; an object may be of any size."""
        if not request.return_documents:
            return 0
        texts = [document for document in request.documents if isinstance(document, str)]
        more = len(texts) < len(request.documents)
        return sum(map(len, texts)) + (INLINE_NBYTES if more else 0) + 1

    def answer(
        self, request: RerankRequest, scope: RequestScope, scores: np.ndarray, reply: Answer, form: Form
    ) -> msgspec.Struct:
        """The best documents, at most `top_n`, and the tokens of all pairs."""
        used = sum(reply.tokens)
        return RerankResponse(
            f"rerank-{random.getrandbits(128):032x}",
            "list",
            request.model,
            ranked_documents(request, scores),
            usage_of(used, reply.truncated),
            {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": used}},
        )


def ranked_documents(request: RerankRequest, scores: np.ndarray) -> list[RerankResult]:
    """The documents of an answer, best first, each repeated if the request asks for documents."""
    results = []
    for index, score in ranking(scores)[: request.top_n]:
        result = RerankResult(index, score)
        if request.return_documents:
            document = request.documents[index]
            result.document = document if isinstance(document, dict) else {"text": document}
        results.append(result)
    return results


def _options(request: RerankRequest) -> dict[str, Any]:
    """The options of a model that this form offers."""
    return {"overflow_policy": request.overflow_policy, "max_tokens": request.max_tokens_per_doc}
