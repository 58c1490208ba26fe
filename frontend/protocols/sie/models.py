"""The models over HTTP: which are served, in which state (GET /v1/models), and POST /v1/admin/{load,unload}/{model}."""

from __future__ import annotations

from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.http.disconnect import until_disconnect
from frontend.protocols.sie.schemas import AdminRequest, read_aside
from frontend.services import Services
from ipc.catalog.entries import DEFAULT_SIMILARITY, ENCODE_OUTPUTS, ModelEntry, Profile
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.errors import DeadlineExceeded
from ipc.wire.messages import ModelStatus

INPUT_ORDER = ("text", "image", "audio", "video", "document")
OUTPUT_ORDER = (*ENCODE_OUTPUTS, "score", "json")


def model_info(entry: ModelEntry, status: ModelStatus) -> dict[str, Any]:
    """ModelInfo of the contract."""
    dims = {name: spec.dims or status.dims.get(name) for name, spec in entry.outputs.items()}
    failed = status.state == "failed"
    return {
        "name": entry.id,
        "inputs": [name for name in INPUT_ORDER if name in entry.inputs],
        "outputs": [name for name in OUTPUT_ORDER if name in entry.outputs],
        "dims": {name: width for name, width in dims.items() if width},
        "loaded": status.state == "loaded",
        "state": status.state,
        "last_error": _last_error(status) if failed else None,
        "max_sequence_length": entry.max_sequence_length or status.max_sequence_length or None,
        "profiles": _profiles(entry),
    }


def _last_error(status: ModelStatus) -> dict[str, Any]:
    return {
        "code": status.error_class,
        "message": status.error_message,
        "attempts": status.attempts,
        "permanent": status.permanent,
    }


def _profiles(entry: ModelEntry) -> dict[str, Any]:
    profiles: dict[str, Any] = {}
    for name in dict.fromkeys(("default", *entry.profiles)):
        profile = entry.profiles.get(name, Profile())
        outputs = list(profile.output_types or entry.encode_outputs)
        similarity = {output: _similarity(entry, profile, output) for output in outputs}
        profiles[name] = {
            "is_default": name == "default",
            "output_types": outputs,
            "output_similarity": similarity,
        }
    return profiles


def _similarity(entry: ModelEntry, profile: Profile, output: str) -> str:
    """How two outputs are compared; dense vectors that are made of token vectors (MUVERA) by their dot product."""
    stated = entry.outputs[output].similarity if output in entry.outputs else "dot"
    return profile.similarity.get(output) or stated or DEFAULT_SIMILARITY[output]


def _openai_fields(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "penstock"}


class ModelsResource:
    """All models."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The list, in the SIE form and in the OpenAI form; models of named tensors have an index of their own."""
        directory, created = self._services.directory, int(self._services.started_at)
        entries = [each for each in self._services.catalog.values() if not isinstance(each, RepositoryEntry)]
        infos = [model_info(entry, directory.status(entry.id)) for entry in entries]
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(
            {"object": "list", "data": [_openai_fields(i["name"], created) for i in infos], "models": infos}
        )


class ModelResource:
    """One model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response, model: str) -> None:
        """The bare ModelInfo with the OpenAI fields."""
        entry = self._services.directory.find(model)
        info = model_info(entry, self._services.directory.status(entry.id))
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps({**info, **_openai_fields(entry.id, int(self._services.started_at))})


class AdminResource:
    """Both routes; `load` says which one."""

    def __init__(self, services: Services, *, load: bool) -> None:
        self._services, self._load = services, load

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """200 with the final state, 202 with the present one when nobody waits for the end or it takes too long."""
        services, context = self._services, req.context.penstock
        async with services.bodies.hold(req, context.deadline_ns) as body:
            given = (body or b"{}", "application/json", AdminRequest, services.settings.limits)
            wait = (await read_aside(*given)).wait
        entry = services.directory.find(model)
        state = await until_disconnect(self._run(entry.id, wait is not False, context.deadline_ns), req.scope)
        final = state == ("loaded" if self._load else "available")
        resp.status = falcon.HTTP_200 if final else falcon.HTTP_202
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps({"name": entry.id, "state": state})

    async def _run(self, model: str, wait: bool, deadline_ns: int) -> str:
        directory = self._services.directory
        try:
            return await (directory.load if self._load else directory.unload)(model, wait, deadline_ns)
        except DeadlineExceeded:
            return directory.status(model).state
