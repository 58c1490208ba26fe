"""POST /v1/models/unload, /v1/models/reload and /v1/models/status: `{"model_id"}` gives `{"model_id", "status"}`.

A failure has the same body with a status code of its own: 404 for a model that does not exist, 400 otherwise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation import bodies
from frontend.generation.models import find_generator, status_of
from frontend.http.disconnect import until_disconnect
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.errors import DeadlineExceeded, ModelNotFound, PenstockError

Act = Callable[[Services, str, int], Awaitable[str]]


class ModelRequest(msgspec.Struct):
    """Body of the three routes."""

    model_id: Annotated[str, Meta(description="Name of the model.")]


class ControlAnswer(msgspec.Struct, omit_defaults=True):
    """State of a model after what was asked, or why that failed."""

    model_id: Annotated[str, Meta(description="Name of the model.")]
    status: Annotated[str, Meta(description="The state.")]
    error: Annotated[str | None, Meta(description="What went wrong.")] = None


async def unload(services: Services, model: str, deadline_ns: int) -> str:
    """Unload the model from every worker."""
    await services.directory.unload(model, True, deadline_ns)
    return "unloaded"


async def reload(services: Services, model: str, deadline_ns: int) -> str:
    """Load the model, also after a failure. A load that takes longer than the request goes on."""
    try:
        state = await services.directory.load(model, True, deadline_ns)
    except DeadlineExceeded:
        state = services.directory.status(model).state
    return status_of(state)


async def status(services: Services, model: str, deadline_ns: int) -> str:
    """Say in which state the model is."""
    return status_of(services.directory.status(model).state)


class ControlResource:
    """One of the three routes, which does `act`."""

    def __init__(self, services: Services, act: Act) -> None:
        self._services, self._act = services, act

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answer with the state of the model."""
        request = await bodies.receive(self._services, req, _parsed)
        scope: RequestScope = req.context.penstock
        scope.names(request.model_id)
        code, answer = await until_disconnect(self._run(request.model_id, scope), req.scope)
        resp.status = code
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(answer, default=msgspec.to_builtins)

    async def _run(self, name: str, scope: RequestScope) -> tuple[Any, ControlAnswer]:
        services = self._services
        try:
            entry = find_generator(name, services.catalog, services.settings)
            state = await self._act(services, entry.id, scope.deadline_ns)
            return falcon.HTTP_200, ControlAnswer(entry.id, state)
        except ModelNotFound as error:
            return falcon.HTTP_404, ControlAnswer(name, "not_found", error.message)
        except PenstockError as error:
            return falcon.HTTP_400, ControlAnswer(name, "internal_error", error.message)


def _parsed(body: bytes) -> ModelRequest:
    return bodies.decode(body, ModelRequest, 1)
