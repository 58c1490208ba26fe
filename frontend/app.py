"""The Falcon application of one frontend, and what stands before and after every request, in the order of a request.

1. `Application` looks at the head: form of the path, port, key, declared length.
2. `RequestMiddleware` makes the request's context, sets the common headers, and counts the outcome.
3. `CorsMiddleware` gives pages of other sites leave, and answers their preflights.
4. `AccessMiddleware` raises the gate's refusal, or puts the grant into the context.
5. `DeadlineMiddleware` applies the deadline that the caller asks for.
6. `ErrorRenderer` answers an exception in the form of the path's protocol, and logs failures of the server.

`create` puts the parts together and opens nothing: sockets, files and threads come with the lifespan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import falcon
import falcon.asgi
import orjson
from falcon.asgi import Request, Response, WebSocket

from frontend.access.gate import Decision, Grant, decision_of
from frontend.access_log import NO_MODEL, RECORD_KEY, HttpRecord
from frontend.arbiter import configuration
from frontend.assembly import Backend, chosen
from frontend.http import tracebacks
from frontend.http.bodies import CALLBACK_KEY, noting
from frontend.http.listeners import SEND_KEY, Listeners, check_path, deny, normalize, refuse
from frontend.lifespan import Lifespan
from frontend.protocols.registry import Protocols, as_bytes, protocols
from frontend.records.finishing import Outcome
from frontend.scope import RequestScope, common_headers, plain_scope, scope_of_request, shorten_deadline
from frontend.services import Services
from ipc import logs
from ipc.addresses import is_loopback
from ipc.errors import Cancelled, Draining, PenstockError, Unauthenticated
from ipc.metrics.families import NO_KEY, UNKNOWN
from ipc.settings import Settings

log = logging.getLogger(__name__)

METHODS = "GET, POST, PUT, DELETE"
REQUEST_HEADERS = (
    "content-type",
    "authorization",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "x-request-id",
)
_OF_SDKS = ("x-stainless-", "anthropic-", "openai-")
"""Beginnings of further headers that the SDKs of OpenAI and Anthropic send from pages."""
_MAX_AGE_S = 600
_ANY, _LOCAL, _AUTO = "*", "local", "auto"
"""Words in place of origins: all pages, pages of this machine, and one of both by whether the server has keys."""


class CorsMiddleware:
    """Gives pages leave to use the API: Cross-Origin Resource Sharing, section 3.3 of the Fetch standard.

    1. A browser asks before it sends JSON or a key to another site: a preflight. The preflight carries no key, so the
       gate lets a preflight in, and this middleware answers without the route.
    2. An answer names the origin that may read the answer, also when the answer is an error.
    3. `server.cors_origins` says which origins have leave: without keys pages of this machine only (docs/adr/0070).
       Other pages are sent nothing. Leave is for paths with `PathFacts.pages` alone.
    """

    def __init__(self, origins: Sequence[str], known: Protocols, *, has_keys: bool) -> None:
        self._known = known
        words = {(_ANY if has_keys else _LOCAL) if origin == _AUTO else origin.lower() for origin in origins}
        self._any, self._local = _ANY in words, _LOCAL in words
        self._origins = frozenset(words)

    async def process_request(self, req: Request, resp: Response) -> None:
        """Answer a preflight of an origin with leave."""
        asked = req.get_header("Access-Control-Request-Method")
        if req.method != "OPTIONS" or asked is None or not self._leave(req):
            return
        resp.status = falcon.HTTP_204
        resp.set_headers(
            {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": _allowed_headers(req),
                "Access-Control-Max-Age": str(_MAX_AGE_S),
            }
        )
        resp.complete = True

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Name the origin that may read the answer."""
        if not self._origins or not self._known.at(req.path).pages:
            return
        if not self._any:
            resp.append_header("Vary", "Origin")
        leave = self._leave(req)
        if leave:
            resp.set_header("Access-Control-Allow-Origin", leave)
            resp.set_header("Access-Control-Expose-Headers", "x-request-id")

    def _leave(self, req: Request) -> str:
        """The value that gives a request's origin leave; "" for none."""
        origin = req.get_header("Origin")
        if origin is None or not self._known.at(req.path).pages:
            return ""
        if self._any:
            return _ANY
        return origin if origin.lower() in self._origins or (self._local and _is_local(origin)) else ""


