"""What the protocols of generated text, and of objects stored for clients, share beside their tables of routes.

1. `render_anthropic` has the form of Anthropic, `{"type": "error", "error": {"type", "message"}}`. A wrong meaning is
   400, where the other protocols of generated text answer 422. `details` are for SDKs. An error inside a stream
   (`stream_error`) says whose fault it was, and nothing finer.
2. `TextProtocol` renders errors in the form of OpenAI, or in that of Anthropic where a protocol or a request
   asks for it.
3. `stored` is the row of a route over stored objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

import falcon
import msgspec
from falcon.asgi import Request
from msgspec import Meta

from frontend.generation import errors
from frontend.generation.errors import ErrorAnswer, headers_of, http_text, text_of
from frontend.route_rows import Route
from frontend.services import Services
from ipc.errors import PenstockError

Rendered = tuple[int, dict[str, Any], dict[str, str]]
"""(status, JSON body, headers) of an error."""
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


def render_anthropic(error: PenstockError) -> Rendered:
    """(status, body, headers) of an error."""
    status = status_of(error)
    body = _body(_kind(status), text_of(error))
    if "details" in error.detail:
        body["error"]["details"] = error.detail["details"]
    return status, body, headers_of(error, status)


def render_anthropic_http(error: falcon.HTTPError) -> Rendered:
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


BOTH_FORMS: tuple[type[msgspec.Struct], ...] = (ErrorAnswer, MessagesError)
"""Bodies of errors where a header of Anthropic switches the form."""


class TextProtocol:
    """The table of routes of one contract. Resources are made from the services of the frontend."""

    def __init__(self, name: str, routes: Sequence[Route], folders: Sequence[str] = ()) -> None:
        self.name, self.routes, self.folders = name, routes, folders

    def context(self, services: Services) -> Any:
        """What resources are made from."""
        return services

    def is_anthropic(self, req: Request | None) -> bool:
        """Whether the error of a request has the form of Anthropic; None: the server refuses the request itself."""
        return False

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """The form of an error on `path`."""
        return render_anthropic(error) if self.is_anthropic(req) else errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """The form of an error of the framework."""
        return render_anthropic_http(error) if self.is_anthropic(None) else errors.render_http(error)


def stored(
    method: Literal["get", "post", "delete"],
    path: str,
    resource: Any,
    summary: str,
    answer: Any,
    *,
    tag: str,
    statuses: tuple[int, ...] = (),
    faults: tuple[type[msgspec.Struct], ...] = (ErrorAnswer,),
    **more: Any,
) -> Route:
    """The row of a route over objects that are kept for clients; `statuses` are further errors."""
    known = (400, 401, 403, 404, 422, 429, 503, *statuses)
    return Route(
        method,
        path,
        resource,
        summary,
        tag,
        answer=answer,
        errors=dict.fromkeys(known, faults if len(faults) > 1 else faults[0]),
        error_code_header=False,
        **more,
    )
