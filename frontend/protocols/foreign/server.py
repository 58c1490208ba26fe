"""The base of the protocols of other servers: their tables of routes, and their forms of an error.

vLLM and infinity have one form: `{"error": {"message", "type", "param", "code"}}`, whose code is the status.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import falcon
import msgspec
from falcon.asgi import Request
from msgspec import Meta

from frontend.generation.errors import headers_of, http_text
from frontend.route_rows import Route
from frontend.services import Services
from ipc.errors import PenstockError, ResourceExhausted

Rendered = tuple[int, dict[str, Any], dict[str, str]]
"""(status, JSON body, headers) of an error."""


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of errors of one server: the status of an error, and the body for a status and a message."""

    status_of: Callable[[PenstockError], int]
    body: Callable[[int, str], dict[str, Any]]

    def render(self, error: PenstockError) -> Rendered:
        """An error of a request."""
        status = self.status_of(error)
        return status, self.body(status, error.message), headers_of(error, status)

    def render_http(self, error: falcon.HTTPError) -> Rendered:
        """An error of the framework, such as a wrong method."""
        return error.status_code, self.body(error.status_code, http_text(error)), {}


class ServerProtocol:
    """The table of routes of one server, and its form of errors."""

    def __init__(
        self, name: str, routes: Sequence[Route], errors: ErrorForm, folders: Sequence[str] = ()
    ) -> None:
        self.name, self.routes, self.folders = name, routes, folders
        self._errors = errors
        self._exhausted_retry_s: float | None = None

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        self._exhausted_retry_s = services.settings.limits.exhausted_retry_s
        return services

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """(status, JSON body, headers) of an error."""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            error.retry_after_s = self._exhausted_retry_s
        return self._errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """(status, JSON body, headers) of an error of the framework."""
        return self._errors.render_http(error)


_BARE_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "BadRequestError",
    429: "RateLimitError",
}
_BARE_STATUSES = {"RESOURCE_EXHAUSTED": 503}
"""Statuses that differ from Penstock's own: memory of the device is free again later."""


class BareFault(msgspec.Struct):
    """What went wrong."""

    message: Annotated[str, Meta(description="The reason, with field, value and limit.")]
    type: Annotated[str, Meta(description="Kind of the error, by its status.")]
    param: Annotated[str | None, Meta(description="Always null.")]
    code: Annotated[int, Meta(description="The HTTP status.")]


class BareError(msgspec.Struct):
    """An error in the form of vLLM and infinity."""

    error: Annotated[BareFault, Meta(description="What went wrong.")]


BARE_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 409, 413, 429, 500, 501, 502, 503, 504), BareError
)
"""Statuses of the routes with these errors, for the API's description."""


def _bare_status(error: PenstockError) -> int:
    status = _BARE_STATUSES.get(error.code, error.status)
    # A value that is wrong and a value that is too long have one status here.
    return 400 if status == HTTPStatus.UNPROCESSABLE_ENTITY else status


def _bare_body(status: int, text: str) -> dict[str, Any]:
    other = "InternalServerError" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "BadRequestError"
    fault = BareFault(text, _BARE_KINDS.get(status, other), None, status)
    body: dict[str, Any] = msgspec.to_builtins(BareError(fault))
    return body


BARE_FORM = ErrorForm(_bare_status, _bare_body)
"""The form of errors of vLLM and infinity."""
