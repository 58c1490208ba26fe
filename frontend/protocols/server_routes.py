"""The routes that belong to no protocol: probes, metrics, the live page, and the API's description."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.engine.interface import LOADING
from frontend.openapi.document import SchemaResource, SwaggerResource, document
from frontend.protocols.sie import faults
from frontend.protocols.sie.errors import ErrorResponse
from frontend.route_rows import HTML, JSON, METRICS, TEXT, Faults, Parameter, Route
from frontend.services import Services
from frontend.status.agents import lacks
from frontend.status.cluster import health_fields
from frontend.status.stream import PageResource, StreamResource
from ipc.catalog.ids import split_id
from ipc.metrics import registry as metrics
from ipc.version import VERSION

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNCHOSEN: Faults = {int(HTTPStatus.NOT_IMPLEMENTED): ErrorResponse}
"""The error of a path whose server nobody chose: it is in the form of SIE."""


def _wants_json(req: Request) -> bool:
    return "application/json" in (req.get_header("Accept") or "").lower()


class LivenessResource:
    """200 while the process turns over, also while it drains."""

    def __init__(self, services: Services) -> None:
        self._is_gateway = services.settings.is_gateway

    async def on_get(self, req: Request, resp: Response) -> None:
        """`ok`; a map from a gateway to a client that names JSON."""
        if self._is_gateway and _wants_json(req):
            resp.content_type, resp.data = falcon.MEDIA_JSON, b'{"status":"ok"}'
            return
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = "ok"

    on_head = on_get


class ReadinessResource:
    """200 when all models of the start were tried and one is proven, 503 before that and while draining.

    `?model=` asks for one model, which may be loaded before the others. What tools and files lack is told and makes no
    server unready: all other requests are served, and no other server of a balancer would be better off.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """`ok`, or `not ready` with the reason on a second line; then a line for each warning.

        A gateway tells clients that name JSON how many boxes take work. Raises `ModelNotFound` at any time.
        """
        resp.content_type = falcon.MEDIA_TEXT
        name = req.get_param("model")
        model = None if name is None else self._services.directory.find(name).id
        ready, why = self._services.engine.ready()
        if model is not None and (ready or why == LOADING):
            state = self._services.directory.status(model).state
            ready, why = state == "loaded", f"model is {state}"
        resp.status = falcon.HTTP_200 if ready else falcon.HTTP_503
        if self._services.settings.is_gateway and _wants_json(req):
            healthy = sum(box.healthy for box in self._services.directory.boxes())
            health = {"status": "ready" if ready else why, "healthy_workers": healthy}
            resp.content_type, resp.data = falcon.MEDIA_JSON, orjson.dumps(health)
            return
        lines = ["ok"] if ready else ["not ready", why]
        lines += [f"warning: {problem.text} ({problem.note})" for problem in lacks(self._services)]
        resp.text = lines[0] if len(lines) == 1 else "\n".join([*lines, ""])

    on_head = on_get


class MetricsResource:
    """Prometheus exposition of all processes of this server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tags: dict[tuple[str, int], dict[str, str]] = {}

    async def on_get(self, req: Request, resp: Response) -> None:
        """Merge the slots' files in a thread; 503 where metrics are switched off."""
        if not self._services.settings.server.metrics:
            resp.status, resp.content_type, resp.text = falcon.HTTP_503, falcon.MEDIA_TEXT, "metrics disabled"
            return
        self._services.recorder.flush()
        resp.content_type = METRICS_TYPE
        self._note_tags()
        resp.data = await asyncio.to_thread(metrics.render, self._services.settings.paths, dict(self._tags))

    def _note_tags(self) -> None:
        """The tags in the configurations of models; an unloaded model keeps its tags, as it keeps its figures."""
        for worker in self._services.directory.workers():
            for status in worker.models.values():
                if status.config is not None:
                    self._tags[split_id(status.name)] = status.config.metric_tags


class HealthResource:
    """`OK`, also as JSON, for clients that distinguish a server from a gateway by the answer of `/health`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """`OK`, or a map for a client that names JSON."""
        if _wants_json(req):
            is_gateway = self._services.settings.is_gateway
            resp.content_type = falcon.MEDIA_JSON
            resp.data = b'{"status":"ok","type":"worker"}'
            if is_gateway:
                resp.data = orjson.dumps(health_fields(self._services.directory))
            return
        resp.content_type = falcon.MEDIA_TEXT
        resp.text = "OK"

    on_head = on_get


@dataclass(frozen=True, slots=True)
class Context:
    """What these resources are made from; `schema` gives the API's description as JSON."""

    services: Services
    schema: Callable[[], bytes]


def _open(
    path: str, resource: Any, summary: str = "", media: tuple[str, ...] = (TEXT,), **more: Any
) -> Route:
    """A probe or a page that holds no data of this server."""
    return Route("get", path, resource, summary, "server", media=media, need="", counted=False, **more)


def _ready(path: str, summary: str) -> Route:
    return _open(
        path,
        lambda context: ReadinessResource(context.services),
        summary,
        errors={404: ErrorResponse, 503: None},
        parameters=(Parameter("model", "query", "Ask for one model."),),
        health=True,
    )


def _live(context: Context) -> LivenessResource:
    return LivenessResource(context.services)


def _page(context: Context) -> SwaggerResource:
    return SwaggerResource()


def _schema(context: Context) -> SchemaResource:
    return SchemaResource(context.schema)


ROUTES = (
    _open("/", lambda _: PageResource(), "Status page, or OK.", (TEXT, HTML)),
    _open("/healthz", _live, "Whether the process lives.", health=True),
    _ready(
        "/readyz", "Whether traffic is accepted; the second line of a 503 says why not, further lines warn."
    ),
    _ready("/ping", "The same as /readyz, under the name that SageMaker asks."),
    _open("/livez", _live, "Whether the process lives.", health=True),
    _open(
        "/health",
        lambda context: HealthResource(context.services),
        "OK, or the words that this is a single server where a client asks for JSON.",
        (TEXT, JSON),
        health=True,
        pages=True,
    ),
    Route(
        "get",
        METRICS,
        lambda context: MetricsResource(context.services),
        "Prometheus metrics of all processes.",
        "server",
        media=(TEXT,),
        errors=faults(401, 403, 429),
        counted=False,
    ),
    _open("/openapi.json", _schema, "This document.", (JSON,), pages=True),
    _open("/api-doc/openapi.json", _schema, "This document, under another name.", (JSON,), pages=True),
    _open("/docs", _page, "Swagger UI with this document.", (HTML,)),
    _open("/docs/{name}", _page),
    _open("/redoc", _page),
    Route("get", "/ws/status", lambda context: StreamResource(context.services)),
)


def schema_of(routes: Iterable[Route], shared: Iterable[str]) -> bytes:
    """The OpenAPI document of `routes` as JSON; `shared` are the paths that `server.compatible` chooses a form for."""
    whole = document(routes, VERSION, dict.fromkeys(shared, _UNCHOSEN))
    return orjson.dumps(whole, option=orjson.OPT_INDENT_2)
