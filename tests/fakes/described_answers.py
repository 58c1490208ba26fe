"""Compares the JSON answers of applications in tests with the API's description, field by field.

1. The schemas of the description are closed: a field that the description does not name is a mistake, as is a missing
   one, or one of another type.
2. `DescribedAnswers` is a middleware of every application of `tests.fakes.generation_server.app_of`. An answer that the
   description does not allow becomes a failure of its request, and the log names the field. So does a status that the
   description of its path and method lacks.
3. Not checked are streams, bodies that leave in slices, other media types, and paths or methods without a description.
   Whole servers, and applications that tests make elsewhere, lack this middleware.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import falcon
from falcon.asgi import Request, Response
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from frontend.protocols.registry import protocols

OPEN = {"ErrorDetail"}
"""Objects that have further fields for some values of others."""
_ROOT = "urn:openapi"


@cache
def _document(is_gateway: bool) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(protocols(is_gateway=is_gateway).schema())
    for name, schema in found["components"]["schemas"].items():
        if schema.get("type") == "object" and "properties" in schema and name not in OPEN:
            schema.setdefault("additionalProperties", False)
    return found


@cache
def _registry(is_gateway: bool) -> Registry:
    return Registry().with_resource(_ROOT, DRAFT202012.create_resource(_document(is_gateway)))


@cache
def _patterns(is_gateway: bool) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of described paths, those with the most fixed text first."""
    paths = sorted(_document(is_gateway)["paths"], key=lambda path: -len(re.sub(r"{\w+}", "", path)))
    return [(re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(path))), path) for path in paths]


@cache
def _validator(path: str, method: str, status: int, is_gateway: bool) -> Draft202012Validator | None:
    """What checks an answer; None where the description does not tell of one as JSON."""
    answer = _document(is_gateway)["paths"][path][method]["responses"][str(status)]
    if falcon.MEDIA_JSON not in answer.get("content", {}):
        return None
    keys = ("paths", path.replace("~", "~0").replace("/", "~1"), method, "responses", str(status), "content")
    pointer = "/".join((*keys, falcon.MEDIA_JSON.replace("/", "~1"), "schema"))
    pointer = pointer.replace("{", "%7B").replace("}", "%7D")
    return Draft202012Validator({"$ref": f"{_ROOT}#/{pointer}"}, registry=_registry(is_gateway))


def check(method: str, path: str, status: int, body: bytes, *, is_gateway: bool = False) -> None:
    """Raise `AssertionError` for an answer that the description does not allow; `body` is JSON, or empty."""
    known = next((template for pattern, template in _patterns(is_gateway) if pattern.fullmatch(path)), None)
    described = None if known is None else _document(is_gateway)["paths"][known].get(method.lower())
    if known is None or described is None:
        return
    assert str(status) in described["responses"], f"{method} {path} {status} is not described"
    validator = _validator(known, method.lower(), status, is_gateway)
    if validator is None or not body:
        return
    mistakes = [
        f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(json.loads(body))
    ]
    assert not mistakes, f"{method} {path} {status} is not what the description says: {mistakes}"


class DescribedAnswers:
    """The middleware of a gateway or of one server."""

    def __init__(self, *, is_gateway: bool) -> None:
        self._is_gateway = is_gateway

    async def process_response(self, req: Request, resp: Response, resource: object, succeeded: bool) -> None:
        """Check the status of an answer, and a body that is JSON and whole."""
        body = resp.data or (resp.text or "").encode()
        is_json = (resp.content_type or "").startswith(falcon.MEDIA_JSON)
        text = bytes(body) if is_json else b""
        check(req.method, req.path, resp.status_code, text, is_gateway=self._is_gateway)
