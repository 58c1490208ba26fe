"""Builds the Falcon application of one frontend. Opens nothing: sockets, files and threads come with the lifespan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import falcon
import falcon.asgi

from frontend.arbiter import configuration
from frontend.assembly import Backend, local
from frontend.http.bodies import CALLBACK_KEY, noting
from frontend.http.listeners import SEND_KEY, Listeners, refuse
from frontend.http.paths import normalize
from frontend.lifespan import Lifespan
from frontend.middleware import DeadlineMiddleware, ErrorRenderer, RequestMiddleware, access_middleware
from frontend.protocols.registry import Protocols, as_bytes, protocols
from frontend.services import Services
from ipc.errors import PenstockError
from ipc.settings import Settings


class Application:
    """The ASGI callable. Under a server without a callback for disconnects, `receive` notes the disconnect.

    Falcon waits for the first piece of a body before any other work. Requests that will be refused must not wait: a
    client that asks first (`Expect: 100-continue`) gets the refusal and never sends the body. These are requests with
    a declared length over the limit, without a valid key, with a refused path, or on a port that does not serve the
    path.
    """

    def __init__(
        self,
        app: falcon.asgi.App[Any, Any],
        known: Protocols,
        services: Services,
        listeners: Listeners,
    ) -> None:
        self._app, self._listeners = app, listeners
        self._services = services
        self._access, self._settings = services.access, services.settings
        self._known = known

    def render_refusal(self, error: PenstockError, path: str) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers) of an error that the server finds itself (`frontend.server.state`)."""
        return as_bytes(self._known.of(path).render_error(error, path))

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One ASGI scope."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        readable = normalize(scope)
        if scope["path"] == "/" and scope.get("method") == "POST":
            # NOTE: before keys are asked for, since a page lies at the root, which needs none.
            scope["path"] = self._known.root
        if not self._listeners.serves(scope, self._known.is_probe):
            await refuse(scope, send, self._settings, partial(self._unknown, scope["path"]))
            return
        path = scope["path"]
        need = self._known.need_of(path, self._access.open_metrics)
        admitted = self._access.admit(scope, need) and readable
        if scope["type"] == "websocket":
            scope[SEND_KEY] = send
        else:
            if CALLBACK_KEY not in scope:
                receive = noting(scope, receive)
            declared = _declared_nbytes(scope)
            if not admitted or (declared or 0) > self._settings.limits.max_body_bytes:
                receive = _unread
            counts = self._services.finisher.http
            if counts is not None:
                await counts.serve(self._app, declared, self._known.at(path).counted, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _unknown(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        return as_bytes(self._known.of(path).render_http(falcon.HTTPNotFound(), path))


def _declared_nbytes(scope: dict[str, Any]) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


async def _unread() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": True}


def create(config: Settings | None = None, behind: Callable[[Services], Backend] = local) -> Application:
    """The application for `config` (that of the arbiter when None), over the engine that `behind` makes."""
    chosen = configuration.current() if config is None else configuration.read(config)
    services = Services(chosen.settings, chosen.catalog, chosen.access, chosen.restrictions)
    known = protocols(chosen.settings.server.compatible)
    middleware: list[Any] = [
        Lifespan(services, behind),
        RequestMiddleware(services, known),
        *access_middleware(services, known),
        DeadlineMiddleware(services),
    ]
    app: falcon.asgi.App[Any, Any] = falcon.asgi.App(middleware=middleware)
    # Every answer names its media type, except text of TRTIS v1, which has none.
    app.resp_options.default_media_type = None  # type: ignore[assignment]
    errors = ErrorRenderer(known)
    app.add_error_handler(Exception, errors.unexpected)
    app.add_error_handler(falcon.HTTPError, errors.http)
    app.add_error_handler(PenstockError, errors.penstock)
    # The status stream reads messages of clients itself, so Falcon need not read to notice a disconnect.
    app.ws_options.max_receive_queue = 0
    known.mount(app, services)
    return Application(app, known, services, Listeners(chosen.settings.server))
