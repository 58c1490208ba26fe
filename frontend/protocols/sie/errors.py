"""The SIE form of errors: `{"detail": {"code", "message", ...}}`, and the OpenAI form on the embeddings route.

Where the contract has fewer codes than Penstock, a code is mapped to the nearest one that clients act on rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import falcon
import msgspec
from msgspec import Meta

from frontend.engine.boxes import BUNDLE
from frontend.scope import Choice
from ipc.errors import DependencyConflict, GpuNotConfigured, PenstockError, Provisioning

_TABLE: dict[str, tuple[int, str]] = {
    "UNAUTHENTICATED": (401, "UNAUTHORIZED"),
    "RATE_LIMITED": (429, "RATE_LIMIT"),
    "INPUT_TOO_LONG": (400, "INPUT_TOO_LONG"),
    "BODY_TOO_LARGE": (413, "INPUT_TOO_LONG"),
    "MODEL_LOADING": (503, "MODEL_NOT_LOADED"),
    "NO_REPLICA": (503, "MODEL_NOT_LOADED"),
    "WORKER_LOST": (503, "MODEL_NOT_LOADED"),
    "DRAINING": (503, "QUEUE_FULL"),
    "SHM_EXHAUSTED": (503, "RESOURCE_EXHAUSTED"),
    "LEASE_REVOKED": (503, "RESOURCE_EXHAUSTED"),
    "RESOURCE_EXHAUSTED": (503, "RESOURCE_EXHAUSTED"),
    "UNSUPPORTED": (501, "UNSUPPORTED"),
}
_HEADER_CODES = {
    "MODEL_LOADING": "MODEL_LOADING",
    "NO_REPLICA": "MODEL_LOADING",
    "WORKER_LOST": "MODEL_LOADING",
}
_DEFAULT_RETRY_S = {
    "RESOURCE_EXHAUSTED": 5.0,
    "QUEUE_FULL": 1.0,
    "MODEL_NOT_LOADED": 5.0,
    "MODEL_LOADING": 5.0,
}
_OPENAI = {
    "UNAUTHORIZED": ("invalid_api_key", "invalid_request_error"),
    "FORBIDDEN": ("insufficient_permissions", "invalid_request_error"),
    "RATE_LIMIT": ("rate_limit_exceeded", "requests"),
    "MODEL_NOT_FOUND": ("model_not_found", "invalid_request_error"),
    "INVALID_INPUT": ("invalid_input", "invalid_request_error"),
    "INPUT_TOO_LONG": ("invalid_input", "invalid_request_error"),
    "MODEL_NOT_LOADED": ("model_not_available", "server_error"),
    "MODEL_LOADING": ("model_not_available", "server_error"),
    "MODEL_LOAD_FAILED": ("model_not_available", "server_error"),
    "LORA_LOADING": ("model_not_available", "server_error"),
    "QUEUE_FULL": ("server_overloaded", "server_error"),
    "RESOURCE_EXHAUSTED": ("server_overloaded", "server_error"),
    "PROVISIONING": ("server_overloaded", "server_error"),
    "QUEUE_UNAVAILABLE": ("server_overloaded", "server_error"),
    "INFERENCE_ERROR": ("inference_error", "server_error"),
}
Render = Callable[[PenstockError, bool], tuple[int, dict[str, Any], dict[str, str]]]
"""(status, body, headers) of an error; the flag says that a client library of SIE asks."""


class ErrorDetail(msgspec.Struct):
    """Stable code and text of an error; some codes add fields."""

    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]


class ErrorResponse(msgspec.Struct):
    """An error; on unknown paths and wrong methods `detail` is a text."""

    detail: Annotated[ErrorDetail | str, Meta(description="What went wrong.")]
    message: Annotated[
        str | msgspec.UnsetType, Meta(description="Of a gateway: the text of the error once more.")
    ] = msgspec.UNSET
    status: Annotated[
        Literal["provisioning", "gpu_not_configured"] | msgspec.UnsetType,
        Meta(description="Of a gateway: no box is there yet, or none of that profile will ever be."),
    ] = msgspec.UNSET
    gpu: Annotated[
        str | msgspec.UnsetType, Meta(description="Of a gateway: the machine profile that was asked for.")
    ] = msgspec.UNSET
    bundle: Annotated[
        str | msgspec.UnsetType, Meta(description="Of a gateway: the bundle that the model needs.")
    ] = msgspec.UNSET
    estimated_wait_s: Annotated[
        int | msgspec.UnsetType, Meta(description="Of a gateway: seconds until a box may be there.")
    ] = msgspec.UNSET
    configured_gpu_types: Annotated[
        list[str] | msgspec.UnsetType, Meta(description="Of a gateway: the machine profiles that there are.")
    ] = msgspec.UNSET
    compatible_bundles: Annotated[
        list[str] | msgspec.UnsetType, Meta(description="Of a gateway: bundles that have the model.")
    ] = msgspec.UNSET


class OpenAIFault(msgspec.Struct):
    """The error as OpenAI's clients read it."""

    message: Annotated[str, Meta(description="What is said.")]
    type: Annotated[str, Meta(description="Class of the error.")]
    param: Annotated[str | None, Meta(description="The field that is wrong.")]
    code: Annotated[str, Meta(description="Kind of the error, for programs.")]


