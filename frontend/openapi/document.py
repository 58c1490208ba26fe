"""The OpenAPI 3.1 document of a table of routes.

1. msgspec makes components of all structs that the table names, and of the structs that they refer to.
2. Every operation gets its parameters, its bodies by `$ref` in each media type, its statuses and their headers.
3. Headers and parameters that recur are components too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from frontend.routes import EVENTS, JSON, Faults, Route

_IN_BRACES = re.compile(r"{(\w+)}")
_PATH_PARAMETERS = {
    "mode": "`live` or `ready`.",
    "region": "Name of a region of shared memory.",
    "response_id": "Id of a stored response.",
    "rest": "What to do, and with which region, as the contract writes it.",
    "target": "Name of a model, with a slash and its version where one is meant.",
    "version": "The version.",
}
"""Descriptions of the parameters of paths, by name."""
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
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in table)],
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
    _, found = msgspec.json.schema_components(named, ref_template=_TEMPLATE)
    for schema in found.values():
        # NOTE: msgspec makes the field of a tag itself, so no annotation can describe the field.
        if (tag := schema.get("properties", {}).get("type")) is not None:
            tag.setdefault("description", "Which of the forms this object has.")
    return dict(sorted(found.items()))


def _operation(route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {
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
        made["parameters"] = parameters
    if route.body is not None:
        content: dict[str, Any] = {media: {"schema": _struct(route.body)} for media in route.accepts}
        if route.example is not None:
            content[route.accepts[0]]["example"] = route.example
        made["requestBody"] = {"required": route.body_required, "content": content}
    made["responses"] = _responses(route)
    return made


def _parameter_schema(choices: Sequence[str] | None) -> dict[str, Any]:
    """The schema of a parameter of a path; None: any text."""
    return (
        {"type": "string", "minLength": 1} if choices is None else {"type": "string", "enum": list(choices)}
    )


def _responses(route: Route) -> dict[str, Any]:
    timed = (*TIME_HEADERS, *SOMETIMES) if route.timed else ()
    made = {"200": _response(route.answer_text, route.answer, route.media, timed, route.many)}
    if route.streams:
        made["200"]["content"][EVENTS] = {"schema": _any_of(EVENTS)}
    for status, text in route.also.items():
        made[str(status)] = _response(text, route.answer, route.media, ())
    for status, struct in route.errors.items():
        text = f"{HTTPStatus(status).phrase}."
        media = route.error_media if struct is None else (JSON,)
        made[str(status)] = _response(text, struct, media, _error_headers(route, status, struct))
    return dict(sorted(made.items()))


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
    [found], _ = msgspec.json.schema_components([struct], ref_template=_TEMPLATE)
    return found
