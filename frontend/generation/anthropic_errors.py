"""Errors in the form of Anthropic, `{"type": "error", "error": {"type", "message"}}`.

1. A wrong meaning is 400, where the other protocols of generated text answer 422. `details` are for SDKs.
2. An error inside a stream says whose fault it was, and nothing finer.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

import falcon
import msgspec
from msgspec import Meta

from frontend.generation.errors import headers_of, http_text, text_of
from ipc.errors import PenstockError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_INVALID, _FAILED = "invalid_request_error", "api_error"


class MessagesErrorInfo(msgspec.Struct):
    """What went wrong."""

    type: Annotated[str, Meta(description="Class of the error.")]
    message: Annotated[str, Meta(description="What is said.")]
    details: Annotated[
        dict[str, Any] | msgspec.UnsetType, Meta(description="What an SDK does about a refused `thread`.")
    ] = msgspec.UNSET


class MessagesError(msgspec.Struct):
    """An error in the form of Anthropic."""

    type: Annotated[Literal["error"], Meta(description="Names the form of this object.")]
    error: Annotated[MessagesErrorInfo, Meta(description="What went wrong.")]


def status_of(error: PenstockError) -> int:
    """HTTP status of an error."""
    return 400 if error.status == HTTPStatus.UNPROCESSABLE_ENTITY else error.status


def render(error: PenstockError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error."""
    status = status_of(error)
    body = _body(_kind(status), text_of(error))
    if "details" in error.detail:
        body["error"]["details"] = error.detail["details"]
    return status, body, headers_of(error, status)


def render_http(error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework, such as an unknown path."""
    return error.status_code, _body(_kind(error.status_code), http_text(error)), {}


def stream_error(error: PenstockError) -> dict[str, Any]:
    """The object of an error inside a stream, whose status has been sent."""
    return _body(_blame(status_of(error)), error.message)


def _kind(status: int) -> str:
    return _KINDS.get(status) or _blame(status)


def _blame(status: int) -> str:
    return _INVALID if status < HTTPStatus.INTERNAL_SERVER_ERROR else _FAILED


def _body(kind: str, text: str) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(MessagesError("error", MessagesErrorInfo(kind, text)))
    return body
