"""Builds the Falcon application of one frontend. Opens nothing: sockets, files and threads come with the lifespan."""

from __future__ import annotations

from typing import Any

import falcon
import falcon.asgi

from frontend import configuration, health
from frontend.disconnect import CALLBACK_KEY, noting
from frontend.lifespan import Lifespan
from frontend.middleware import ErrorRenderer, RequestMiddleware
from frontend.protocols.registry import protocols
from frontend.services import Services
from ipc import settings
from ipc.errors import PenstockError


class Application:
    """The ASGI callable; under a server that does not call back at a disconnect, it has `receive` note it.

    Falcon waits for the first piece of a body before it does anything. A body whose declared length is over the limit
    is not waited for, so that its refusal comes before a client that asks first (`Expect: 100-continue`) sends it.
    """

    def __init__(self, app: falcon.asgi.App[Any, Any], max_body_bytes: int) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One ASGI scope."""
        if scope["type"] == "http":
            if CALLBACK_KEY not in scope:
                receive = noting(scope, receive)
            if _declared_nbytes(scope) > self._max_body_bytes:
                receive = _unread
        await self._app(scope, receive, send)


def _declared_nbytes(scope: dict[str, Any]) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


async def _unread() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": True}


def create(config: settings.Settings | None = None) -> Application:
    """The application for `config` (the one that the arbiter accepted when None)."""
    chosen = configuration.current() if config is None else configuration.read(config)
    services = Services(chosen.settings, chosen.catalog)
    known = protocols()
    middleware: list[Any] = [Lifespan(services), RequestMiddleware(services, known)]
    app: falcon.asgi.App[Any, Any] = falcon.asgi.App(middleware=middleware)
    errors = ErrorRenderer(known)
    app.add_error_handler(Exception, errors.unexpected)
    app.add_error_handler(falcon.HTTPError, errors.http)
    app.add_error_handler(PenstockError, errors.penstock)
    for path in ("/healthz", "/livez"):
        app.add_route(path, health.LivenessResource())
    app.add_route("/readyz", health.ReadinessResource(services))
    app.add_route("/metrics", health.MetricsResource(services))
    app.add_route("/health", health.HealthResource())
    for protocol in known:
        protocol.mount(app, services)
    return Application(app, chosen.settings.limits.max_body_bytes)
