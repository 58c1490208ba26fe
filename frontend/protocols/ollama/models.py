"""The models in the form of ollama: GET /api/tags and /api/ps, POST /api/show, GET /api/version; and what is refused.

1. A model is listed if the other routes can use it: it generates text, or gives dense vectors. A name without a profile
   is told with the tag `:latest`, which some clients expect.
2. A worker tells of a loaded model that generates text how many parameters it has, its architecture, and what its
   weights are. Other facts that frontends do not know are empty, as the size of files.
3. Routes that change which models there are answer with what to do on the server's machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation.errors import InvalidField
from frontend.generation.requests import OUTPUT as TEXT
from frontend.generation.requests import decode, receive
from frontend.http.fields import instant
from frontend.protocols.ollama.requests import LATEST, known_name
from frontend.sending import answer_json
from frontend.services import Services
from ipc.catalog.entries import ModelEntry, gguf_of
from ipc.catalog.repository import VersionEntry
from ipc.errors import Unsupported
from ipc.version import VERSION
from ipc.wire.messages import ModelStatus

_DENSE = "dense"
_PRECISIONS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Types of weights in ollama's words."""
_FOREVER_S = 100 * 365 * 86400
"""How far behind the start of the frontend the end of a model lies that stays in memory."""


class OllamaDetails(msgspec.Struct):
    """Facts of a model's files; empty where a frontend does not know."""

    parent_model: Annotated[str, Meta(description="The model of a profile.")]
    format: Annotated[str, Meta(description="`gguf`, or empty.")]
    family: Annotated[str, Meta(description="Architecture of a loaded text model, else Penstock's family.")]
    families: Annotated[list[str], Meta(description="The family.")]
    parameter_size: Annotated[str, Meta(description="Of a loaded text model, such as `134.52M`.")]
    quantization_level: Annotated[
        str, Meta(description="Of a GGUF file, such as `Q4_1`; else the precision.")
    ]


class OllamaModel(msgspec.Struct, kw_only=True):
    """One model of the list."""

    name: Annotated[str, Meta(description="The name.")]
    model: Annotated[str, Meta(description="The name.")]
    modified_at: Annotated[str, Meta(description="Time since which the model is known, as RFC 3339.")]
    size: Annotated[int, Meta(description="Bytes of memory of a loaded model, else 0.")]
    digest: Annotated[str, Meta(description="Stands for the model and the revision of its files.")]
    details: Annotated[OllamaDetails, Meta(description="Facts of its files.")]


class OllamaRunning(OllamaModel, kw_only=True):
    """One loaded model."""

    expires_at: Annotated[str, Meta(description="A time far ahead: models stay.")]
    size_vram: Annotated[int, Meta(description="Bytes of memory of a GPU.")]
    context_length: Annotated[int, Meta(description="Longest input in tokens.")]


class OllamaTags(msgspec.Struct):
    """All models."""

    models: Annotated[list[OllamaModel], Meta(description="The models.")]


class OllamaProcesses(msgspec.Struct):
    """The loaded models."""

    models: Annotated[list[OllamaRunning], Meta(description="The models.")]


class OllamaVersion(msgspec.Struct):
    """The version of the server."""

    version: Annotated[str, Meta(description="Version of Penstock.")]


class OllamaShowRequest(msgspec.Struct):
    """Body of POST /api/show."""

    model: Annotated[str | None, Meta(description="Name of the model.")] = None
    name: Annotated[str | None, Meta(description="Older name of `model`.")] = None


class OllamaShown(msgspec.Struct):
    """One model."""

    details: Annotated[OllamaDetails, Meta(description="Facts of its files.")]
    model_info: Annotated[
        dict[str, Any],
        Meta(description="Facts of the model, named as in GGUF files."),
    ]
    capabilities: Annotated[
        list[str],
        Meta(description="`completion`, `embedding`; of a loaded model `tools` and `vision`."),
    ]
    modified_at: Annotated[str, Meta(description="Time since which the model is known, as RFC 3339.")]
    template: Annotated[
        str,
        Meta(
            description="The chat template of a loaded model, in Jinja where ollama's are in Go's language."
        ),
    ]


def _listed(services: Services) -> Iterator[tuple[str, ModelEntry]]:
    """(name, entry) of each model that the routes of ollama can use, further names included."""
    catalog = services.catalog
    for name in [*catalog.aliases, *catalog]:
        entry = catalog.find(name)
        if not isinstance(entry, VersionEntry) and not entry.outputs.keys().isdisjoint((TEXT, _DENSE)):
            yield name, entry


