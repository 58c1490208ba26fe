"""POST /v1/rerank: the form of Cohere and Jina over the same engine as score; always JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import orjson

from frontend.context import RequestContext
from frontend.options import Resolved, resolve
from frontend.protocols.sie.foreign import TOP_LEVEL, usage_of
from frontend.protocols.sie.schemas import RerankRequest
from frontend.protocols.sie.score import Pairs, ScoringResource, ranking
from frontend.texts import check_count, check_shared, check_texts
from ipc.catalog import ModelEntry
from ipc.client import Reply
from ipc.errors import InvalidInput
from ipc.messages import InputItem
from ipc.settings import Limits


def texts_of(request: RerankRequest, limits: Limits) -> list[str]:
    """The text of each document. Raises `InvalidInput` that names the document."""
    texts = []
    for index, document in enumerate(request.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            found = "missing" if text is None else f"expected str, got {type(text).__name__}"
            raise InvalidInput(f"documents[{index}].text: {found}")
        texts.append(text)
    check_texts(texts, "documents[{}]", limits)
    return texts


def _check_echo(documents: list[str | dict[str, Any]]) -> None:
    """Raise `InvalidInput` that names the document which JSON cannot carry back."""
    for index, document in enumerate(documents):
        try:
            orjson.dumps(document)
        except TypeError as error:
            raise InvalidInput(f"documents[{index}]: cannot be returned ({error})") from error


class RerankResource(ScoringResource[RerankRequest]):
    """Documents in the order in which they answer a query."""

    operation = "rerank"
    body = RerankRequest
    always_json = True

    def examine(self, request: RerankRequest) -> None:
        """There are documents, not too many, and they can be echoed where that is asked for."""
        check_count(len(request.documents), "documents", self.services.settings.limits)
        if request.return_documents:
            _check_echo(request.documents)

    def check(self, request: RerankRequest, entry: ModelEntry) -> Pairs:
        """Query and documents."""
        limits = self.services.settings.limits
        texts = texts_of(request, limits)
        check_shared(request.query, "query", len(texts), limits)
        if "text" not in entry.inputs:
            raise InvalidInput(f"model: '{entry.id}' takes no text, only {', '.join(entry.inputs)}")
        return Pairs(InputItem(request.query), [InputItem(text) for text in texts])

    def resolve(self, request: RerankRequest, entry: ModelEntry, items: int) -> Resolved:
        """The options of the model's profile, and what becomes of texts that are too long."""
        chosen, limits = {"overflow_policy": request.overflow_policy}, self.services.settings.limits
        return resolve(entry, chosen, None, self.services.catalog, items, limits, TOP_LEVEL)

    def answer(
        self, request: RerankRequest, context: RequestContext, scores: np.ndarray, reply: Reply
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
