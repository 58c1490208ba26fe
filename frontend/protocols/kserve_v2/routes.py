"""The table of routes over REST, and the answers of the management calls as JSON.

1. A fixed path has a resource of its own. In a `Folder` the end of the path decides, since names of models may hold
   slashes.
2. A responder asks `Restrictions`, calls its handler, and sends the result of the handler.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import falcon
import msgspec
from falcon.asgi import Request, Response

from frontend.access.gate import Api
from frontend.http.bodies import until_disconnect
from frontend.protocols.kserve_v2 import management, schemas
from frontend.protocols.kserve_v2.errors import KserveError
from frontend.protocols.kserve_v2.generate import GenerateResource
from frontend.protocols.kserve_v2.infer import InferResource
from frontend.protocols.kserve_v2.reading import Target, Targets
from frontend.route_rows import EVENTS, JSON, Folder, Parameter, Route
from frontend.sending import answer_json
from frontend.services import Services
from frontend.tensors.config_messages import configuration
from ipc.errors import InvalidInput, Unsupported
from ipc.store.regions import Kind

MOST_CONFIG_NBYTES = 4 << 20
"""Largest body of a load that brings no files: a configuration as text within JSON."""
_ALL_STATISTICS = "stats"

Handler = Callable[[Services, Request, Any], Awaitable[Any]]
"""Takes a `Target`, the rest of a path, or None; returns a JSON value, or None for an empty body."""
EMPTY: tuple[str, ...] = ()
"""Media types of an answer without a body."""
CLIENT_FAULTS = (400, 401, 403, 404, 408, 413, 429)
SERVER_FAULTS = (500, 501, 503, 504)
_LENGTH = Parameter(
    "Inference-Header-Content-Length",
    "header",
    "Bytes of JSON in front of binary tensors.",
    {"type": "integer", "minimum": 0},
)
_EXAMPLE = {"inputs": [{"name": "INPUT", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


class Resource:
    """Answers GET by `show` and POST by `change`. HEAD is answered as GET is, unless `head` is false."""

    def __init__(
        self,
        services: Services,
        api: Api,
        show: Handler | None = None,
        change: Handler | None = None,
        *,
        head: bool = True,
    ) -> None:
        self._services, self._api = services, api
        if show is not None:
            self.on_get = self._responder(show)
            if head:
                self.on_head = self.on_get
        if change is not None:
            self.on_post = self._responder(change)

    def _responder(self, handler: Handler) -> Callable[..., Awaitable[None]]:
        async def respond(req: Request, resp: Response, tail: Any = None) -> None:
            self._services.restrictions.require_secret(self._api, req.get_header)
            answer = await handler(self._services, req, tail)
            if answer is None:
                schemas.send_empty(resp)
            else:
                answer_json(resp, answer)

        return respond


class ModelsResource:
    """The routes of one model by their action, and the statistics of all."""

    def __init__(self, services: Services, actions: dict[str, Any]) -> None:
        self._services, self._actions = services, actions
        self._statistics, self._targets = actions[_ALL_STATISTICS], Targets(actions)

    async def on_get(self, req: Request, resp: Response, tail: str) -> None:
        """A GET by its path."""
        if tail.rstrip("/") == _ALL_STATISTICS:
            await self._statistics.on_get(req, resp)
            return
        responder, target = self._responder_at(tail, "on_get")
        await responder(req, resp, target)

    async def on_head(self, req: Request, resp: Response, tail: str) -> None:
        """A HEAD by its path, where a GET has no effect."""
        responder, target = self._responder_at(tail, "on_head")
        await responder(req, resp, target)

    async def on_post(self, req: Request, resp: Response, tail: str) -> None:
        """A POST by its path."""
        if tail.rstrip("/") == _ALL_STATISTICS:
            raise falcon.HTTPMethodNotAllowed(["GET"])
        responder, target = self._responder_at(tail, "on_post")
        await responder(req, resp, target)

    def _responder_at(self, tail: str, method: str) -> tuple[Any, Target]:
        """What answers a method on a path, and the target that the path names. Raises Falcon's 404 and 405."""
        target = self._targets.at(tail)
        if target is None or (target.action == "trace/setting" and target.version is not None):
            raise falcon.HTTPNotFound
        resource = self._actions[target.action]
        responder = getattr(resource, method, None)
        if responder is None:
            if not target.action:
                # Raises if no model has this name.
                self._services.tensor_models.states(target.name)
            raise falcon.HTTPMethodNotAllowed(_methods(resource))
        return responder, target


def _methods(resource: Any) -> list[str]:
    return [name for name in ("GET", "HEAD", "POST") if hasattr(resource, f"on_{name.lower()}")]


