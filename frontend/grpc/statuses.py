"""Errors of `ipc.errors` as gRPC statuses; code, retryable and retry-after travel in the trailing metadata."""

from __future__ import annotations

from http import HTTPStatus

from grpc import StatusCode

from ipc.errors import PenstockError

_STATUS = {
    "CANCELLED": StatusCode.CANCELLED,
    "CONTROL_DISABLED": StatusCode.UNAVAILABLE,
    "BODY_TOO_LARGE": StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE_EXCEEDED": StatusCode.DEADLINE_EXCEEDED,
    "DEPENDENCY_CONFLICT": StatusCode.FAILED_PRECONDITION,
    "DRAINING": StatusCode.UNAVAILABLE,
    "FORBIDDEN": StatusCode.PERMISSION_DENIED,
    "INPUT_TOO_LONG": StatusCode.INVALID_ARGUMENT,
    "INVALID_INPUT": StatusCode.INVALID_ARGUMENT,
    "LEASE_REVOKED": StatusCode.UNAVAILABLE,
    "LORA_LOADING": StatusCode.UNAVAILABLE,
    "MODEL_LOADING": StatusCode.UNAVAILABLE,
    "MODEL_LOAD_FAILED": StatusCode.NOT_FOUND,
    "MODEL_NOT_FOUND": StatusCode.NOT_FOUND,
    "MODEL_NOT_LOADED": StatusCode.NOT_FOUND,
    "NO_REPLICA": StatusCode.UNAVAILABLE,
    "QUEUE_FULL": StatusCode.UNAVAILABLE,
    "RATE_LIMITED": StatusCode.RESOURCE_EXHAUSTED,
    "REGION_EXISTS": StatusCode.ALREADY_EXISTS,
    "REGION_NOT_FOUND": StatusCode.NOT_FOUND,
    "RESOURCE_EXHAUSTED": StatusCode.FAILED_PRECONDITION,
    "SEQUENCE_LOST": StatusCode.UNAVAILABLE,
    "SEQUENCE_UNKNOWN": StatusCode.INVALID_ARGUMENT,
    "SERVICE_NOT_FOUND": StatusCode.NOT_FOUND,
    "SHM_EXHAUSTED": StatusCode.RESOURCE_EXHAUSTED,
    "TOO_SLOW": StatusCode.RESOURCE_EXHAUSTED,
    "UNAUTHENTICATED": StatusCode.UNAUTHENTICATED,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
    "WORKER_LOST": StatusCode.UNAVAILABLE,
}
_MAX_MESSAGE_CHARACTERS = 1024
"""The message travels in a header, percent-encoded; peers accept 8 KiB of headers."""


def status_of(error: PenstockError) -> StatusCode:
    """The gRPC status of an error; INTERNAL for faults of the server."""
    status = _STATUS.get(error.code, StatusCode.INTERNAL)
    if status is StatusCode.DEADLINE_EXCEEDED and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        # A timeout that the request itself states, unlike the deadline of the rpc.
        return StatusCode.UNAVAILABLE
    return status


def shortened(message: str) -> str:
    """A message that fits into a header, in letters that UTF-8 has: gRPC refuses lone surrogates."""
    message = message.encode(errors="backslashreplace").decode()
    if len(message) <= _MAX_MESSAGE_CHARACTERS:
        return message
    return message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def trailers(error: PenstockError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: the stable code, whether to try again, and after how many seconds."""
    found = (
        ("penstock-code", error.code),
        ("penstock-retryable", str(error.retryable).lower()),
    )
    if not error.retryable:
        return found
    return (*found, ("retry-after", error.retry_after()))
