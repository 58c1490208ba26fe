"""The form of errors: `{"error": <text>, "code", "request_id", "retryable"}`, with the statuses of this protocol."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import falcon
import msgspec
from msgspec import Meta

from frontend.protocols.kserve_v2.infer import OFFERED, UnsupportedEncoding
from frontend.tensors.request import UnavailableModel
from ipc import logs
from ipc.errors import PenstockError, QueueFull

_STATUSES = {
    "INPUT_TOO_LONG": 400,
    "MODEL_LOAD_FAILED": 500,
    "DEPENDENCY_CONFLICT": 500,
}
"""Statuses that differ from `PenstockError.status`."""
_HTTP = {
    404: ("there is nothing at this path", "NOT_FOUND"),
    405: ("this path does not answer to this method", "METHOD_NOT_ALLOWED"),
}
_RETRY = frozenset((429, 503, 504))
_CLOSING = frozenset(("BODY_TOO_LARGE", "DRAINING"))


class KserveError(msgspec.Struct):
    """An error."""

    error: Annotated[str, Meta(description="What went wrong.")]
    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    request_id: Annotated[str, Meta(description="Id of the request, as in the log.")]
    retryable: Annotated[bool, Meta(description="Whether the same request may succeed later.")]


def render(error: PenstockError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error on `path`."""
    status = _STATUSES.get(error.code, error.status)
    if path.rstrip("/").endswith("/ready") and status == HTTPStatus.NOT_FOUND:
        status = 400
    headers: dict[str, str] = {}
    if status in _RETRY and (error.retryable or error.retry_after_s):
        headers["Retry-After"] = error.retry_after()
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    if isinstance(error, UnsupportedEncoding):
        headers["Accept-Encoding"] = ", ".join(OFFERED)
    return status, _body(text_of(error), error.code, error.retryable, error.detail), headers


def text_of(error: PenstockError) -> str:
    """The message in the words of this protocol."""
    if isinstance(error, QueueFull):
        return f"Exceeds maximum queue size: {error.message}"
    if not isinstance(error, UnavailableModel):
        return error.message
    name = error.model[:200]
    if error.reason == "model":
        return f"Request for unknown model: '{name}' is not found" + (f"; {error.why}" if error.why else "")
    if error.reason == "version":
        return f"Request for unknown model: '{name}' version {error.version} is not found"
    why = f" ({error.reason}{': ' + error.why if error.why else ''})"
    return f"Request for unknown model: '{name}' has no available versions{why}"


def render_http(error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework."""
    text, code = _HTTP.get(error.status_code, (error.description or error.title or "", "INVALID_INPUT"))
    return error.status_code, _body(text, code, False, {}), {}


def _body(text: str, code: str, retryable: bool, detail: dict[str, Any]) -> dict[str, Any]:
    return {**detail, **msgspec.to_builtins(KserveError(text, code, logs.request_id.get(), retryable))}
