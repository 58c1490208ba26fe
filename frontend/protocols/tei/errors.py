"""Errors in the form of TEI: `{"error": message, "error_type": kind}`.

1. A value that is too long and a request that is wrong in another way are 422 Validation, as in TEI since 1.9.
2. A model that cannot do what was asked, or that failed, is 424 Backend. So is a request that leaves the model open.
3. A full server and a caller over its rate are 429 Overloaded, and a server without a worker 503 Unhealthy.
"""

from __future__ import annotations

from typing import Any

import falcon

from frontend.generation.errors import headers_of, http_text
from ipc.errors import PenstockError

_STATUSES = {
    "INVALID_INPUT": 422,
    "MODEL_NOT_FOUND": 424,
    "MODEL_LOAD_FAILED": 424,
    "DEPENDENCY_CONFLICT": 424,
    "INFERENCE_ERROR": 424,
    "UNEXPECTED_OUTPUT": 424,
    "QUEUE_FULL": 429,
    "RESOURCE_EXHAUSTED": 429,
    "SHM_EXHAUSTED": 429,
}
"""Statuses of this contract that differ from Penstock's own, by code."""
_KINDS = {429: "Overloaded", 503: "Unhealthy"}
_BACKEND = (424, 500, 501, 502, 504)


def render(error: PenstockError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error."""
    status = _STATUSES.get(error.code, error.status)
    return status, _body(status, error.message), headers_of(error, status)


def render_http(error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework, such as a wrong method."""
    return error.status_code, _body(error.status_code, http_text(error)), {}


def _body(status: int, text: str) -> dict[str, Any]:
    kind = "Backend" if status in _BACKEND else _KINDS.get(status, "Validation")
    return {"error": text, "error_type": kind}