class ModelErrorResponse(ErrorResponse, kw_only=True):
    """An error of the route of one model, with its message once more."""

    message: Annotated[str, Meta(description="What is said.")]


class OpenAIErrorResponse(msgspec.Struct):
    """An error in both forms."""

    error: Annotated[OpenAIFault, Meta(description="What went wrong.")]
    detail: Annotated[ErrorDetail, Meta(description="What went wrong.")]
    message: Annotated[str, Meta(description="What is said.")]


def contract_code(error: PenstockError, own_client: bool = False) -> tuple[int, str]:
    """(HTTP status, code in the body) of an error.

    Clients of SIE's own give up on MODEL_NOT_LOADED in a body and wait on MODEL_LOADING, the code that the header has.
    """
    status, code = _TABLE.get(error.code, (error.status, error.code))
    return status, _HEADER_CODES.get(error.code, code) if own_client else code


def _headers(error: PenstockError, status: int, code: str) -> dict[str, str]:
    headers = {"X-SIE-Error-Code": _HEADER_CODES.get(error.code, code)}
    if status in (429, 503, 504):
        headers["Retry-After"] = error.retry_after(_DEFAULT_RETRY_S.get(code, 1.0))
    if error.code in ("BODY_TOO_LARGE", "DRAINING"):
        headers["Connection"] = "close"
    return headers


def render(error: PenstockError, own_client: bool = False) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) in the SIE form."""
    status, code = contract_code(error, own_client)
    body: dict[str, Any] = msgspec.to_builtins(ErrorResponse(ErrorDetail(code, error.message)))
    body["detail"].update(error.detail)
    if error.code == "DRAINING":
        body = {"error": "Service shutting down", "detail": {**body["detail"], "reason": "draining"}}
    return status, body, _headers(error, status, code)


def of_gateway(error: PenstockError, choice: Choice) -> dict[str, Any]:
    """The fields beside `detail` by which clients of a gateway know what is missing, for a request with this choice."""
    beside: dict[str, Any] = {"message": error.message}
    if isinstance(error, Provisioning):
        wait_s = int(error.retry_after_s or 0)
        beside |= {"status": "provisioning", "gpu": choice.profile, "bundle": choice.bundle or BUNDLE}
        beside |= {"estimated_wait_s": wait_s}
    elif isinstance(error, GpuNotConfigured):
        beside |= {"status": "gpu_not_configured", **error.detail}
    elif isinstance(error, DependencyConflict) and "compatible_bundles" in error.detail:
        beside["compatible_bundles"] = error.detail["compatible_bundles"]
    return beside


def render_model(
    error: PenstockError, own_client: bool = False
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) on the route of one model: the SIE form, with the message for clients of OpenAI."""
    status, body, headers = render(error, own_client)
    answer = ModelErrorResponse(body.pop("detail"), message=error.message)
    return status, {**body, **msgspec.to_builtins(answer)}, headers


def render_http(error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework, such as an unknown path."""
    detail = {404: "Not Found", 405: "Method Not Allowed"}.get(error.status_code)
    if detail is None:
        title = error.title or falcon.code_to_http_status(error.status)[4:]
        code = "INVALID_INPUT"
        answer = ErrorResponse(ErrorDetail(code, error.description or title))
        return error.status_code, msgspec.to_builtins(answer), {"X-SIE-Error-Code": code}
    return error.status_code, msgspec.to_builtins(ErrorResponse(detail)), {}


def _group_of(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def render_openai(
    error: PenstockError, own_client: bool = False
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) with both the OpenAI keys and the SIE ones."""
    status, code = contract_code(error, own_client)
    kind, group = _OPENAI.get(code, (code.lower(), _group_of(status)))
    fault = OpenAIFault(error.message, group, None, kind)
    answer = OpenAIErrorResponse(fault, ErrorDetail(code, error.message), error.message)
    body: dict[str, Any] = msgspec.to_builtins(answer)
    body["detail"].update({"error": body["error"], **error.detail})
    return status, body, _headers(error, status, code)
