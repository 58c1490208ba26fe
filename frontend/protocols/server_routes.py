"""The routes that belong to no protocol: probes, metrics, the live page, and the API's description."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from frontend.openapi.document import document
from frontend.openapi.pages import SchemaResource, SwaggerResource
from frontend.protocols.sie.errors import ErrorResponse
from frontend.protocols.sie.operations import faults
from frontend.resources.health import HealthResource, LivenessResource, MetricsResource, ReadinessResource
from frontend.routes import HTML, JSON, METRICS, TEXT, Faults, Parameter, Route
from frontend.services import Services
from frontend.status.stream import PageResource, StreamResource
from ipc.version import VERSION

_UNCHOSEN: Faults = {int(HTTPStatus.NOT_IMPLEMENTED): ErrorResponse}
"""The error of a path whose server nobody chose: it is in the form of SIE."""


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


def _page(context: Context) -> SwaggerResource:
    return SwaggerResource()


def _schema(context: Context) -> SchemaResource:
    return SchemaResource(context.schema)


ROUTES = (
    _open("/", lambda _: PageResource(), "Status page, or `OK`.", (TEXT, HTML)),
    _open("/healthz", lambda _: LivenessResource(), "Whether the process lives.", health=True),
    _ready("/readyz", "Whether traffic is accepted; the second line of a 503 says why not."),
    _ready("/ping", "The same as /readyz, under the name that SageMaker asks."),
    _open("/livez", lambda _: LivenessResource(), "Whether the process lives.", health=True),
    _open(
        "/health",
        lambda _: HealthResource(),
        "`OK`; that this is a single server, for who asks for JSON.",
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
    found = document(routes, VERSION, dict.fromkeys(shared, _UNCHOSEN))
    return orjson.dumps(found, option=orjson.OPT_INDENT_2)