class RepositoryResource(Resource):
    """Everything below /v2/repository; none of the paths has a GET."""

    async def on_get(self, req: Request, resp: Response, tail: str) -> None:
        """405 for a known path, otherwise 404."""
        if _INDEX.fullmatch(tail) or _CONTROL.fullmatch(tail):
            raise falcon.HTTPMethodNotAllowed(["POST"])
        raise falcon.HTTPNotFound


class ReloadResource(Resource):
    """POST /v1/config/reload of OpenVINO Model Server."""

    def __init__(self, services: Services) -> None:
        super().__init__(services, "model-repository")

    async def on_post(self, req: Request, resp: Response) -> None:
        """201 if the files have changed, otherwise 200; the body is the body of `/v1/config`."""
        self._services.restrictions.require_secret(self._api, req.get_header)
        changed = await management.reload_catalog(self._services, req.context.penstock.deadline_ns)
        answer_json(resp, management.model_server_states(self._services))
        resp.status = 201 if changed else 200


async def _live(services: Services, req: Request, tail: None) -> management.Live:
    return management.Live(True)


async def _server_ready(services: Services, req: Request, tail: None) -> management.Ready:
    """400 for a server that is not ready, as the contract has it, with the reason."""
    management.require_ready_server(services)
    return management.Ready(True)


async def _server_metadata(services: Services, req: Request, tail: None) -> management.ServerMetadata:
    return management.server_metadata(services)


async def _model_metadata(services: Services, req: Request, target: Target) -> management.ModelMetadata:
    return management.model_metadata(services, target.name, target.version)


async def _model_ready(services: Services, req: Request, target: Target) -> management.Ready:
    """400 for a model that is not ready, with the reason, and for an unknown model."""
    management.require_ready_model(services, target.name, target.version)
    return management.Ready(True)


async def _model_config(services: Services, req: Request, target: Target) -> dict[str, Any]:
    return configuration(target.name, services.tensor_models.find(target.name, target.version).config)


async def _statistics(services: Services, req: Request, target: Target | None) -> management.ModelsStatistics:
    name, version = (target.name, target.version) if target is not None else ("", None)
    return await management.statistics(services, name, version)


async def _model_server_states(services: Services, req: Request, tail: None) -> dict[str, Any]:
    return management.model_server_states(services)


async def _control(services: Services, req: Request, tail: str) -> list[management.IndexEntry] | None:
    """The index, a load or an unload, by the end of the path."""
    if _INDEX.fullmatch(tail):
        filters = await schemas.read(services, req, schemas.INDEX)
        return management.repository_index(services, filters.ready)
    path = _CONTROL.fullmatch(tail)
    if path is None:
        raise falcon.HTTPNotFound
    if path["repository"]:
        raise Unsupported("'repository_name' is not supported: a server has one repository")
    control, deadline_ns = services.extensions.control, req.context.penstock.deadline_ns
    if path["action"] == "unload":
        body = await schemas.read(services, req, schemas.CONTROL)
        await control.unload(path["model"], body.parameters, deadline_ns)
        return None
    most_nbytes = MOST_CONFIG_NBYTES
    if services.settings.repository.allow_files:
        most_nbytes = max(most_nbytes, services.settings.limits.max_body_bytes)
    body = await schemas.read(services, req, schemas.CONTROL, most_nbytes)
    await until_disconnect(control.load(path["model"], body.parameters, deadline_ns), req.scope)
    return None


async def _regions(
    kind: Kind, services: Services, req: Request, tail: str
) -> list[management.SystemRegion] | list[management.CudaRegion]:
    """Status of all regions of a kind, or of one."""
    name, action = _region_at(tail)
    if action != "status":
        raise falcon.HTTPMethodNotAllowed(["POST"])
    return management.regions(services, kind, name)


async def _change_regions(kind: Kind, services: Services, req: Request, tail: str) -> None:
    """Register one region; unregister one or all."""
    name, action = _region_at(tail)
    regions = services.extensions.regions
    if action == "status":
        raise falcon.HTTPMethodNotAllowed(["GET"])
    if action == "unregister":
        await regions.unregister(kind, name or None)
    elif not name:
        raise InvalidInput("the path has no name for the region: .../region/NAME/register")
    elif kind == "system":
        body = await schemas.read(services, req, schemas.REGISTER_SYSTEM)
        await regions.register_system(name, body.key, body.offset, body.byte_size)
    else:
        body = await schemas.read(services, req, schemas.REGISTER_CUDA)
        await regions.register_cuda(name, body.raw_handle.b64, body.device_id, body.byte_size)


def _region_at(tail: str) -> tuple[str, str]:
    """Name of the region, "" for none, and the action."""
    match = _REGION.fullmatch(tail)
    if match is None:
        raise falcon.HTTPNotFound
    if match["name"] == "":
        raise InvalidInput("the path has an empty name for the region: .../region/NAME/...")
    return match["name"] or "", match["action"]


