"""The routes over HTTP, and the management calls in the form of HTTP.

1. A resource sets the body. Errors of the tree become 400 (or the status of a refused key) with an empty body.
2. `NV-Status` says how the request went. Every call is counted by its kind, for the status of the server.
3. A path that does not fit is unknown: 400 without body and `NV-Status`.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import falcon
import falcon.asgi
from falcon.asgi import Request, Response

from frontend.http.rendering import off_loop_if
from frontend.protocols.trtis_v1 import management
from frontend.protocols.trtis_v1.http_messages import (
    set_failure,
    set_message,
    set_status,
    wants_binary,
    wants_json,
)
from frontend.protocols.trtis_v1.infer import InferResource
from frontend.protocols.trtis_v1.requests import number_of
from frontend.protocols.trtis_v1.server_status import server_status
from frontend.protocols.trtis_v1.statuses import Statuses
from frontend.protocols.trtis_v1.text import as_of_1_4
from frontend.services import Services
from ipc.errors import Cancelled, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

INLINE_MODELS = 32
"""Statuses of more models are rendered in a thread."""


def mount(app: falcon.asgi.App[Any, Any], services: Services, statuses: Statuses) -> None:
    """Add all routes of this contract."""
    health, status = HealthResource(services, statuses), StatusResource(services, statuses)
    app.add_route("/api/health", health)
    app.add_route("/api/health/{mode}", health)
    app.add_route("/api/status", status)
    app.add_route("/api/status/{model:path}", status)
    app.add_route("/api/infer/{target:path}", InferResource(services, statuses))
    app.add_route("/api/profile", ProfileResource(services, statuses))
    for action in ("load", "unload"):
        control = ControlResource(services, statuses, action)
        app.add_route(f"/api/modelcontrol/{action}/{{model:path}}", control)
    app.add_route("/api/repository/index", RepositoryResource(services, statuses))
    app.add_route("/api/sharedmemorycontrol/status", RegionStatusResource(services, statuses))
    app.add_route("/api/sharedmemorycontrol/{rest:path}", RegionResource(services, statuses))


class Resource:
    """Base of the routes about the server and its models."""

    kind: ClassVar[str]

    def __init__(self, services: Services, statuses: Statuses) -> None:
        self.services, self.statuses = services, statuses

    async def answer(self, req: Request, resp: Response, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which sets the body, and say how it went."""
        began, context = time.perf_counter_ns(), req.context.penstock
        context.operation = self.kind
        resp.status, resp.data = falcon.HTTP_200, b""
        try:
            await work
            set_status(resp, self.statuses.success())
        except Cancelled:
            raise
        except PenstockError as error:
            context.error, context.counted_status = error.code, error.status
            set_failure(resp, error, self.statuses.failure(error))
        self.services.extensions.recorder.called(self.kind, time.perf_counter_ns() - began)


class HealthResource(Resource):
    """GET /api/health/{live,ready}: the HTTP status is the answer. Any other mode is answered with code UNKNOWN."""

    kind = "health"

    async def on_get(self, req: Request, resp: Response, mode: str = "") -> None:
        """200 or 400, without a body."""
        await self.answer(req, resp, self._ask(resp, mode))

    async def _ask(self, resp: Response, mode: str) -> None:
        if not management.is_healthy(self.services, mode):
            resp.status = 400


class StatusResource(Resource):
    """GET /api/status and /api/status/<model>: text by default, wire format or JSON where asked for."""

    kind = "status"

    async def on_get(self, req: Request, resp: Response, model: str = "") -> None:
        """A ServerStatus; the answer to a failure is empty."""
        req.context.penstock.model = model
        await self.answer(req, resp, self._show(req, resp, model))

    async def _show(self, req: Request, resp: Response, model: str) -> None:
        status = await server_status(self.services, self.statuses.server_id, model)
        await off_loop_if(len(status.model_status) > INLINE_MODELS, set_server_status, req, resp, status)


def set_server_status(req: Request, resp: Response, status: pb.ServerStatus) -> None:
    """The whole status in JSON and in the wire format; in text what release 1.4 knows."""
    whole = wants_json(req) or wants_binary(req)
    set_message(req, resp, status if whole else as_of_1_4(status))


class ProfileResource(Resource):
    """GET /api/profile: not offered, and says so."""

    kind = "profile"

    async def on_get(self, req: Request, resp: Response) -> None:
        """400 with code UNSUPPORTED."""
        await self.answer(req, resp, management.profile())


class ControlResource(Resource):
    """POST /api/modelcontrol/{load,unload}/<model>."""

    kind = "control"

    def __init__(self, services: Services, statuses: Statuses, action: str) -> None:
        super().__init__(services, statuses)
        self._action = action

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """200 or 400, without a body."""
        deadline_ns = req.context.penstock.deadline_ns
        await self.answer(req, resp, management.control(self.services, self._action, model, deadline_ns))


class RepositoryResource(Resource):
    """GET /api/repository/index."""

    kind = "index"

    async def on_get(self, req: Request, resp: Response) -> None:
        """A ModelRepositoryIndex, as text or in the wire format."""
        await self.answer(req, resp, self._show(req, resp))

    async def _show(self, req: Request, resp: Response) -> None:
        set_message(req, resp, management.repository_index(self.services))


class RegionStatusResource(Resource):
    """GET /api/sharedmemorycontrol/status."""

    kind = "regions"

    async def on_get(self, req: Request, resp: Response) -> None:
        """A SharedMemoryStatus, as text or in the wire format."""
        await self.answer(req, resp, self._show(req, resp))

    async def _show(self, req: Request, resp: Response) -> None:
        status = pb.SharedMemoryStatus(shared_memory_region=management.regions(self.services))
        set_message(req, resp, status)


class RegionResource(Resource):
    """The POST routes below /api/sharedmemorycontrol.

    register/<name>/<key with its slash>/<offset>/<byte_size>
    cudaregister/<name>/<byte_size>/<device>       the body is the raw handle
    unregister/<name>, unregister/all, unregisterall
    """

    kind = "regions"

    async def on_post(self, req: Request, resp: Response, rest: str) -> None:
        """200 or 400, without a body."""
        await self.answer(req, resp, self._change(req, rest))

    async def _change(self, req: Request, rest: str) -> None:
        regions, (action, _, path) = self.services.extensions.regions, rest.partition("/")
        name, _, more = path.partition("/")
        if rest in ("unregister/all", "unregisterall"):
            await regions.unregister_all(None)
        elif action == "unregister" and name and not more:
            await regions.unregister(None, name)
        elif action == "register" and name and more.count("/") >= 2:
            key, offset, nbytes = more.rsplit("/", 2)
            await regions.register_system(name, key, _number(offset), _number(nbytes))
        elif action == "cudaregister" and name and more.count("/") == 1:
            size, device = map(_number, more.split("/"))
            async with self.services.bodies.hold(req, req.context.penstock.deadline_ns) as handle:
                await regions.register_cuda(name, bytes(handle), device, size)
        else:
            raise falcon.HTTPRouteNotFound


def _number(text: str) -> int:
    """A number of the path. Raises `HTTPRouteNotFound` for any other text."""
    number = number_of(text)
    if number is None:
        raise falcon.HTTPRouteNotFound
    return number
