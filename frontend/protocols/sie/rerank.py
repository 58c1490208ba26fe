"""POST /v1/rerank: the form of Cohere and Jina over the same engine as score; always JSON."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.options import check_options
from frontend.http.fields import check_count, check_shared, check_texts
from frontend.protocols.sie.convert import check_used, usage_of
from frontend.protocols.sie.inputs import images_of
from frontend.protocols.sie.media import MediaInput, Seen, input_of, seen
from frontend.protocols.sie.route import Form, Plan
from frontend.protocols.sie.schemas import RerankRequest
from frontend.protocols.sie.score import INLINE_NBYTES, Pairs, ScoringResource, ranking
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.codec import long_integer_in
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import ModelStatus, ScoreCall

_MEDIA = ("image", "image_url", "content")
_SHOWN = 64
NAMES = FieldNames(item="documents[{}]", text="documents[{}]", query="query", options="")


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
            return seen(msgspec.convert(document, MediaInput), where)
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
    entries = "results"
    names = NAMES

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
            input_of(seen(request.query, "query"), "query", entry),
            [input_of(one, f"documents[{at}]", entry) for at, one in enumerate(documents)],
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
    ) -> dict[str, Any]:
        """`results` best first, at most `top_n`, and the tokens of all pairs."""
        results: list[dict[str, Any]] = []
        for index, score in ranking(scores)[: request.top_n]:
            entry: dict[str, Any] = {"index": index, "relevance_score": score}
            if request.return_documents:
                document = request.documents[index]
                entry["document"] = document if isinstance(document, dict) else {"text": document}
            results.append(entry)
        used = sum(reply.tokens)
        return {
            "id": f"rerank-{random.getrandbits(128):032x}",
            "object": "list",
            "model": request.model,
            "results": results,
            "usage": usage_of(used, reply.truncated),
            "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": used}},
        }


def _options(request: RerankRequest) -> dict[str, Any]:
    """The options of a model that this form offers."""
    return {"overflow_policy": request.overflow_policy, "max_tokens": request.max_tokens_per_doc}
