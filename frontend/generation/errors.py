"""Errors of requests for generated text, and their form for clients of the OpenAI protocols.

    InvalidInput (ipc.errors)
    +-- MalformedBody          400   the body is not JSON
    +-- WrongContentType       415   the head does not say that the body is JSON
    +-- InvalidField           422   a field has a wrong type or meaning, or asks for what this server does not offer

1. Parsing raises these; workers send `InvalidInput` for what only they can know, such as a grammar with a mistake.
   `param` in the detail of a worker's error is the field.
2. `render` gives status, body and headers of an answer; `stream_error` gives the event that ends a stream.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import falcon
import msgspec
from msgspec import Meta

from frontend.route_rows import Route, asking
from ipc.errors import BodyTooLarge, InvalidInput, PenstockError

_CODES = {
    "UNAUTHENTICATED": "invalid_api_key",
    "FORBIDDEN": "insufficient_permissions",
    "RATE_LIMITED": "rate_limit_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "FILE_NOT_FOUND": "file_not_found",
    "MODEL_LOAD_FAILED": "model_not_available",
    "MODEL_NOT_LOADED": "model_not_available",
    "MODEL_LOADING": "model_loading",
    "LORA_LOADING": "model_loading",
    "LORA_BUSY": "lora_busy",
    "LORA_RUNTIME_UNAVAILABLE": "lora_runtime_unavailable",
    "DEPENDENCY_CONFLICT": "model_not_available",
    "INPUT_TOO_LONG": "context_length_exceeded",
    "BODY_TOO_LARGE": "request_too_large",
    "QUEUE_FULL": "server_overloaded",
    "NO_REPLICA": "server_overloaded",
    "PROVISIONING": "server_overloaded",
    "QUEUE_UNAVAILABLE": "server_overloaded",
    "DRAINING": "server_overloaded",
    "DEADLINE_EXCEEDED": "timeout",
}
_RETRY = frozenset((429, 503, 504))
_CLOSING = frozenset(("BODY_TOO_LARGE", "DRAINING"))
_HTTP = {
    404: "there is nothing at this path",
    405: "this path does not answer to this method",
}


class MalformedBody(InvalidInput):
    """The body of a request is not JSON."""


class WrongContentType(InvalidInput):
    """The head of a request names another content type than JSON, or none."""

    status = 415


class InvalidField(InvalidInput):
    """A field of a request is refused. `field` is its path, as in `messages[0].content`."""

    status = 422

    def __init__(self, field: str, text: str, **detail: Any) -> None:
        super().__init__(f"{field}: {text}", **detail)
        self.field = field


class ErrorInfo(msgspec.Struct):
    """An error in the form of OpenAI; `param` names the field."""

    message: Annotated[str, Meta(description="What is said.")]
    type: Annotated[str, Meta(description="Class of the error.")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str | None, Meta(description="Kind of the error, for programs.")]


class ErrorAnswer(msgspec.Struct):
    """The body of an error; `partial_response` is the answer so far of a model that failed."""

    message: Annotated[str, Meta(description="What is said.")]
    error: Annotated[ErrorInfo, Meta(description="What went wrong.")]
    partial_response: Annotated[
        dict[str, Any] | msgspec.UnsetType, Meta(description="The answer so far of a model that failed.")
    ] = msgspec.UNSET


def shown(value: object) -> str:
    """The beginning of a value as text for messages."""
    return str(value)[:64]


def status_of(error: PenstockError) -> int:
    """HTTP status of an error: wrong meaning is 422, a body that is no JSON is 400."""
    if error.status == HTTPStatus.BAD_REQUEST and not isinstance(error, MalformedBody):
        return 422
    return error.status


def error_info(error: PenstockError) -> ErrorInfo:
    """What the body of an answer says of an error."""
    param = error.field if isinstance(error, InvalidField) else error.detail.get("param")
    return ErrorInfo(text_of(error), _kind(status_of(error)), param, _CODES.get(error.code))


def render(error: PenstockError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error; its detail may have the answer so far as `partial_response`."""
    status, info = status_of(error), error_info(error)
    answer = ErrorAnswer(info.message, info, error.detail.get("partial_response", msgspec.UNSET))
    return status, msgspec.to_builtins(answer), headers_of(error, status)


def headers_of(error: PenstockError, status: int) -> dict[str, str]:
    """Headers of the answer with an error: when to come back, and whether the connection ends."""
    headers: dict[str, str] = {}
    if status in _RETRY and (error.retryable or error.retry_after_s):
        headers["Retry-After"] = error.retry_after()
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    return headers


def text_of(error: PenstockError) -> str:
    """What clients are told about an error."""
    return "request body too large" if isinstance(error, BodyTooLarge) else error.message


def render_http(error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework, such as an unknown path."""
    status, text = error.status_code, http_text(error)
    answer = ErrorAnswer(text, ErrorInfo(text, _kind(status), None, None))
    return status, msgspec.to_builtins(answer), {}


def http_text(error: falcon.HTTPError) -> str:
    """What clients are told about an error of the framework."""
    return _HTTP.get(error.status_code) or error.description or error.title or ""


def stream_error(error: PenstockError) -> dict[str, Any]:
    """The object of an error inside a stream, whose status has been sent."""
    return {"error": msgspec.to_builtins(ErrorInfo(error.message, "server_error", None, None))}


def _kind(status: int) -> str:
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


FAULTS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504)


def generating(
    path: str,
    resource: Any,
    summary: str,
    tag: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    example: dict[str, Any],
    **more: Any,
) -> Route:
    """The row of a route that generates text in the form of OpenAI, whole or as a stream of events."""
    return asking(
        path,
        resource,
        summary,
        body,
        answer,
        example,
        tag=tag,
        errors=dict.fromkeys(FAULTS, ErrorAnswer),
        error_code_header=False,
        streams=True,
        **more,
    )