def _is_local(origin: str) -> bool:
    """Whether a page of `origin` comes from the machine of its browser: by `localhost` or a loopback address."""
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return host == "localhost" or host.endswith(".localhost") or is_loopback(host)


def _allowed_headers(req: Request) -> str:
    asked = (req.get_header("Access-Control-Request-Headers") or "").lower().split(",")
    more = {name.strip() for name in asked if name.strip().startswith(_OF_SDKS)} - set(REQUEST_HEADERS)
    return ", ".join((*REQUEST_HEADERS, *sorted(more)))


class RequestMiddleware:
    """Makes the request's context, sets the common headers, and records the outcome."""

    def __init__(self, services: Services, known: Protocols) -> None:
        self._services, self._known = services, known

    async def process_request(self, req: Request, resp: Response) -> None:
        """Ids and deadline; while draining, inference is still answered, since the connection was accepted before.

        Raises `InvalidInput` for a path that is refused.
        """
        scope = scope_of_request(req, self._services.settings.limits)
        req.context.penstock = scope
        scope.http = req.scope.get(RECORD_KEY)
        if scope.http is not None:
            scope.http.request_id = scope.request_id
        logs.request_id.set(scope.request_id)
        self._services.finisher.begin(scope, req.path)
        check_path(req.scope)

    async def process_resource(
        self, req: Request, resp: Response, resource: object, params: dict[str, Any]
    ) -> None:
        """The request has a route: tell its record, with the model where the path names the model."""
        record: HttpRecord | None = req.context.penstock.http
        if record is not None:
            facts = self._known.at(req.path)
            record.routed(req.uri_template or "", facts.model or (UNKNOWN if facts.operation else NO_MODEL))

    async def process_request_ws(self, req: Request, ws: WebSocket) -> None:
        """Ids of a handshake; the common headers go into its answer, whatever it is. Raises `InvalidInput`."""
        scope = scope_of_request(req, self._services.settings.limits)
        req.context.penstock, req.context.common = scope, self._common(scope)
        logs.request_id.set(scope.request_id)
        check_path(req.scope)

    def _common(self, made: RequestScope) -> dict[str, str]:
        return common_headers(made, self._services.settings.server)

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Common headers and metrics."""
        scope: RequestScope | None = getattr(req.context, "penstock", None)
        if scope is None:
            scope = req.context.penstock = plain_scope()
        resp.set_headers(self._common(scope))
        status = resp.status_code
        if scope.http is not None:
            scope.http.status = status
        if scope.streams:
            return
        facts = self._known.at(req.path)
        if scope.error and not scope.operation:
            scope.operation, scope.model = facts.operation, facts.model
        outcome = Outcome(req.method, req.path, req.uri_template or "", status)
        self._services.finisher.finish(scope, facts.protocol.name, outcome)


class DeadlineMiddleware:
    """Applies the caller's own deadline; runs after the middleware that checks keys."""

    def __init__(self, services: Services) -> None:
        self._limits = services.settings.limits

    async def process_request(self, req: Request, resp: Response) -> None:
        """Shorten the deadline. Raises `InvalidInput`."""
        shorten_deadline(req.context.penstock, req, self._limits)


