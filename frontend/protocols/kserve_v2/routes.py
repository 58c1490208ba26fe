"""The routes over REST, and the answers of the management calls as JSON.

1. A fixed path has a resource of its own. Below `/v2/models` and `/v2/repository` the end of the path decides, since
   names of models may hold slashes.
2. A responder asks `Restrictions`, calls its handler, and sends the result of the handler.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend.access.restricted import Api
from frontend.http.bodies import until_disconnect
from frontend.protocols.kserve_v2 import management, reading, schemas
from frontend.protocols.kserve_v2.generate import GenerateResource
from frontend.protocols.kserve_v2.infer import InferResource
from frontend.protocols.kserve_v2.reading import Target
from frontend.services import Services
from ipc.catalog.model_config import Control, ModelConfig, SequenceBatching, TensorConfig, VersionPolicy
from ipc.errors import InvalidInput, Unsupported
from ipc.memory.datatypes import DATATYPES
from ipc.store.regions import Kind

MOST_CONFIG_NBYTES = 4 << 20
"""Largest body of a load that brings no files: a configuration as text within JSON."""
_ALL_STATISTICS = "stats"
_INDEX = re.compile(r"(?:[^/]+/)?index/?")
_CONTROL = re.compile(
    r"(?:(?P<repository>[^/]+)/)??models/(?P<model>.+)/(?P<action>load|unload)/?", re.DOTALL
)
_REGION = re.compile(r"(?:region/(?P<name>.*)/)?(?P<action>status|register|unregister)/?", re.DOTALL)

Handler = Callable[[Services, Request, Any], Awaitable[Any]]
"""Takes a `Target`, the rest of a path, or None; returns a JSON value, or None for an empty body."""


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
                schemas.send(resp, answer)

        return respond


def mount(app: falcon.asgi.App[Any, Any], services: Services) -> None:
    """Add all routes of this protocol."""
    server = Resource(services, "metadata", _server_metadata)
    for path in ("/v2", "/v2/"):
        app.add_route(path, server)
    app.add_route("/v2/health/live", Resource(services, "health", _live))
    app.add_route("/v2/health/ready", Resource(services, "health", _server_ready))
    app.add_route("/v2/models/{tail:path}", ModelsResource(services))
    app.add_route(
        "/v2/repository/{tail:path}", RepositoryResource(services, "model-repository", change=_control)
    )
    app.add_route("/v2/systemsharedmemory/{tail:path}", regions_resource(services, "system"))
    app.add_route("/v2/cudasharedmemory/{tail:path}", regions_resource(services, "cuda"))
    app.add_route(
        "/v2/logging", Resource(services, "logging", _log_settings, _change_log_settings, head=False)
    )
    app.add_route("/v2/trace/setting", trace_resource(services))
    app.add_route("/v1/config", Resource(services, "model-repository", _model_server_states))
    app.add_route("/v1/config/reload", ReloadResource(services))


class ModelsResource:
    """The routes of one model, and the statistics of all."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._statistics = Resource(services, "statistics", _statistics)
        infer = InferResource(services, services.restrictions)
        self._actions: dict[str, Any] = {
            "": Resource(services, "metadata", _model_metadata),
            "ready": Resource(services, "health", _model_ready),
            "infer": infer,
            "config": Resource(services, "model-config", _model_config),
            "stats": self._statistics,
            "generate": GenerateResource(infer, stream=False),
            "generate_stream": GenerateResource(infer, stream=True),
            "trace/setting": trace_resource(services),
        }

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

    def _responder_at(self, tail: str, method: str) -> tuple[Any, reading.Target]:
        """What answers a method on a path, and the target that the path names. Raises Falcon's 404 and 405."""
        target = reading.target_at(tail)
        if target is None or (target.action == "trace/setting" and target.version is not None):
            raise falcon.HTTPNotFound
        resource = self._actions[target.action]
        responder = getattr(resource, method, None)
        if responder is None:
            if not target.action:
                # Raises if no model has this name.
                self._services.models.states(target.name)
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
        schemas.send(resp, management.model_server_states(self._services))
        resp.status = 201 if changed else 200


def regions_resource(services: Services, kind: Kind) -> Resource:
    """Everything below the folder of one kind of shared memory."""
    show, change = partial(_regions, kind), partial(_change_regions, kind)
    return Resource(services, "shared-memory", show, change, head=False)


