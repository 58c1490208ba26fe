"""GET /models: the models that vectors, scores and classes come from, and what each can do."""

from __future__ import annotations

from typing import Annotated, Literal

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.protocols.foreign.classes import FAMILY
from frontend.services import Services
from ipc.catalog.entries import ModelEntry

Capability = Literal["embed", "image_embed", "rerank", "classify"]


class InfinityStats(msgspec.Struct):
    """Figures of a model. The figures of its queue are among the metrics."""

    batch_size: Annotated[int, Meta(description="Most items of a batch.")]


class InfinityModel(msgspec.Struct, kw_only=True):
    """One model."""

    id: Annotated[str, Meta(description="Name of the model.")]
    stats: Annotated[InfinityStats, Meta(description="Figures of the model.")]
    object: Annotated[Literal["model"], Meta(description="Kind of what is told here.")] = "model"
    owned_by: Annotated[str, Meta(description="Always `penstock`.")] = "penstock"
    created: Annotated[int, Meta(description="When this process began, in seconds since 1970.")]
    backend: Annotated[Literal["torch"], Meta(description="What runs the model.")] = "torch"
    capabilities: Annotated[
        list[Capability], Meta(description="The kinds of requests that the model answers.")
    ]


class InfinityModels(msgspec.Struct, kw_only=True):
    """All models of these kinds."""

    data: Annotated[list[InfinityModel], Meta(description="The list.")]
    object: Annotated[Literal["list"], Meta(description="Kind of what is told here.")] = "list"


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
