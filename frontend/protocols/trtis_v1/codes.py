"""Outcomes in the form of this contract: every error has one of its nine codes, and a message that begins as it says.

Over HTTP every failed request is a 400 but for keys (401, 403), a wrong verb (405) and faults below routing; the kind
of failure is in the code alone.
"""

from __future__ import annotations

import math

from frontend.tensors.refusals import UnavailableModel
from ipc.errors import InvalidInput, ModelError, PenstockError
from ipc.protos import trtis_v1_pb2 as pb

SUCCESS = pb.RequestStatusCode.SUCCESS
_CODES = {
    "INVALID_INPUT": pb.RequestStatusCode.INVALID_ARG,
    "INPUT_TOO_LONG": pb.RequestStatusCode.INVALID_ARG,
    "BODY_TOO_LARGE": pb.RequestStatusCode.INVALID_ARG,
    "TOO_SLOW": pb.RequestStatusCode.INVALID_ARG,
    "HEADERS_TOO_LARGE": pb.RequestStatusCode.INVALID_ARG,
    "SEQUENCE_UNKNOWN": pb.RequestStatusCode.INVALID_ARG,
    "UNAUTHENTICATED": pb.RequestStatusCode.INVALID_ARG,
    "FORBIDDEN": pb.RequestStatusCode.INVALID_ARG,
    "UNEXPECTED_OUTPUT": pb.RequestStatusCode.INVALID_ARG,
    "REGION_EXISTS": pb.RequestStatusCode.ALREADY_EXISTS,
    "REGION_NOT_FOUND": pb.RequestStatusCode.NOT_FOUND,
    "UNSUPPORTED": pb.RequestStatusCode.UNSUPPORTED,
    "CONTROL_DISABLED": pb.RequestStatusCode.UNSUPPORTED,
    "INTERNAL_ERROR": pb.RequestStatusCode.INTERNAL,
    "INFERENCE_ERROR": pb.RequestStatusCode.INTERNAL,
    "WORKER_CRASHED": pb.RequestStatusCode.INTERNAL,
}
_STATUSES = {
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "RATE_LIMITED": 429,
    "TOO_SLOW": 408,
    "HEADERS_TOO_LARGE": 431,
}
_UNAVAILABLE = pb.RequestStatusCode.UNAVAILABLE
_WHY = {
    "model": "no model has this name",
    "version": "it has no such version",
    "unloaded": "it was unloaded",
    "failed": "its load failed",
}


class UnknownMode(InvalidInput):
    """A health check other than live and ready; the one failure whose code is UNKNOWN."""


def code_of(error: PenstockError) -> pb.RequestStatusCode:
    """The code of an error; what passes with time or by loading is UNAVAILABLE."""
    if isinstance(error, UnknownMode):
        return pb.RequestStatusCode.UNKNOWN
    return _CODES.get(error.code, _UNAVAILABLE)


def http_status_of(error: PenstockError) -> int:
    """400, or what a refused key and a fault below routing are answered with."""
    return _STATUSES.get(error.code, 400)


def message_of(error: PenstockError, model: str = "") -> str:
    """Text of an error; that of a model which cannot be asked begins as clients know it."""
    if isinstance(error, UnavailableModel):
        why = _WHY[error.reason] + (f": {error.why}" if error.why else "")
        return f"Inference request for unknown model '{error.model[:200]}': {why}"
    if isinstance(error, ModelError) and error.code in (
        "MODEL_LOADING",
        "MODEL_NOT_LOADED",
        "MODEL_LOAD_FAILED",
    ):
        return f"Inference request for unknown model '{model[:200]}': {error.message}"
    if error.code == "UNEXPECTED_OUTPUT":
        return f"model '{model[:200]}': {error.message}"
    if error.code == "NO_REPLICA":
        return f"Server not ready: {error.message}"
    if error.code == "DRAINING":
        return f"Server exiting: {error.message}"
    if error.code == "DEADLINE_EXCEEDED":
        return f"request timeout: {error.message}"
    return error.message


def retry_after(error: PenstockError) -> dict[str, str]:
    """The header that says when to come again, for what passes with time."""
    if not error.retryable:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
