"""Statuses of KServe v2 over HTTP, where its contract has words of its own."""

from __future__ import annotations

import pytest

from frontend.protocols.kserve_v2.errors import render
from frontend.tensors.request import TimeoutExpired
from ipc import errors

TABLE = [
    (errors.InputTooLong("x"), 400, None),
    (errors.ResourceExhausted("x"), 422, None),
    (errors.ShmExhausted("x"), 503, "1"),
    (errors.QueueFull("x", retry_after_s=2.5), 503, "3"),
    (TimeoutExpired("x", retry_after_s=1), 503, "1"),
    (errors.DeadlineExceeded("x", retry_after_s=1), 504, "1"),
]


@pytest.mark.parametrize(
    ("error", "status", "retry_after"), TABLE, ids=[type(row[0]).__name__ for row in TABLE]
)
def test_status_and_when_to_come_again(
    error: errors.PenstockError, status: int, retry_after: str | None
) -> None:
    found, body, headers = render(error, "/v2/models/m/infer")
    assert (found, headers.get("Retry-After")) == (status, retry_after)
    assert (body["code"], body["retryable"]) == (error.code, error.retryable)
