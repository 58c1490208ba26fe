"""The OpenAPI 3.1 document of a table of routes, and the resources that serve the document and Swagger UI.

1. msgspec makes components of all structs that the table names, and of the structs that they refer to.
2. Every operation gets its parameters, its bodies by `$ref` in each media type, its statuses and their headers.
3. Headers and parameters that recur are components too.

Without the internet:

1. `/openapi.json` and `/api-doc/openapi.json` give the document, which a frontend makes at the first request for the
   document. Making the document takes a fifth of a second, and no start of a frontend waits for it.
2. `/docs`, `/docs/` and `/redoc` give the page. Its policy lets the page load from this server only.
3. `/docs/<file>` gives the page's files: our style, our script that starts Swagger UI, and Swagger UI from the package
   `swagger-ui-py`, of which nothing is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import falcon
import msgspec
from falcon.asgi import Request, Response

from frontend.http.inline_page import page_headers
from frontend.route_rows import EVENTS, JSON, Faults, Route

_IN_BRACES = re.compile(r"{(\w+)}")
_PATH_PARAMETERS = {
    "approval_id": "Id of a call that waits for a decision, from an event of its run.",
    "container_id": "Id of a container, which belongs to a response.",
    "file_id": "Id of a file.",
    "mode": "`live` or `ready`.",
    "pool": "Name of a pool.",
    "bundle": "Name of a bundle.",
    "region": "Name of a region of shared memory.",
    "response_id": "Id of a stored response.",
    "rest": "What to do, and with which region, as the contract writes it.",
    "session_id": "Id of a session. It is the rest of the path, slashes included.",
    "skill_id": "Id of a skill.",
    "target": "Name of a model, with a slash and its version where one is meant.",
    "version": "The version.",
}
"""Descriptions of the parameters of paths, by name."""
SECTIONS = {
    "chat": "Text from a model, in the form of OpenAI. Begin here with a model that writes.",
    "inference": "Vectors, scores and findings. Begin here with a model that encodes, scores or extracts.",
    "models": "Which models there are, and in which state.",
    "messages": "Text from a model, in the form of Anthropic.",
    "responses": "Text from a model, in OpenAI's newer form, which can be stored and run in the background.",
    "files": "Files that clients upload and agents make, also in the form of Anthropic.",
    "skills": "Skills of clients with their versions, for runs with tools; also in the form of Anthropic.",
    "agent": "Sessions of runs with tools of the server, and decisions about their calls.",
    "ollama": "The routes that clients of ollama ask.",
    "tei": "The routes that clients of Text Embeddings Inference ask.",
    "vllm": "The routes that clients of vLLM ask.",
    "infinity": "The routes that clients of infinity ask.",
    "server": "Probes, metrics, and this description.",
    "system": "What this machine is, and whether the server can do its work.",
    "cluster": "Of a gateway: pools of boxes.",
    "admin": "Loading and unloading; a key needs the scope `admin`.",
    "kserve inference": "Tensors in and out, in the form of KServe v2 and Triton.",
    "kserve models": "Tensors, configuration and statistics of models.",
    "kserve server": "Name, version and health, in the form of KServe v2.",
    "kserve repository": "Models of a repository: index, load, unload.",
    "kserve shared memory": "Inputs and outputs that lie in memory of the client.",
    "kserve settings": "What is logged and traced.",
    "trtis v1": "The first interface of TensorRT Inference Server.",
}
"""Tags in the order in which a newcomer needs them, and what each is about."""
REF = "#/components/{kind}/{name}"
_TEMPLATE = REF.format(kind="schemas", name="{name}")
MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "Name of a model, or `name:profile`. It is the rest of the path, slashes included.",
    "schema": {"type": "string", "minLength": 1},
}
HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-ID": ("Id of the request: the one sent, or a new one.", {"type": "string"}),
    "X-Trace-ID": (
        "Trace id: that of the `traceparent` sent, or a new one.",
        {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    ),
    "X-SIE-Server-Version": ("Version of the contract, for clients that compare.", {"type": "string"}),
    "X-SIE-Error-Code": ("Code of the error.", {"type": "string"}),
    "Retry-After": ("Seconds after which the request may be sent again.", {"type": "integer", "minimum": 1}),
    "WWW-Authenticate": ("Which kind of key is wanted.", {"type": "string"}),
    "X-Total-Time": ("Milliseconds since the body was decoded.", {"type": "number"}),
    "X-Queue-Time": ("Milliseconds in the queue.", {"type": "number"}),
    "X-Tokenization-Time": ("Milliseconds of preparing.", {"type": "number"}),
    "X-Inference-Time": ("Milliseconds on the device.", {"type": "number"}),
    "X-Penstock-Cache-Hits": (
        "Items found in the cache of embeddings; absent where nothing was looked up.",
        {"type": "integer", "minimum": 0},
    ),
    "X-Postprocessing-Time": (
        "Milliseconds after the device; absent when there were none.",
        {"type": "number"},
    ),
}
COMMON_HEADERS = ("X-Request-ID", "X-Trace-ID", "X-SIE-Server-Version")
TIME_HEADERS = ("X-Total-Time", "X-Queue-Time", "X-Tokenization-Time", "X-Inference-Time")
SOMETIMES = ("X-Postprocessing-Time", "X-Penstock-Cache-Hits")
WITH_RETRY = frozenset({429, 503, 504})
_OWN = Path(__file__).parent / "assets"
_PAGE = "docs.html"
_TYPES = {".html": falcon.MEDIA_HTML, ".css": "text/css", ".js": "text/javascript", ".png": falcon.MEDIA_PNG}
_OURS = (_PAGE, "page.css", "start.js")
_PACKAGED = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
_HEADERS = page_headers("'self'", "'self'", "'self' data:")


def document(routes: Iterable[Route], version: str, unchosen: Mapping[str, Faults]) -> dict[str, Any]:
    """The whole document of a build of this `version`: all routes that have a summary.

    `unchosen` are the errors of paths which several protocols have, by path, where no protocol was chosen for a path.
    """
    table = list(_merged((route for route in routes if route.summary), unchosen))
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        paths.setdefault(route.shown, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version,
            "description": "Inference over HTTP: chat, embeddings, scores, extraction, tensors. `/ws/status` is a "
            "WebSocket and not described here.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": tag, "description": text}
            for tag, text in SECTIONS.items()
            if any(route.tag == tag for route in table)
        ],
        "paths": paths,
        "components": {
            "schemas": _schemas(table),
            "headers": {
                name: {"description": text, "required": name not in SOMETIMES, "schema": schema}
                for name, (text, schema) in HEADERS.items()
            },
            "parameters": {"model": MODEL},
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, when the server has keys.",
                }
            },
        },
    }


def _merged(routes: Iterable[Route], unchosen: Mapping[str, Faults]) -> Iterable[Route]:
    """One operation for each method and path. A path of several protocols has the bodies and answers of each."""
    groups: dict[tuple[str, str], list[Route]] = {}
    for route in routes:
        groups.setdefault((route.shown, route.method), []).append(route)
    for group in groups.values():
        first = group[0]
        if len(group) == 1:
            yield first
            continue
        forms = [*(one.errors for one in group), unchosen.get(first.path, {})]
        statuses = sorted({status for errors in forms for status in errors})
        errors = {int(status): _distinct(errors.get(status) for errors in forms) for status in statuses}
        yield replace(
            first,
            body=_distinct(one.body for one in group),
            answer=_distinct(one.answer for one in group),
            errors=errors,
        )


def _distinct(types: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(kind for kind in types if kind is not None))


def _schemas(table: list[Route]) -> dict[str, Any]:
    named = dict.fromkeys(
        struct
        for route in table
        for given in (route.body, route.answer, *route.errors.values())
        for struct in (given if isinstance(given, tuple) else (given,))
        if struct is not None
    )
    _, components = msgspec.json.schema_components(named, ref_template=_TEMPLATE)
    for schema in components.values():
        # NOTE: msgspec makes the field of a tag itself, so no annotation can describe the field.
        if (tag := schema.get("properties", {}).get("type")) is not None:
            tag.setdefault("description", "Which of the forms this object has.")
    return dict(sorted(components.items()))


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.tag],
        "security": [{}, {"key": []}] if route.need else [],
    }
    parameters: list[dict[str, Any]] = [_ref("parameters", "model")] if "{model}" in route.shown else []
    parameters += [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH_PARAMETERS[name],
            "schema": _parameter_schema(route.choices.get(name)),
        }
        for name in _IN_BRACES.findall(route.shown)
        if name != "model"
    ]
    parameters += [
        {"name": one.name, "in": one.place, "description": one.text, "schema": one.schema}
        for one in route.parameters
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = {media: {"schema": _struct(route.body)} for media in route.accepts}
        if route.variants:
            shown = {"plain": route.example, **route.variants}
            content[route.accepts[0]]["examples"] = {name: {"value": each} for name, each in shown.items()}
        elif route.example is not None:
            content[route.accepts[0]]["example"] = route.example
        operation["requestBody"] = {"required": route.body_required, "content": content}
    operation["responses"] = _responses(route)
    return operation


def _parameter_schema(choices: Sequence[str] | None) -> dict[str, Any]:
    """The schema of a parameter of a path; None: any text."""
    return (
        {"type": "string", "minLength": 1} if choices is None else {"type": "string", "enum": list(choices)}
    )


def _responses(route: Route) -> dict[str, Any]:
    timed = (*TIME_HEADERS, *SOMETIMES) if route.timed else ()
    responses = {"200": _response(route.answer_text, route.answer, route.media, timed, route.many)}
    if route.streams:
        responses["200"]["content"][EVENTS] = {"schema": _any_of(EVENTS)}
    for status, text in route.also.items():
        responses[str(status)] = _response(text, route.answer, route.media, ())
    for status, struct in route.errors.items():
        text = f"{HTTPStatus(status).phrase}."
        media = route.error_media if struct is None else (JSON,)
        responses[str(status)] = _response(text, struct, media, _error_headers(route, status, struct))
    return dict(sorted(responses.items()))


def _error_headers(route: Route, status: int, struct: Any) -> tuple[str, ...]:
    if struct is None:
        return ()
    retry = ("Retry-After",) if status in WITH_RETRY and route.retry_header else ()
    asked = ("WWW-Authenticate",) if status == 401 else ()
    code = ("X-SIE-Error-Code",) if route.error_code_header else ()
    return (*code, *retry, *asked)


def _response(
    text: str,
    struct: Any,
    media: tuple[str, ...],
    headers: tuple[str, ...],
    many: bool = False,
) -> dict[str, Any]:
    def schema(kind: str) -> dict[str, Any]:
        one = _any_of(kind) if struct is None else _struct(struct)
        return {"type": "array", "items": one} if many else one

    return {
        "description": text,
        "headers": {name: _ref("headers", name) for name in (*COMMON_HEADERS, *headers)},
        "content": {kind: {"schema": schema(kind)} for kind in media},
    }


def _any_of(media: str) -> dict[str, Any]:
    return {"type": "object" if media == JSON else "string"}


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": REF.format(kind=kind, name=name)}


@cache
def _struct(struct: Any) -> dict[str, Any]:
    """A struct by reference, another type by its schema, and a tuple as any of its types."""
    if isinstance(struct, tuple):
        return {"anyOf": [_struct(one) for one in struct]}
    [schema], _ = msgspec.json.schema_components([struct], ref_template=_TEMPLATE)
    return schema


def _files() -> dict[str, Path]:
    """Files of the page by name. Raises `RuntimeError` if the package of Swagger UI is missing."""
    package = find_spec("swagger_ui")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the package swagger-ui-py is not installed; /docs needs its files")
    packaged = Path(package.submodule_search_locations[0]) / "static"
    return {name: packaged / name for name in _PACKAGED} | {name: _OWN / name for name in _OURS}


@cache
def _read(path: Path) -> tuple[bytes, str]:
    """A file and its ETag. Kept, since frontends may serve the file at any time."""
    data = path.read_bytes()
    return data, hashlib.sha256(data).hexdigest()[:16]


class SchemaResource:
    """The document, which `schema` makes once."""

    def __init__(self, schema: Callable[[], bytes]) -> None:
        self._schema = schema

    async def on_get(self, req: Request, resp: Response) -> None:
        """JSON, whatever Accept says."""
        resp.content_type = falcon.MEDIA_JSON
        resp.set_header("Cache-Control", "no-cache")
        resp.data = await asyncio.to_thread(self._schema)

    on_head = on_get


class SwaggerResource:
    """The page, and its files by name."""

    def __init__(self) -> None:
        self._files = _files()

    async def on_get(self, req: Request, resp: Response, name: str = "") -> None:
        """A file, or 304 when the client has it. Raises `falcon.HTTPNotFound` for a file that the page lacks."""
        path = self._files.get(name or _PAGE)
        if path is None:
            raise falcon.HTTPNotFound
        data, tag = await asyncio.to_thread(_read, path)
        resp.set_headers(_HEADERS)
        resp.etag = tag
        if any(one in (tag, "*") for one in req.if_none_match or ()):
            resp.status = falcon.HTTP_304
            return
        resp.content_type = _TYPES[path.suffix]
        resp.data = data

    on_head = on_get
