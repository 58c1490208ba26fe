"""Every error of the tree has a code of TRTIS v1, and a message that begins as its clients know it."""

from __future__ import annotations

import pytest

from frontend.protocols.trtis_v1.statuses import UnknownMode, code_of, http_status_of, message_of, retry_after
from frontend.tensors.request import UnavailableModel
from ipc import errors
from ipc.protos import trtis_v1_pb2 as pb

TABLE = [
    (errors.InvalidInput("x"), "INVALID_ARG", "x", 400),
    (UnknownMode("x"), "UNKNOWN", "x", 400),
    (errors.BodyTooLarge("x"), "INVALID_ARG", "x", 400),
    (UnavailableModel("m", 3, "version"), "UNAVAILABLE", "Inference request for unknown model 'm'", 400),
    (errors.ModelLoading("x"), "UNAVAILABLE", "Inference request for unknown model 'm'", 400),
    (errors.ModelLoadFailed("x"), "UNAVAILABLE", "Inference request for unknown model 'm'", 400),
    (errors.NoReplica("x"), "UNAVAILABLE", "Server not ready", 400),
    (errors.Draining("x"), "UNAVAILABLE", "Server exiting", 400),
    (errors.DeadlineExceeded("x"), "UNAVAILABLE", "request timeout", 400),
    (errors.QueueFull("x"), "UNAVAILABLE", "x", 400),
    (errors.ResourceExhausted("x"), "UNAVAILABLE", "x", 400),
    (errors.ShmExhausted("x"), "UNAVAILABLE", "x", 400),
    (errors.RegionExists("x"), "ALREADY_EXISTS", "x", 400),
    (errors.RegionNotFound("x"), "NOT_FOUND", "x", 400),
    (errors.ControlDisabled("x"), "UNSUPPORTED", "x", 400),
    (errors.Unsupported("x"), "UNSUPPORTED", "x", 400),
    (errors.InferenceFailed("x"), "INTERNAL", "x", 400),
    (errors.WorkerCrashed("x"), "INTERNAL", "x", 400),
    (errors.Unauthenticated("x"), "INVALID_ARG", "x", 401),
    (errors.Forbidden("x"), "INVALID_ARG", "x", 403),
]


@pytest.mark.parametrize(
    ("error", "code", "begins", "status"), TABLE, ids=[type(row[0]).__name__ for row in TABLE]
)
def test_code_message_and_status(error: errors.PenstockError, code: str, begins: str, status: int) -> None:
    assert pb.RequestStatusCode.Name(code_of(error)) == code
    assert message_of(error, "m").startswith(begins)
    assert http_status_of(error) == status


def test_a_failed_load_names_its_model_and_no_other() -> None:
    error = errors.ModelLoadFailed("failed to load 'x', the repository has no such model")
    assert message_of(error) == error.message


def test_what_passes_with_time_says_when_to_come_again() -> None:
    assert retry_after(errors.QueueFull("x", retry_after_s=2.2)) == {"Retry-After": "3"}
    assert retry_after(errors.InvalidInput("x")) == {}
    assert retry_after(errors.ResourceExhausted("x")) == {}
