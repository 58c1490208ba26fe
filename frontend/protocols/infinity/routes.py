"""The routes of infinity: POST /embeddings, /classify and /rerank, and GET /models with what each model can do."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import falcon
import msgspec
import numpy as np
from falcon.asgi import Request, Response

from frontend.engine.answer import Answer
from frontend.engine.planning import model_named
from frontend.http.fields import check_count, check_texts
from frontend.protocols.foreign.scoring import (
    ENTRY_NBYTES,
    FAMILY,
    ClassesPlan,
    TextClassesResource,
    TextRankingResource,
    labelled,
)
from frontend.protocols.infinity.contract import (
    Capability,
    InfinityClass,
    InfinityClassifyAnswer,
    InfinityClassifyRequest,
    InfinityModel,
    InfinityModels,
    InfinityRank,
    InfinityRerankAnswer,
    InfinityRerankRequest,
    InfinityStats,
    InfinityUsage,
    InfinityVector,
    MultimodalAnswer,
    MultimodalRequest,
)
from frontend.protocols.sie.encode import VectorsResource, unit_rows
from frontend.protocols.sie.flow import Form, Plan
from frontend.protocols.sie.inputs import Seen, names_at, require, seen_input
from frontend.protocols.sie.render import HOLE, base64_of, filled, json_list
from frontend.scope import RequestScope
from frontend.sending import Buffer
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.wire.field_names import FieldNames
from ipc.wire.messages import EncodeCall, InputItem

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
        return model_named(request, self.services.catalog, self.services.settings, ("dense",))

    def examine(self, request: MultimodalRequest) -> None:
        """Texts or images that some model could take."""
        limits = self.services.settings.limits
        check_count(len(request.inputs), "input", limits)
        if request.kind == "text":
            check_texts(request.inputs, "input[{}]", limits)

    def check(self, request: MultimodalRequest, entry: ModelEntry) -> list[InputItem]:
        """The inputs as workers take them. Raises `InvalidInput` for a kind that the model does not take."""
        require(request.kind, "modality", entry)
        found = []
        for at, given in enumerate(request.inputs):
            place = f"input[{at}]"
            found.append(
                seen_input(Seen(given) if request.kind == "text" else Seen(None, given, place), place, entry)
            )
        return found

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
        found = [
            InfinityModel(id=entry.id, stats=stats, created=int(services.started_at), capabilities=able)
            for entry in services.catalog.entries
            if (able := _capabilities(entry))
        ]
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(InfinityModels(data=found))


def _capabilities(entry: ModelEntry) -> list[Capability]:
    able: dict[Capability, bool] = {
        "embed": "dense" in entry.outputs and "text" in entry.inputs,
        "image_embed": "dense" in entry.outputs and "image" in entry.inputs,
        "rerank": "score" in entry.outputs,
        "classify": entry.adapter == FAMILY,
    }
    return [name for name, can in able.items() if can]