def _facts(name: str, entry: ModelEntry, status: ModelStatus, services: Services) -> dict[str, Any]:
    """The fields of `OllamaModel`."""
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": instant(services.started_at),
        "size": status.memory_bytes,
        "digest": hashlib.sha256(f"{entry.id}\n{status.revision}".encode()).hexdigest(),
        "details": _details(entry, status),
    }


def _details(entry: ModelEntry, status: ModelStatus) -> OllamaDetails:
    base, _, profile = entry.id.partition(":")
    family = status.architecture or entry.adapter
    precision = status.precision or entry.precision or ""
    return OllamaDetails(
        parent_model=base if profile else "",
        format="gguf" if gguf_of(entry) else "",
        family=family,
        families=[family],
        parameter_size=_short(status.parameters),
        quantization_level=status.stored or _PRECISIONS.get(precision, precision),
    )


def _short(count: int) -> str:
    """A number of parameters as ollama writes it: 1.5B, 134.52M, 260K; empty for none."""
    for unit, name, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= unit:
            return f"{count / unit:.{digits if count % unit else 0}f}{name}"
    return str(count or "")


class TagsResource:
    """All models."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The list, loaded or not."""
        services = self._services
        models = [
            OllamaModel(**_facts(name, entry, services.directory.status(entry.id), services))
            for name, entry in _listed(services)
        ]
        answer_json(resp, OllamaTags(models))


class ProcessesResource:
    """The loaded models."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The list, each model once."""
        services = self._services
        until = instant(int(services.started_at) + _FOREVER_S)
        models = []
        for name, entry in _listed(services):
            status = services.directory.status(entry.id)
            if name == entry.id and status.state == "loaded":
                on_gpu = status.device.startswith("cuda")
                models.append(
                    OllamaRunning(
                        **_facts(name, entry, status, services),
                        expires_at=until,
                        size_vram=status.memory_bytes if on_gpu else 0,
                        context_length=status.max_sequence_length,
                    )
                )
        answer_json(resp, OllamaProcesses(models))


class ShowResource:
    """One model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """Facts of the model that the body names. Raises `ModelNotFound`, and `InvalidField` without a name."""
        services = self._services
        request = await receive(services, req, _parsed, always_json=True)
        name = known_name(request.model or request.name, services.catalog)
        if not name:
            raise InvalidField("model", "is required")
        req.context.penstock.names(name)
        entry = services.directory.find(name)
        status = services.directory.status(entry.id)
        family = status.architecture or entry.adapter
        info: dict[str, Any] = {"general.architecture": family}
        if status.parameters:
            info["general.parameter_count"] = status.parameters
        length = status.max_sequence_length or entry.max_sequence_length
        width = status.dims.get(_DENSE) or (entry.outputs[_DENSE].dims if _DENSE in entry.outputs else None)
        for key, value in (("context_length", length), ("embedding_length", width)):
            if value:
                info[f"{family}.{key}"] = value
        has = {
            "completion": TEXT in entry.outputs,
            "tools": status.tools not in ("", "none"),
            "embedding": _DENSE in entry.outputs,
            "vision": status.sees,
        }
        capabilities = [name for name, offered in has.items() if offered]
        known_since = instant(services.started_at)
        answer_json(
            resp, OllamaShown(_details(entry, status), info, capabilities, known_since, status.template)
        )


def _parsed(body: bytes) -> OllamaShowRequest:
    return decode(body, OllamaShowRequest, 1)


class VersionResource:
    """The version."""

    def __init__(self, services: Services) -> None:
        """`services` are not needed."""

    async def on_get(self, req: Request, resp: Response) -> None:
        """Version of Penstock, not of an ollama."""
        answer_json(resp, OllamaVersion(VERSION))


_ENTRY = (
    "is done on the server's machine: `penstock models add` writes the catalog entry of a model of your own"
)
INSTEAD: Mapping[str, str] = {
    "/api/pull": "pulling is done on the server's machine: `penstock models pull NAME`, then `penstock serve NAME`",
    "/api/push": "this server publishes no models: use the tools of the hub, such as `hf upload`",
    "/api/create": f"making a model {_ENTRY}",
    "/api/copy": "a further name is given at the start: `penstock serve MODEL=NAME`, or served_name in the catalog",
    "/api/delete": "files of models are removed on the server's machine: `penstock rm NAME`; to free memory, use "
    "POST /v1/admin/unload/{model}",
    "/api/blobs/{digest}": f"uploading files {_ENTRY}",
}
"""Routes of ollama that are refused, and what to do instead."""


class InsteadResource:
    """One route that is refused; `reason` says what to do instead."""

    def __init__(self, reason: str, services: Services) -> None:
        """`services` are not needed."""
        self._reason = reason

    async def on_post(self, req: Request, resp: Response, **path: str) -> None:
        """Raises `Unsupported`."""
        raise Unsupported(self._reason)

    on_delete = on_head = on_post
