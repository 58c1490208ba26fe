"""POST /v1/rerank: the form of Cohere and Jina over the same engine as score; always JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson

from frontend.engine.answer import Answer
from frontend.engine.options import Resolved, check_options, resolve
from frontend.engine.scope import RequestScope
from frontend.http.texts import check_count, check_shared, check_texts
from frontend.protocols.sie.convert import options_of, require_texts, usage_of
from frontend.protocols.sie.schemas import RerankRequest
from frontend.protocols.sie.score import INLINE_NBYTES, Pairs, ScoringResource, ranking
from ipc.catalog.entries import ModelEntry
from ipc.errors import InvalidInput
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import InputItem


def texts_of(request: RerankRequest) -> list[str]:
    """The text of each document. Raises `InvalidInput` that names the document."""
    texts = []
    for index, document in enumerate(request.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            found = "missing" if text is None else f"expected str, got {type(text).__name__}"
            raise InvalidInput(f"documents[{index}].text: {found}")
        texts.append(text)
    return texts


def _check_echo(documents: list[str | dict[str, Any]]) -> None:
    """Raise `InvalidInput` that names the document which JSON cannot carry back: its text is one that came as JSON."""
    for index, document in enumerate(documents):
        if isinstance(document, str):
            continue
        try:
            orjson.dumps({name: value for name, value in document.items() if name != "text"})
        except TypeError as error:
            raise InvalidInput(f"documents[{index}]: cannot be returned ({error})") from error


class RerankResource(ScoringResource[RerankRequest]):
    """Documents in the order in which they answer a query."""

    operation = "rerank"
    body = RerankRequest
    always_json = True
    entries = "results"
    names = FieldNames(item="documents[{}]", text="documents[{}]", query="query", options="")

    def examine(self, request: RerankRequest) -> None:
        """Query, documents and a policy that some model could take, and an echo that JSON can carry."""
        limits = self.services.settings.limits
        check_count(len(request.documents), "documents", limits)
        check_texts(texts_of(request), "documents[{}]", limits)
        check_shared(request.query, "query", len(request.documents), limits)
        check_options(options_of(request), self.names)
        if request.return_documents:
            _check_echo(request.documents)

    def check(self, request: RerankRequest, entry: ModelEntry) -> Pairs:
        """Query and documents."""
        require_texts(entry)
        return Pairs(InputItem(request.query), [InputItem(text) for text in texts_of(request)])

    def resolve(self, request: RerankRequest, entry: ModelEntry, items: int) -> Resolved:
        """The options of the model's profile, and what becomes of texts that are too long."""
        catalog, limits = self.services.catalog, self.services.settings.limits
        return resolve(entry, options_of(request), None, catalog, items, limits, self.names)

    def echoed_nbytes(self, request: RerankRequest) -> int:
        """Documents that are returned; one of more than a text may be of any size."""
        if not request.return_documents:
            return 0
        texts = texts_of(request)
        more = any(isinstance(document, dict) and len(document) > 1 for document in request.documents)
        return sum(map(len, texts)) + (INLINE_NBYTES if more else 0) + 1

    def answer(
        self,
        request: RerankRequest,
        scope: RequestScope,
        scores: np.ndarray,
        reply: Answer,
        beside: dict[str, Any],
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
