"""Paths: one decoding, one form, and no path that a proxy could read otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.app import create
from frontend.http.listeners import normalized
from ipc.errors import InvalidInput
from ipc.settings import load


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/v1/encode/org/name", "/v1/encode/org/name"),
        (b"/v1/encode/org%2Fname", "/v1/encode/org/name"),
        (b"/v1/%61dmin/unload/M", "/v1/admin/unload/M"),
        (b"/v1/%2561dmin/unload/M", "/v1/%61dmin/unload/M"),
        (b"//metrics", "/metrics"),
        (b"/%2fmetrics", "/metrics"),
        (b"%2f/metrics", "/metrics"),
        (b"/metric%73", "/metrics"),
        (b"/api/sharedmemorycontrol/register/n//key/0/4", "/api/sharedmemorycontrol/register/n//key/0/4"),
        (b"/v1/models/a..b/...", "/v1/models/a..b/..."),
        (b"/v1/models/%C3%A9%20x;v=1", "/v1/models/\u00e9 x;v=1"),
        (b"/", "/"),
        (b"", "/"),
        (b"*", "*"),
    ],
)
def test_a_path_is_decoded_once_and_begins_with_one_slash(raw: bytes, path: str) -> None:
    assert normalized(raw) == path


@pytest.mark.parametrize(
    "raw",
    [
        b"/x/../v1/admin/load/m",
        b"/v1/./admin/load/m",
        b"/x/%2e%2E/metrics",
        b"/x/..%2fmetrics",
        b"/..",
        b"/v2/repository/models/m/load/.",
        b"/v1\\admin\\load",
        b"/v1/admin%5Cload",
        b"/metrics%00",
        b"/v1/models/a%0Ab",
        b"/v1/models/a%7F",
        b"/v1/models/%",
        b"/v1/models/%4",
        b"/v1/models/%zz",
        b"/v1/models/%c0%ae",
        b"/v1/models/%ff",
        b"/v1/models/\xe9",
    ],
)
def test_a_path_with_two_readings_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^path: "):
        normalized(raw)


def answer(raw: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Status and body of the whole application, which is not started."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw.decode(),
        "raw_path": raw,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("10.0.0.1", 1),
        "server": ("10.0.0.2", 8080),
    }
    asyncio.run(create(load(None, {"catalog.models": ""}))(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize(
    "raw", [b"//v1/admin/load/m", b"/v1/%61dmin/load/m", b"/%76%32/logging", b"//v2/logging"]
)
def test_access_is_decided_for_the_path_that_is_routed(raw: bytes) -> None:
    status, body = answer(raw)
    assert status == 403 and b"own machine" in body


@pytest.mark.parametrize(
    ("raw", "form"),
    [
        (b"/v1/x/../admin/load/m", b'{"detail":{"code":"INVALID_INPUT"'),
        (b"/v2/x/../logging", b'"error":"path: '),
        (b"/api/x/../modelcontrol/load/m", b""),
    ],
)
def test_a_refused_path_is_answered_in_the_form_of_its_protocol(raw: bytes, form: bytes) -> None:
    status, body = answer(raw)
    assert status == 400 and form in body