class ErrorRenderer:
    """Turns exceptions into the protocol's form of an error."""

    def __init__(self, known: Protocols) -> None:
        self._known = known

    async def penstock(
        self,
        req: Request,
        resp: Response | None,
        error: PenstockError,
        params: dict[str, Any],
        ws: WebSocket | None = None,
    ) -> None:
        """An error of the tree."""
        tracebacks.forget(error)
        scope = getattr(req.context, "penstock", None)
        if scope is not None:
            scope.failed(error)
        if isinstance(error, Cancelled):
            if resp is not None:
                resp.status = 499
            return
        status, body, headers = self._known.of(req.path).render_error(error, req.path, req)
        if isinstance(error, Unauthenticated):
            # RFC 6750, section 3: a request without a key learns the scheme only.
            wrong = ', error="invalid_token"' if error.presented else ""
            headers["WWW-Authenticate"] = f'Bearer realm="penstock"{wrong}'
        await _answer(req, resp, ws, status, body, headers)
        if status >= 500 and not isinstance(error, Draining) and not error.retryable:
            log.warning("%s %s answered %d %s: %s", req.method, req.path, status, error.code, error.message)

    async def unexpected(
        self,
        req: Request,
        resp: Response | None,
        error: Exception,
        params: dict[str, Any],
        ws: WebSocket | None = None,
    ) -> None:
        """A bug: its text stays in the log."""
        log.error("%s %s failed", req.method, req.path, exc_info=error)
        await self.penstock(req, resp, PenstockError("internal error"), params, ws)

    async def http(
        self,
        req: Request,
        resp: Response | None,
        error: falcon.HTTPError,
        params: dict[str, Any],
        ws: WebSocket | None = None,
    ) -> None:
        """Unknown path, wrong method, and Falcon's own refusals of bad headers."""
        status, body, headers = self._known.of(req.path).render_http(error, req.path)
        await _answer(req, resp, ws, status, body, headers | dict(error.headers or {}))


async def _answer(
    req: Request,
    resp: Response | None,
    ws: WebSocket | None,
    status: int,
    body: dict[str, Any] | None,
    headers: dict[str, str],
) -> None:
    """An error as the response, or as the refusal of a WebSocket handshake."""
    if resp is None:
        if ws is not None:
            await deny(req, ws, status, body or {}, headers | getattr(req.context, "common", {}))
        return
    resp.status = status
    if body is None:
        resp.data = b""
    else:
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(body)
    resp.set_headers(headers)


class AccessMiddleware:
    """Applies the decision that `Gate.admit` kept in the scope. Runs after the middleware that makes the context."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def process_request(self, req: Request, resp: Response) -> None:
        """Note the caller. Raises the `AccessRefused`."""
        req.context.penstock.grant = self._apply(req)

    async def process_request_ws(self, req: Request, ws: WebSocket) -> None:
        """Note the caller of a WebSocket. Raises the `AccessRefused`, which refuses the handshake."""
        req.context.penstock.grant = self._apply(req)
        self._count(decision_of(req.scope), "101")

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Count the request for its key; a change of the server is logged with the name of the key."""
        decision = decision_of(req.scope)
        self._count(decision, str(resp.status_code))
        name = decision.grant.name
        if decision.grant.admin:
            log.info("%s %s answered %d for key %s", req.method, req.path, resp.status_code, name)

    def _apply(self, req: Request) -> Grant:
        decision = decision_of(req.scope)
        logs.caller.set(decision.grant.name)
        if decision.refusal is not None:
            if self._services.started:
                self._services.recorder.refused(decision.refusal.code.lower())
            raise decision.refusal
        return decision.grant

    def _count(self, decision: Decision, code: str) -> None:
        if self._services.started and (decision.grant.name or decision.refusal is not None):
            self._services.recorder.called(decision.grant.name or NO_KEY, code)


def access_middleware(services: Services, known: Protocols) -> list[Any]:
    """The middleware of access, in its order: a preflight is answered before anybody asks for a key."""
    cors = CorsMiddleware(services.settings.server.cors_origins, known, has_keys=services.access.closed)
    return [cors, AccessMiddleware(services)]


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


def create(config: Settings | None = None, behind: Callable[[Services], Backend] = chosen) -> Application:
    """The application for `config` (that of the arbiter when None), over the engine that `behind` makes."""
    accepted = configuration.current() if config is None else configuration.read(config)
    services = Services(accepted.settings, accepted.catalog, accepted.access, accepted.restrictions)
    known = protocols(accepted.settings.server.compatible, is_gateway=accepted.settings.is_gateway)
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
    return Application(app, known, services, Listeners(accepted.settings.server))
