"""The table of routes over HTTP, and the management calls in the form of HTTP.

1. A handler takes the request and returns a message, None for an empty body. A `PenstockError` becomes 400 (or the
   status of a refused key) with an empty body.
2. `NV-Status` carries the outcome. Every call is counted by its kind, for the status of the server.
3. An unknown path in a folder of the contract gets 400 without body and `NV-Status`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import falcon
from falcon.asgi import Request, Response
from google.protobuf.message import Message

from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1 import management
from frontend.protocols.trtis_v1.http_forms import number_of, set_failure, set_message, set_status
from frontend.protocols.trtis_v1.infer import OCTETS, InferResource
from frontend.protocols.trtis_v1.management import MODES, server_status
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.routes import Parameter, Route
from frontend.services import Services
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

INLINE_MODELS = 32
"""Statuses of more models are rendered in a thread."""
Handler = Callable[..., Awaitable[Message | None]]
"""Takes the services, the request, the response, and the fields of the path."""


class Resource:
    """Answers GET by `show` or POST by `change`; `kind` names the calls in the status of the server."""

    def __init__(
        self,
        services: Services,
        statuses: Statuses,
        kind: str,
        *,
        show: Handler | None = None,
        change: Handler | None = None,
    ) -> None:
        self._services, self._statuses, self._kind = services, statuses, kind
        if show is not None:
            self.on_get = self._responder(show)
        if change is not None:
            self.on_post = self._responder(change)

    def _responder(self, handler: Handler) -> Callable[..., Awaitable[None]]:
        async def respond(req: Request, resp: Response, **path: str) -> None:
            began, context = time.perf_counter_ns(), req.context.penstock
            context.operation = self._kind
            resp.status, resp.data = falcon.HTTP_200, b""
            try:
                message = await handler(self._services, req, resp, **path)
                if message is not None:
                    await off_loop_if(_is_long(message), set_message, req, resp, message)
                set_status(resp, self._statuses.success())
            except Cancelled:
                raise
            except PenstockError as error:
                context.error, context.counted_status = error.code, error.status
                set_failure(resp, error, self._statuses.failure(error))
            self._services.extensions.counters.called(self._kind, time.perf_counter_ns() - began)

        return respond


def _is_long(message: Message) -> bool:
    return isinstance(message, pb.ServerStatus) and len(message.model_status) > INLINE_MODELS


def status_resource(services: Services, statuses: Statuses) -> Resource:
    """The status of the server and all its models, or of one model."""

    async def show(services: Services, req: Request, resp: Response, model: str = "") -> pb.ServerStatus:
        req.context.penstock.model = model
        return await server_status(services, statuses.server_id, model)

    return Resource(services, statuses, "status", show=show)


async def _health(services: Services, req: Request, resp: Response, mode: str = "") -> None:
    """The HTTP status is the answer; any mode but live and ready is answered with code UNKNOWN."""
    if not management.is_healthy(services, mode):
        resp.status = 400


async def _profile(services: Services, req: Request, resp: Response) -> None:
    await management.profile()


async def _load(services: Services, req: Request, resp: Response, model: str) -> None:
    await services.extensions.control.load(model, {}, req.context.penstock.deadline_ns)


async def _unload(services: Services, req: Request, resp: Response, model: str) -> None:
    await services.extensions.control.unload(model, {}, req.context.penstock.deadline_ns)


async def _repository_index(services: Services, req: Request, resp: Response) -> pb.ModelRepositoryIndex:
    return management.repository_index(services)


async def _regions(services: Services, req: Request, resp: Response) -> pb.SharedMemoryStatus:
    return pb.SharedMemoryStatus(shared_memory_region=management.regions(services))


async def _change_regions(services: Services, req: Request, resp: Response, rest: str) -> None:
    """Register or unregister, by the path.

    register/<name>/<key with its slash>/<offset>/<byte_size>
    cudaregister/<name>/<byte_size>/<device>       the body is the raw handle
    unregister/<name>, unregister/all, unregisterall
    """
    regions, (action, _, path) = services.extensions.regions, rest.partition("/")
    name, _, more = path.partition("/")
    if rest in ("unregister/all", "unregisterall"):
        await regions.unregister(None, None)
    elif action == "unregister" and name and not more:
        await regions.unregister(None, name)
    elif action == "register" and name and more.count("/") >= 2:
        key, offset, nbytes = more.rsplit("/", 2)
        await regions.register_system(name, key, _number(offset), _number(nbytes))
    elif action == "cudaregister" and name and more.count("/") == 1:
        size, device = map(_number, more.split("/"))
        async with services.bodies.receive(req, req.context.penstock.deadline_ns) as handle:
            await regions.register_cuda(name, bytes(handle), device, size)
    else:
        raise falcon.HTTPRouteNotFound


def _number(text: str) -> int:
    """A number of the path. Raises `HTTPRouteNotFound` for any other text."""
    number = number_of(text)
    if number is None:
        raise falcon.HTTPRouteNotFound
    return number


_FORMAT = Parameter(
    "format",
    "query",
    "`binary`: messages in the wire format instead of text; `json`, but for infer: as JSON.",
)
_REQUEST = Parameter("NV-InferRequest", "header", "InferRequestHeader as protobuf text, on one line.")
_ID = Parameter("X-Request-ID", "header", "Id to echo and log.")


@dataclass(frozen=True, slots=True)
class Context:
    """What the resources of this contract are made from."""

    services: Services
    statuses: Statuses


def _resource(kind: str, **handlers: Handler) -> Callable[[Context], Resource]:
    return lambda context: Resource(context.services, context.statuses, kind, **handlers)


def _infer(context: Context) -> InferResource:
    return InferResource(context.services, context.statuses)


def _status(context: Context) -> Resource:
    return status_resource(context.services, context.statuses)


_HEALTH, _REGIONS = _resource("health", show=_health), _resource("regions", show=_regions)


def _get(path: str, resource: Any, summary: str = "", *parameters: Parameter, **more: Any) -> Route:
    return Route(
        "get",
        path,
        resource,
        summary,
        "trtis v1",
        media=(),
        errors={400: None},
        error_media=(),
        parameters=(_ID, *parameters),
        error_code_header=False,
        **more,
    )


def _post(path: str, resource: Any, summary: str, *parameters: Parameter, **more: Any) -> Route:
    return Route(
        "post",
        path,
        resource,
        summary,
        "trtis v1",
        errors={400: None, 401: None, 403: None, 429: None},
        error_media=(),
        parameters=(_ID, *parameters),
        error_code_header=False,
        **{"media": (), **more},
    )


ROUTES = (
    _get("/api/health", _HEALTH, "Answers 400: the mode is missing.", health=True),
    _get(
        "/api/health/{mode}",
        _HEALTH,
        "Whether the server is live or ready; the HTTP status is the answer.",
        need="",
        health=True,
        choices={"mode": MODES},
    ),
    _get("/api/status", _status, "The server and all its models, a ServerStatus.", _FORMAT),
    _get("/api/status/{model:path}", _status, "The server and one model, a ServerStatus.", _FORMAT),
    _post(
        "/api/infer/{target:path}",
        _infer,
        "Inference: `MODEL` by the latest version that is ready, `MODEL/VERSION` by this version.",
        _REQUEST,
        _FORMAT,
        media=(OCTETS,),
        operation=InferResource.operation,
    ),
    _get("/api/profile", _resource("profile", show=_profile), "Answers 400: profiling is not offered."),
    _post(
        "/api/modelcontrol/load/{model:path}",
        _resource("control", change=_load),
        "Load a model and wait for it.",
        need="admin",
    ),
    _post(
        "/api/modelcontrol/unload/{model:path}",
        _resource("control", change=_unload),
        "Begin to unload a model.",
        need="admin",
    ),
    _get(
        "/api/repository/index", _resource("index", show=_repository_index), "Names of all models.", _FORMAT
    ),
    _get("/api/sharedmemorycontrol/status", _REGIONS, "All shared memory regions.", _FORMAT),
    _post(
        "/api/sharedmemorycontrol/{rest:path}",
        _resource("regions", change=_change_regions),
        "Register or unregister a shared memory region.",
        need="admin",
    ),
)
"""All routes of this contract. docs/trtis.md describes their bodies: raw tensors and protobuf messages, most without a
media type, which JSON Schema cannot describe."""
