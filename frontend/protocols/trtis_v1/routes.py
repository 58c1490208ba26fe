"""The routes over HTTP: inference with raw tensors in the bodies, and the management calls.

1. `target_of`, `set_status` and `set_message` read and write the forms of HTTP: targets in paths, `NV-Status`, and
   bodies as text, JSON or in the wire format.
2. `InferResource` answers POST /api/infer/<model>[/<version>]: the request stands in a header.
3. `Resource` answers the management calls by handlers.
4. `ROUTES` is the table. An unknown path in a folder of the contract gets 400 without body and `NV-Status`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import falcon
from falcon.asgi import Request, Response
from google.protobuf import json_format
from google.protobuf.message import Message

from frontend.http import tracebacks
from frontend.http.threads import off_loop_if
from frontend.protocols.trtis_v1 import management, requests
from frontend.protocols.trtis_v1.management import MODES, server_status
from frontend.protocols.trtis_v1.requests import (
    CACHED_CHARACTERS,
    as_of_1_4,
    many_lines,
    one_line,
    read_request_header,
)
from frontend.protocols.trtis_v1.statuses import Statuses, http_status_of, retry_after
from frontend.route_rows import Need, Parameter, Route
from frontend.scope import RequestScope
from frontend.sending import InferenceRoute, send_parts
from frontend.services import Services
from frontend.tensors import checking
from frontend.tensors.result import TensorResult
from frontend.tensors.uploading import receive
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

STATUS_HEADER = "NV-Status"
_MOST_DIGITS = 20
"""A digit more than the largest int64 has: a number that is cut there is a version, or a size, that nothing has."""
REQUEST_HEADER = "NV-InferRequest"
RESPONSE_HEADER = "NV-InferResponse"
OCTETS = "application/octet-stream"
INLINE_MODELS = 32
"""Statuses of more models are rendered in a thread."""
Handler = Callable[..., Awaitable[Message | None]]
"""Takes the services, the request, the response, and the fields of the path."""
_FORMAT = Parameter(
    "format",
    "query",
    "`binary`: messages in the wire format instead of text; `json`, but for infer: as JSON.",
)
_REQUEST = Parameter("NV-InferRequest", "header", "InferRequestHeader as protobuf text, on one line.")
_ID = Parameter("X-Request-ID", "header", "Id to echo and log.")


def wants_binary(req: Request) -> bool:
    """Whether messages in the body are in the wire format: `format=binary`; any other value means text."""
    return req.get_param("format") == "binary"


def set_status(resp: Response, status: pb.RequestStatus) -> None:
    """The status as a header of one line of ASCII."""
    resp.set_header(STATUS_HEADER, one_line(status))


def set_failure(resp: Response, error: PenstockError, status: pb.RequestStatus) -> None:
    """An empty answer with the status of an error in its headers."""
    tracebacks.forget(error)
    resp.status = http_status_of(error)
    resp.data = b""
    resp.stream = None
    resp.set_headers(retry_after(error))
    set_status(resp, status)


def wants_json(req: Request) -> bool:
    """Whether messages in the body are JSON: `format=json`, or a format of no name and `Accept: application/json`."""
    if req.get_param("format") == "json":
        return True
    return not wants_binary(req) and "application/json" in (req.get_header("Accept") or "")


def set_message(req: Request, resp: Response, message: Message) -> None:
    """A message as the body: text, which has no media type in this contract, or the form of the request.

    JSON and the wire format have the whole message; a ServerStatus in text has the fields of release 1.4.
    """
    if wants_json(req):
        resp.content_type, resp.data = "application/json", json_format.MessageToJson(message).encode()
    elif wants_binary(req):
        resp.content_type, resp.data = "application/octet-stream", message.SerializeToString()
    else:
        known = as_of_1_4(message) if isinstance(message, pb.ServerStatus) else message
        resp.data = many_lines(known)


def number_of(text: str) -> int | None:
    """The number that digits write, None for other text."""
    if not (text.isascii() and text.isdigit()):
        return None
    return int(text.lstrip("0")[:_MOST_DIGITS] or "0")


def target_of(services: Services, path: str) -> tuple[str, int]:
    """Model and version (-1: none) of `<model>[/<version>]`; only models of the catalog have names with slashes.

    Raises `HTTPRouteNotFound` for any other path.
    """
    name, slash, last = path.rpartition("/")
    if path and (not slash or services.tensor_models.known(path) is not None):
        return path, -1
    version = number_of(last)
    if version is not None and name and ("/" not in name or services.tensor_models.known(name) is not None):
        return name, version
    raise falcon.HTTPRouteNotFound


class InferResource(InferenceRoute):
    """One inference over HTTP."""

    operation = "infer"

    def __init__(self, services: Services, statuses: Statuses) -> None:
        super().__init__(services)
        self._statuses = statuses

    async def on_post(self, req: Request, resp: Response, target: Any = "", model: str = "") -> None:
        """One request. Raises `HTTPRouteNotFound` for a path that names no model; nothing is counted then."""
        await super().on_post(req, resp, target_of(self.services, target))

    async def respond(
        self, req: Request, resp: Response, scope: RequestScope, target: tuple[str, int]
    ) -> None:
        """200 with raw outputs and the response header behind them, or 400 with the reason in NV-Status."""
        inference = self.services.tensor_inference
        scope.model, number = target
        name, version, scheduled, header = (
            scope.model,
            requests.version_of(number),
            False,
            pb.InferRequestHeader(),
        )
        record = inference.begin(scope, name, version)
        try:
            text = req.get_header(REQUEST_HEADER)
            header = await off_loop_if(len(text or "") > CACHED_CHARACTERS, read_request_header, text)
            model = await inference.find(scope, name, version)
            plan, small = model.plans.get(text or ""), self.services.bodies.at_hand(req)
            if plan is not None and small is not None and len(small) == plan.nbytes:
                scheduled = True
                with self.services.bodies.holding(len(small)):
                    result = await inference.run_plan(scope, model, plan, memoryview(small))
                    with result.answer:
                        await self._render(req, resp, result, header.id)
                return
            record.rows = requests.rows_of(model, header)
            request = requests.request_of(model, header)
            checking.check_shapes(model, request)
            sizes = requests.sizes_of(model, header, request)
            async with receive(inference.inputs, req, 0, scope.deadline_ns) as body:
                requests.cut(model, request, sizes, body.data)
                request.block = body.block
                scheduled = True
                result = await inference.run(scope, model, request)
                if text is not None:
                    inference.keep_plan(model, text, len(body.data), request, None)
                with result.answer:
                    await self._render(req, resp, result, header.id)
        except Cancelled:
            raise
        except PenstockError as error:
            self._fail(resp, error, scope, header.id, name, scheduled)

    async def _render(self, req: Request, resp: Response, result: TensorResult, request_id: int) -> None:
        long, binary = result.has_many_classes, wants_binary(req)
        short, tail = await off_loop_if(long, _rendered, result, request_id, binary)
        raw = [output.data for output in result.outputs if output.data is not None]
        resp.status, resp.content_type = falcon.HTTP_200, OCTETS
        resp.set_header(RESPONSE_HEADER, short)
        resp.set_header(STATUS_HEADER, self._statuses.success_line())
        send_parts(resp, [*raw, tail], result.answer, self.services)

    def _fail(
        self,
        resp: Response,
        error: PenstockError,
        scope: RequestScope,
        request_id: int,
        model: str,
        scheduled: bool,
    ) -> None:
        """An empty body; the header names the request so that it can be found again."""
        scope.failed(error, error.status)
        set_failure(resp, error, self._statuses.failure(error, model, numbered=scheduled))
        resp.content_type = OCTETS
        resp.set_header(RESPONSE_HEADER, one_line(pb.InferResponseHeader(id=request_id)))


def _rendered(result: TensorResult, request_id: int, binary: bool) -> tuple[str, bytes]:
    """The response header as a field of one line, and in full as the end of the body."""
    forms = requests.forms_of(result, request_id)
    if forms is not None:
        return forms.line, forms.wire if binary else forms.lines
    full = requests.header_of(result, request_id)
    short = requests.without_classes(full)
    return one_line(short), full.SerializeToString() if binary else many_lines(full)


class Resource:
    """Answers GET by `show` or POST by `change`; `kind` names the calls in the status of the server.

    A handler takes the request and returns a message, None for an empty body. A `PenstockError` becomes 400 (or the
    status of a refused key) with an empty body. `NV-Status` carries the outcome. Every call is counted by its kind.
    """

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


def _route(
    method: Literal["get", "post"],
    path: str,
    resource: Any,
    summary: str,
    *parameters: Parameter,
    need: Need = "infer",
    media: tuple[str, ...] = (),
    **more: Any,
) -> Route:
    """The row of a route, whose errors have no body; a route that needs a key may refuse the caller."""
    return Route(
        method,
        path,
        resource,
        summary,
        "trtis v1",
        media=media,
        errors=dict.fromkeys((400, 401, 403, 429) if need else (400,)),
        error_media=(),
        parameters=(_ID, *parameters),
        error_code_header=False,
        need=need,
        **more,
    )


_get, _post = partial(_route, "get"), partial(_route, "post")


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
        "Inference: MODEL by the latest version that is ready, MODEL/VERSION by this version.",
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