async def _log_settings(services: Services, req: Request, tail: None) -> dict[str, Any]:
    return dict(services.extensions.log_settings.get())


async def _change_log_settings(services: Services, req: Request, tail: None) -> dict[str, Any]:
    """Change the settings that the body names; the answer is the complete new state."""
    changes = await schemas.read(services, req, schemas.LOGGING)
    return dict(await services.extensions.log_settings.update(changes, req.context.penstock.deadline_ns))


async def _trace_settings(services: Services, req: Request, target: Target | None) -> dict[str, Any]:
    model = management.traced_model(services, target.name) if target is not None else ""
    return dict(services.extensions.trace_settings.get(model))


async def _change_trace_settings(services: Services, req: Request, target: Target | None) -> dict[str, Any]:
    """Change the settings that the body names; null resets. The answer is the complete new state."""
    model = management.traced_model(services, target.name) if target is not None else ""
    changes = await schemas.read(services, req, schemas.TRACE)
    settings, deadline_ns = services.extensions.trace_settings, req.context.penstock.deadline_ns
    return dict(await settings.update(changes, deadline_ns, model))


@dataclass(frozen=True, slots=True)
class Context:
    """What the resources of this protocol are made from."""

    services: Services
    infer: InferResource


def _answering(
    api: Api, show: Handler | None = None, change: Handler | None = None, *, head: bool = True
) -> Callable[[Context], Resource]:
    return lambda context: Resource(context.services, api, show, change, head=head)


def _models(context: Context) -> ModelsResource:
    """The resource of all rows under `_MODELS`, with the resource of each action at the end of a path."""
    rows = (route for route in ROUTES if route.under is _MODELS and "{" in route.path)
    makers = {route.ending.lstrip("/"): route.resource for route in rows}
    return ModelsResource(context.services, {action: make(context) for action, make in makers.items()})


def _repository(context: Context) -> RepositoryResource:
    return RepositoryResource(context.services, "model-repository", change=_control)


def regions_of(kind: Kind) -> Callable[[Context], Resource]:
    """Everything below the folder of one kind of shared memory."""
    return _answering("shared-memory", partial(_regions, kind), partial(_change_regions, kind), head=False)


_MODELS = Folder("/v2/models/{tail:path}", _models)
_REPOSITORY = Folder("/v2/repository/{tail:path}", _repository)
_STATISTICS = _answering("statistics", _statistics)
_LOGGING = _answering("logging", _log_settings, _change_log_settings, head=False)
TRACE = _answering("trace", _trace_settings, _change_trace_settings, head=False)


def _route(
    method: Literal["get", "post"],
    path: str,
    resource: Any,
    summary: str,
    tag: str,
    answer: type[msgspec.Struct] | None = None,
    **more: Any,
) -> Route:
    return Route(
        method,
        path,
        resource,
        summary,
        f"kserve {tag}",
        answer=answer,
        errors=dict.fromkeys((*CLIENT_FAULTS, *SERVER_FAULTS), KserveError),
        error_code_header=False,
        request_media=(JSON,),
        **more,
    )


def _of_models(
    method: Literal["get", "post"],
    action: str,
    resource: Any,
    summary: str,
    answer: type[msgspec.Struct] | None = None,
    tag: str = "models",
    **more: Any,
) -> Iterator[Route]:
    """A call of a model, and of one of its versions."""
    for version in ("", "/versions/{version}"):
        path = f"/v2/models/{{model}}{version}{action}"
        yield _route(method, path, resource, summary, tag, answer, under=_MODELS, **more)


def _shared_memory(kind: Kind, body: type[msgspec.Struct], region: type[msgspec.Struct]) -> Iterator[Route]:
    folder = f"/v2/{kind}sharedmemory"
    one, resource = f"{folder}/region/{{region}}", regions_of(kind)
    under = Folder(f"{folder}/{{tail:path}}", resource)
    showing = partial(_route, resource=resource, tag="shared memory", under=under)
    changing = partial(showing, "post", media=EMPTY, need="admin")
    yield showing("get", f"{folder}/status", summary="All regions.", answer=region, many=True)
    yield showing("get", f"{one}/status", summary="One region.", answer=region, many=True)
    yield changing(f"{one}/register", summary="Register a region.", body=body)
    yield changing(f"{one}/unregister", summary="Forget a region.")
    yield changing(f"{folder}/unregister", summary="Forget all regions of the kind.")


