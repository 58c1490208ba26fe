"""Errors of vLLM and infinity: `{"error": {"message", "type", "param", "code"}}`, whose code is the status."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.protocols.foreign.server import ErrorForm
from ipc.errors import PenstockError

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "BadRequestError",
    429: "RateLimitError",
}
_STATUSES = {"RESOURCE_EXHAUSTED": 503}
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


FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 409, 413, 429, 500, 501, 502, 503, 504), BareError
)
"""Statuses of the routes with these errors, for the API's description."""


def _status_of(error: PenstockError) -> int:
    status = _STATUSES.get(error.code, error.status)
    # A value that is wrong and a value that is too long have one status here.
    return 400 if status == HTTPStatus.UNPROCESSABLE_ENTITY else status


def _body(status: int, text: str) -> dict[str, Any]:
    other = "InternalServerError" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "BadRequestError"
    return {"error": {"message": text, "type": _KINDS.get(status, other), "param": None, "code": status}}


FORM = ErrorForm(_status_of, _body)
"""The form of errors of vLLM and infinity."""