def trace_resource(services: Services) -> Resource:
    """Trace settings: of the server, or of the model that the path names."""
    return Resource(services, "trace", _trace_settings, _change_trace_settings, head=False)


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
    return configuration(target.name, services.models.find(target.name, target.version).config)


async def _statistics(services: Services, req: Request, target: Target | None) -> management.ModelsStatistics:
    name, version = (target.name, target.version) if target is not None else ("", None)
    return await management.statistics(services, name, version)


async def _model_server_states(services: Services, req: Request, tail: None) -> dict[str, Any]:
    return management.model_server_states(services)


async def _control(services: Services, req: Request, tail: str) -> list[management.IndexEntry] | None:
    """The index, a load or an unload, by the end of the path."""
    if _INDEX.fullmatch(tail):
        wanted = await schemas.read(services, req, schemas.INDEX)
        return management.repository_index(services, wanted.ready)
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
    found = _REGION.fullmatch(tail)
    if found is None:
        raise falcon.HTTPNotFound
    if found["name"] == "":
        raise InvalidInput("the path has an empty name for the region: .../region/NAME/...")
    return found["name"] or "", found["action"]


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


def configuration(name: str, config: ModelConfig) -> dict[str, Any]:
    """The configuration of a model as JSON, under the name that the client used; other names as in `ModelConfig`.

    Fields that do not apply are left out.
    """
    made: dict[str, Any] = {
        "name": name,
        "platform": config.platform,
        "backend": config.backend,
        "version_policy": _version_policy(config.version_policy),
        "max_batch_size": config.max_batch_size,
        "input": [_input(tensor) for tensor in config.inputs],
        "output": [_output(tensor) for tensor in config.outputs],
    }
    if config.instance_groups:
        made["instance_group"] = [
            {"name": group.name, "kind": group.kind, "count": group.count, "gpus": list(group.gpus)}
            for group in config.instance_groups
        ]
    if config.default_model_filename:
        made["default_model_filename"] = config.default_model_filename
    if config.dynamic_batching is not None:
        made["dynamic_batching"] = {
            "preferred_batch_size": list(config.dynamic_batching.preferred_batch_sizes),
            "max_queue_delay_microseconds": config.dynamic_batching.max_queue_delay_us,
            "preserve_ordering": config.dynamic_batching.preserve_ordering,
        }
    if config.sequence_batching is not None:
        made["sequence_batching"] = _sequence_batching(config.sequence_batching)
    if config.decoupled:
        made["model_transaction_policy"] = {"decoupled": True}
    if config.metric_tags:
        made["metric_tags"] = dict(config.metric_tags)
    if config.parameters:
        made["parameters"] = {name: {"string_value": value} for name, value in config.parameters.items()}
    return made


def _version_policy(policy: VersionPolicy) -> dict[str, Any]:
    choices: dict[str, dict[str, Any]] = {
        "latest": {"num_versions": policy.latest},
        "all": {},
        "specific": {"versions": list(policy.specific)},
    }
    return {policy.kind: choices[policy.kind]}


def _tensor(tensor: TensorConfig) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": tensor.name,
        "data_type": DATATYPES[tensor.datatype].config,
        "dims": list(tensor.dims),
    }
    if tensor.reshape is not None:
        made["reshape"] = {"shape": list(tensor.reshape)}
    return made


def _input(tensor: TensorConfig) -> dict[str, Any]:
    return _tensor(tensor) | {"format": f"FORMAT_{tensor.format}", "optional": tensor.optional}


def _output(tensor: TensorConfig) -> dict[str, Any]:
    return _tensor(tensor) | {"label_filename": tensor.label_filename}


def _sequence_batching(batching: SequenceBatching) -> dict[str, Any]:
    return {
        "max_sequence_idle_microseconds": batching.max_idle_us,
        "control_input": [_control_input(control) for control in batching.controls],
    }


def _control_input(control: Control) -> dict[str, Any]:
    made: dict[str, Any] = {"kind": f"CONTROL_SEQUENCE_{control.kind}"}
    if control.kind == "CORRID":
        made["data_type"] = DATATYPES[control.datatype].config
    elif control.datatype == "INT32":
        made["int32_false_true"] = [int(value) for value in control.off_on]
    elif control.datatype == "BOOL":
        made["bool_false_true"] = [bool(value) for value in control.off_on]
    else:
        made["fp32_false_true"] = list(control.off_on)
    return {"name": control.name, "control": [made]}