def _loading(action: Literal["load", "unload"], summary: str) -> Route:
    return _route(
        "post",
        f"/v2/repository/models/{{model}}/{action}",
        _repository,
        summary,
        "repository",
        body=schemas.Control,
        body_required=False,
        media=EMPTY,
        retry_header=False,
        need="admin",
        under=_REPOSITORY,
    )


def _settings(path: str, resource: Any, what: str, under: Folder | None = None) -> Iterator[Route]:
    yield _route("get", path, resource, f"Show {what}.", "settings", need="admin", under=under)
    yield _route("post", path, resource, f"Change {what}.", "settings", need="admin", under=under)


_SERVER = _answering("metadata", _server_metadata)

ROUTES: tuple[Route, ...] = (
    _route("get", "/v2", _SERVER, "Name, version and extensions.", "server", management.ServerMetadata),
    Route("get", "/v2/", _SERVER),
    _route(
        "get",
        "/v2/health/live",
        _answering("health", _live),
        "Whether the process lives.",
        "server",
        management.Live,
        need="",
        health=True,
    ),
    _route(
        "get",
        "/v2/health/ready",
        _answering("health", _server_ready),
        "Whether requests are answered.",
        "server",
        management.Ready,
        need="",
        health=True,
    ),
    *_of_models(
        "get",
        "",
        _answering("metadata", _model_metadata),
        "A model and its tensors.",
        management.ModelMetadata,
    ),
    *_of_models(
        "get", "/ready", _answering("health", _model_ready), "Whether a model answers.", management.Ready
    ),
    *_of_models("get", "/config", _answering("model-config", _model_config), "The configuration of a model."),
    *_of_models("get", "/stats", _STATISTICS, "Statistics of a model.", management.ModelsStatistics),
    _route(
        "get",
        f"/v2/models/{_ALL_STATISTICS}",
        _STATISTICS,
        "Statistics of all models.",
        "models",
        management.ModelsStatistics,
        under=_MODELS,
    ),
    *_of_models(
        "post",
        "/infer",
        lambda context: context.infer,
        "Run a model over named tensors.",
        schemas.InferResponse,
        "inference",
        media=(JSON, "application/octet-stream"),
        body=schemas.Infer,
        parameters=(_LENGTH,),
        example=_EXAMPLE,
        operation=InferResource.operation,
    ),
    *_of_models(
        "post",
        "/generate",
        lambda context: GenerateResource(context.infer, stream=False),
        "Run a model over plain JSON.",
        tag="inference",
    ),
    *_of_models(
        "post",
        "/generate_stream",
        lambda context: GenerateResource(context.infer, stream=True),
        "The same, as Server-Sent Events.",
        tag="inference",
        media=(EVENTS,),
    ),
    _route(
        "post",
        "/v2/repository/index",
        _repository,
        "All models and their states.",
        "repository",
        management.IndexEntry,
        many=True,
        body=schemas.Index,
        body_required=False,
        under=_REPOSITORY,
    ),
    _loading("load", "Load a model."),
    _loading("unload", "Begin to unload a model."),
    *_shared_memory("system", schemas.RegisterSystem, management.SystemRegion),
    *_shared_memory("cuda", schemas.RegisterCuda, management.CudaRegion),
    *_settings("/v2/logging", _LOGGING, "what the server logs"),
    *_settings("/v2/trace/setting", TRACE, "what is traced"),
    *_settings("/v2/models/{model}/trace/setting", TRACE, "what is traced of a model", _MODELS),
    _route(
        "get",
        "/v1/config",
        _answering("model-repository", _model_server_states),
        "States of all models, as OpenVINO Model Server shows them.",
        "repository",
    ),
    _route(
        "post",
        "/v1/config/reload",
        lambda context: ReloadResource(context.services),
        "Read the model files again.",
        "repository",
        also={201: "Something was new."},
        need="admin",
    ),
)
"""All routes of this protocol. Names of models may hold slashes. docs/kserve.md describes binary tensors."""


def _actions(mounted: str, *, of_models: bool = False) -> str:
    """A pattern of the last words in the paths of a folder, for the paths with a model or for all others."""
    paths = (route.path for route in ROUTES if route.mounted == mounted)
    return "|".join(sorted({path.rpartition("/")[2] for path in paths if ("{model}" in path) == of_models}))


_INDEX = re.compile(rf"(?:[^/]+/)?(?:{_actions(_REPOSITORY.path)})/?")
_CONTROL = re.compile(
    rf"(?:(?P<repository>[^/]+)/)??models/(?P<model>.+)/(?P<action>{_actions(_REPOSITORY.path, of_models=True)})/?",
    re.DOTALL,
)
_REGION = re.compile(
    rf"(?:region/(?P<name>.*)/)?(?P<action>{_actions('/v2/systemsharedmemory/{tail:path}')})/?", re.DOTALL
)
