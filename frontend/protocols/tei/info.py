"""GET /info: facts about the model that this server stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.engine.default_models import default_model
from frontend.services import Services
from ipc.catalog.entries import ENCODE_OUTPUTS, HubSource, ModelEntry
from ipc.version import VERSION

OUTPUTS = (*ENCODE_OUTPUTS, "score", "json")


class Info(msgspec.Struct):
    """A model and the limits of its server."""

    model_id: Annotated[str, Meta(description="Name of the model.")]
    model_sha: Annotated[str | None, Meta(description="Revision on the hub, where the catalog names one.")]
    model_dtype: Annotated[str, Meta(description="Precision of the weights, `auto` if the device decides.")]
    served_model_name: Annotated[str, Meta(description="A further name of the model, or its name.")]
    model_type: Annotated[
        dict[str, dict[str, Any]],
        Meta(description="`embedding`, `classifier` or `reranker`, with its facts."),
    ]
    max_concurrent_requests: Annotated[int, Meta(description="Open connections of one frontend.")]
    max_input_length: Annotated[
        int | None, Meta(description="Tokens of an input, once the model was loaded.")
    ]
    max_batch_tokens: Annotated[int, Meta(description="Tokens of a batch; 0: the device decides.")]
    max_batch_requests: Annotated[int | None, Meta(description="Items of a batch.")]
    max_client_batch_size: Annotated[int, Meta(description="Inputs of a request.")]
    auto_truncate: Annotated[
        bool, Meta(description="Always true: long inputs are cut unless a request says no.")
    ]
    tokenization_workers: Annotated[int, Meta(description="Threads of a worker that tokenize.")]
    version: Annotated[str, Meta(description="Version of Penstock.")]
    sha: Annotated[str | None, Meta(description="Always null.")] = None
    docker_label: Annotated[str | None, Meta(description="Always null.")] = None


class InfoResource:
    """The model that requests without a model mean."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON. Raises `ModelNotFound` where several models could be meant."""
        services = self._services
        entry = services.directory.find(default_model(services.catalog, services.settings, OUTPUTS))
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
            entry.max_sequence_length or status.max_sequence_length or None,
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
