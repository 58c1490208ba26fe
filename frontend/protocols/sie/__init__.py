"""The SIE dialect: encode, score, extract, models, and embeddings and rerank in the forms of other APIs.

May be imported by `frontend.protocols.registry` and `server_routes`, and by forms of other servers over its flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import falcon
import falcon.asgi
import msgspec

from frontend.protocols.sie import errors, models, schemas
from frontend.protocols.sie.encode import EmbeddingsResource, EmbeddingsResponse, EncodeResource
from frontend.protocols.sie.errors import ErrorResponse, ModelErrorResponse, OpenAIErrorResponse
from frontend.protocols.sie.extract import ExtractResource, ExtractResponse
from frontend.protocols.sie.render import EncodeResponse
from frontend.protocols.sie.score import RerankResource, RerankResponse, ScoreResource, ScoreResponse
from frontend.route_rows import JSON, MSGPACK, Parameter, Route, asking
from frontend.scope import ANY_BOX
from frontend.services import Services
from ipc.errors import PenstockError, ResourceExhausted

SCORE = "/v1/score"
"""A path of vLLM above routes of this contract, whose form of errors the path has."""


CLIENT_FAULTS = (400, 401, 403, 404, 408, 409, 413, 429)
SERVER_FAULTS = (500, 501, 502, 503, 504)
HEADERS = (
    Parameter("X-Request-ID", "header", "Id to echo and log."),
    Parameter(
        "X-Request-Timeout", "header", "Seconds to answer in.", {"type": "number", "exclusiveMinimum": 0}
    ),
    Parameter("traceparent", "header", "W3C trace context."),
)

ASKING = (
    Parameter("X-Penstock-Item-Errors", "header", "1: an item that fails has an error of its own."),
    Parameter("X-Penstock-Warnings", "header", "1: the answer names what the model did not read."),
)
_TEXTS = [{"id": "a", "text": "first text"}, {"text": "second text"}]
_PAGE = (
    Parameter(
        "limit",
        "query",
        "Most entries of a page; without it there is one page.",
        {"type": "integer", "minimum": 1, "maximum": models.MAX_LIMIT},
    ),
    Parameter("after_id", "query", "The page begins behind this entry."),
    Parameter("before_id", "query", "The page ends before this entry."),
)
_PACKAGES = ("sie-sdk", "sie_sdk")


def faults(
    *statuses: int, form: type[msgspec.Struct] = ErrorResponse
) -> dict[int, type[msgspec.Struct] | None]:
    """Errors of these statuses, in `form`."""
    return dict.fromkeys(statuses, form)


def _inference(
    path: str, resource: Any, summary: str, body: Any, answer: Any, example: dict[str, Any]
) -> Route:
    return Route(
        "post",
        path,
        resource,
        summary,
        "inference",
        body=body,
        answer=answer,
        media=(JSON, MSGPACK),
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        parameters=(*HEADERS, *ASKING),
        timed=True,
        example=example,
    )


def _openai(path: str, resource: Any, summary: str, body: Any, answer: Any, example: dict[str, Any]) -> Route:
    return asking(
        path,
        resource,
        summary,
        body,
        answer,
        example,
        tag="inference",
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS, form=OpenAIErrorResponse),
        parameters=HEADERS,
        timed=True,
    )


def _admin(action: Literal["load", "unload"], summary: str) -> Route:
    return Route(
        "post",
        f"/v1/admin/{action}/{{model:path}}",
        lambda services: models.AdminResource(services, load=action == "load"),
        summary,
        "admin",
        body=schemas.AdminRequest,
        body_required=False,
        answer=models.ModelState,
        errors=faults(*CLIENT_FAULTS, *SERVER_FAULTS),
        also={202: "Accepted."},
        parameters=HEADERS,
        example={"wait": True},
        need="admin",
        switch="admin",
    )


ROUTES = (
    _inference(
        "/v1/encode/{model:path}",
        EncodeResource,
        "Vectors of texts and images.",
        schemas.EncodeRequest,
        EncodeResponse,
        {"items": _TEXTS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    ),
    _inference(
        f"{SCORE}/{{model:path}}",
        ScoreResource,
        "How well items answer a query.",
        schemas.ScoreRequest,
        ScoreResponse,
        {"query": {"text": "a question"}, "items": _TEXTS},
    ),
    _inference(
        "/v1/extract/{model:path}",
        ExtractResource,
        "Entities, relations, classifications, objects and structured data.",
        schemas.ExtractRequest,
        ExtractResponse,
        {"items": _TEXTS, "params": {"labels": ["person", "organization"]}},
    ),
    _openai(
        "/v1/embeddings",
        EmbeddingsResource,
        "Vectors in the OpenAI form.",
        schemas.EmbeddingsRequest,
        EmbeddingsResponse,
        {"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["first text", "second text"]},
    ),
    _openai(
        "/v1/rerank",
        RerankResource,
        "Documents in the order in which they answer a query, in the form of Cohere and Jina.",
        schemas.RerankRequest,
        RerankResponse,
        {"model": "BAAI/bge-reranker-v2-m3", "query": "a question", "documents": ["one", "two"], "top_n": 1},
    ),
    Route(
        "get",
        "/v1/models",
        models.ModelsResource,
        "All models.",
        "models",
        answer=models.ModelsResponse,
        errors=faults(400, 401, 403, 429),
        parameters=_PAGE,
    ),
    Route(
        "get",
        "/v1/models/{model:path}",
        models.ModelResource,
        "One model.",
        "models",
        answer=models.ModelDetails,
        errors=faults(401, 403, 404, 429, form=ModelErrorResponse),
    ),
    _admin("load", "Load a model; a recorded failure is forgotten."),
    _admin("unload", "Take a model out of memory once its work is done."),
)

OPENAI_FORM = frozenset(
    (SCORE, *(route.path for route in ROUTES if OpenAIErrorResponse in route.errors.values()))
)
"""The paths whose errors are in the form of OpenAI too."""
MODEL_FORM = tuple(f"{route.stem}/" for route in ROUTES if ModelErrorResponse in route.errors.values())
"""The folders whose errors repeat their message for clients of OpenAI."""


def is_own_client(req: falcon.asgi.Request) -> bool:
    """Whether a client library of SIE sent the request, by its version header or its user agent."""
    agent = (req.get_header("User-Agent") or "").lower()
    return req.get_header("X-SIE-SDK-Version") is not None or any(name in agent for name in _PACKAGES)


def _renderer(path: str) -> errors.Render:
    """The form of errors on `path`."""
    if path in OPENAI_FORM:
        return errors.render_openai
    return errors.render_model if path.startswith(MODEL_FORM) else errors.render


class SieProtocol:
    """Routes and error form of the SIE contract."""

    name = "sie"
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def __init__(self) -> None:
        self._exhausted_retry_s: float | None = None
        self._is_gateway = False

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        self._exhausted_retry_s = services.settings.limits.exhausted_retry_s
        self._is_gateway = services.settings.is_gateway
        return services

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            error.retry_after_s = self._exhausted_retry_s
        status, body, headers = _renderer(path)(error, req is not None and is_own_client(req))
        if self._is_gateway:
            scope = getattr(req.context, "penstock", None) if req is not None else None
            # The bytes of one host come first.
            body = {**body, **errors.of_gateway(error, scope.choice if scope is not None else ANY_BOX)}
        return status, body, headers

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
