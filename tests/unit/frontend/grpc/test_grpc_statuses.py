"""Every error of the tree as a gRPC status, as the table of error kinds says."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from frontend.grpc import rpc
from frontend.tensors.request import TimeoutExpired, UnavailableModel
from ipc import errors

EXPECTED = {
    "UNAUTHENTICATED": StatusCode.UNAUTHENTICATED,
    "FORBIDDEN": StatusCode.PERMISSION_DENIED,
    "INVALID_INPUT": StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": StatusCode.NOT_FOUND,
    "MODEL_LOAD_FAILED": StatusCode.NOT_FOUND,
    "MODEL_NOT_LOADED": StatusCode.NOT_FOUND,
    "MODEL_LOADING": StatusCode.UNAVAILABLE,
    "RATE_LIMITED": StatusCode.RESOURCE_EXHAUSTED,
    "QUEUE_FULL": StatusCode.UNAVAILABLE,
    "DRAINING": StatusCode.UNAVAILABLE,
    "NO_REPLICA": StatusCode.UNAVAILABLE,
    "PROVISIONING": StatusCode.UNAVAILABLE,
    "QUEUE_UNAVAILABLE": StatusCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": StatusCode.DEADLINE_EXCEEDED,
    "INPUT_TOO_LONG": StatusCode.INVALID_ARGUMENT,
    "RESOURCE_EXHAUSTED": StatusCode.FAILED_PRECONDITION,
    "SHM_EXHAUSTED": StatusCode.RESOURCE_EXHAUSTED,
    "WORKER_CRASHED": StatusCode.INTERNAL,
    "WORKER_LOST": StatusCode.UNAVAILABLE,
    "INFERENCE_ERROR": StatusCode.INTERNAL,
    "INTERNAL_ERROR": StatusCode.INTERNAL,
    "CANCELLED": StatusCode.CANCELLED,
    "BODY_TOO_LARGE": StatusCode.RESOURCE_EXHAUSTED,
    "TOO_SLOW": StatusCode.RESOURCE_EXHAUSTED,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
}


@pytest.mark.parametrize(("code", "status"), EXPECTED.items())
def test_an_error_has_the_status_of_the_table(code: str, status: StatusCode) -> None:
    assert rpc.status_of(errors.from_code(code, "x")) is status


def test_a_timeout_that_the_request_states_is_unavailable() -> None:
    assert rpc.status_of(TimeoutExpired("Request timeout expired")) is StatusCode.UNAVAILABLE


def test_a_model_that_cannot_be_asked_is_not_found() -> None:
    assert rpc.status_of(UnavailableModel("m", 1, "unloaded")) is StatusCode.NOT_FOUND


def test_trailers_say_whether_and_when_to_try_again() -> None:
    full = dict(rpc.trailers(errors.QueueFull("full", retry_after_s=2.2)))
    assert full == {"penstock-code": "QUEUE_FULL", "penstock-retryable": "true", "retry-after": "3"}
    wrong = dict(rpc.trailers(errors.InvalidInput("wrong")))
    assert wrong == {"penstock-code": "INVALID_INPUT", "penstock-retryable": "false"}


def test_a_long_message_is_cut_to_what_peers_accept_in_a_header() -> None:
    assert len(rpc.shortened("x" * 100_000)) == 1024
    assert rpc.shortened("short") == "short"
