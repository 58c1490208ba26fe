"""What is refused by its head: in which order, with which headers, counted, and without noise in the log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.conformance.conftest import Keyed
from tests.harness.keys import bearer
from tests.harness.raw import RawClient
from tests.harness.server import Answer, Server, wait_until

MODEL = "fake/echo"
BODY = json.dumps({"items": [{"text": "a"}]}).encode()
BY_PATH = {"encode": MODEL, "score": MODEL, "extract": MODEL, "embeddings": "", "rerank": ""}


@dataclass(frozen=True)
class Guarded:
    """A server that wants keys, and the keys."""

    server: Server
    keys: Mapping[str, str]

    def ask(self, path: str, key: str = "", **headers: str) -> Answer:
        """One POST, with the key of that name."""
        sent = {"Content-Type": "application/json", "Accept": "application/json"}
        sent |= bearer(self.keys[key]) if key else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.server.request("POST", path, BODY, sent)

    def errors(self, operation: str, model: str) -> float:
        """How many requests were counted as errors."""
        labels = {"endpoint": operation, "status": "error", "model": model or "unknown"}
        return self.server.metric("sie_requests_total", **labels)


@pytest.fixture
def guarded(either_keyed: Keyed) -> Guarded:
    """The server that the tests of keys share, or a gateway whose only box is this server."""
    return Guarded(either_keyed.server, either_keyed.keys)


def test_the_start_up_block_says_how_many_keys_there_are(guarded: Guarded) -> None:
    wait_until(lambda: f"{len(guarded.keys)} API keys" in guarded.server.log, what="the start-up block")


def path_of(operation: str) -> str:
    """Path of an operation."""
    return f"/v1/{operation}/{BY_PATH[operation]}".rstrip("/")


@pytest.mark.parametrize("operation", BY_PATH)
def test_refused_keys_and_bad_deadlines_are_counted_under_operation_and_model(
    guarded: Guarded, operation: str
) -> None:
    path, model = path_of(operation), BY_PATH[operation]
    before = guarded.errors(operation, model)
    assert guarded.ask(path).status == 401
    assert guarded.ask(path, "admin").status == 403
    assert guarded.ask(path, "infer", X_Request_Timeout="soon").status == 400
    assert guarded.errors(operation, model) == before + 3


def test_a_rate_that_is_used_up_is_counted(guarded: Guarded) -> None:
    before = guarded.errors("encode", MODEL)
    assert guarded.ask(path_of("encode"), "slow-early").status == 200
    assert guarded.ask(path_of("encode"), "slow-early").status == 429
    assert guarded.errors("encode", MODEL) == before + 1


def test_what_is_no_inference_is_not_counted(guarded: Guarded) -> None:
    total = guarded.server.metric("sie_requests_total")
    for path in ("/v1/models", "/v1/encodings", "/v1/admin/load/fake/echo", "/v2/nothing"):
        assert guarded.ask(path).status == 401
    assert guarded.server.metric("sie_requests_total") == total


def test_a_bad_deadline_is_refused_after_the_key(guarded: Guarded) -> None:
    answer = guarded.ask(path_of("encode"), X_Request_Timeout="soon")
    assert (answer.status, answer.json()["detail"]["code"]) == (401, "UNAUTHORIZED")
    answer = guarded.ask(path_of("encode"), "infer", X_Request_Timeout="soon")
    assert (answer.status, answer.headers["x-sie-error-code"]) == (400, "INVALID_INPUT")
    assert "X-Request-Timeout" in answer.json()["detail"]["message"]


def handshake(server: Server, path: str, *fields: str) -> bytes:
    """The head of the answer to a WebSocket handshake."""
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        *fields,
    ]
    with RawClient(server.port) as client:
        client.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        received = b""
        while b"\r\n\r\n" not in received and (more := client.socket.recv(4096)):
            received += more
    return received


def test_refused_handshakes_leave_no_error_in_the_log(guarded: Guarded) -> None:
    server, mark = guarded.server, len(guarded.server.log)
    key = f"Authorization: Bearer {guarded.keys['infer']}"
    for fields, path, status in (
        ((), "/ws/status", 401),
        ((key, "Origin: http://evil.example"), "/ws/status", 403),
        ((key,), "/ws/nothing", 404),
        ((key,), "/healthz", 405),
    ):
        head = handshake(server, path, *fields)
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), head[:200]
        assert b"x-request-id: " in head and b"x-trace-id: " in head and b"x-sie-server-version: " in head
    written = server.log[mark:]
    assert not re.search(r"ERROR|Traceback|CRITICAL", written), written


def test_the_answer_that_asks_for_an_upgrade_has_the_common_headers(guarded: Guarded) -> None:
    answer = guarded.server.request("GET", "/ws/status", headers=bearer(guarded.keys["infer"]))
    assert (answer.status, answer.headers["upgrade"]) == (426, "websocket")
    assert answer.headers["x-sie-error-code"] == answer.json()["detail"]["code"] == "INVALID_INPUT"
    assert {"x-request-id", "x-trace-id", "x-sie-server-version"} <= set(answer.headers)


BAD_MESSAGES = {
    "a length that is no number": (b"Host: t\r\nContent-Length: ten\r\n\r\n", 400),
    "two ways to tell the length": (
        b"Host: t\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    "a chunk of no size": (b"Host: t\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    "no host": (b"\r\n", 400),
    "a head too large": (b"Host: t\r\nX: " + b"y" * (1 << 17) + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("message", BAD_MESSAGES)
@pytest.mark.parametrize(
    "path", ["/v2/models/add/infer", "/api/infer/add", "/v1/encode/add", "/v1/config/reload"]
)
def test_what_is_refused_below_http_has_the_form_of_its_protocol(
    guarded: Guarded, path: str, message: str
) -> None:
    rest, expected = BAD_MESSAGES[message]
    with RawClient(guarded.server.port) as client:
        client.socket.sendall(b"POST " + path.encode() + b" HTTP/1.1\r\n" + rest)
        status, headers, body = client.answer()
    assert (status, headers["connection"]) == (expected, "close")
    assert headers["x-request-id"].startswith("req_") and headers["x-sie-server-version"]
    if path.startswith("/api/"):
        assert body == b"" and "code: INVALID_ARG" in headers["nv-status"]
        return
    said = json.loads(body)
    if path.startswith(("/v2/", "/v1/config")):
        code = "HEADERS_TOO_LARGE" if status == 431 else "INVALID_INPUT"
        assert (said["code"], said["request_id"]) == (code, headers["x-request-id"])
        assert said["error"] and said["retryable"] is False
    else:
        assert said["detail"]["message"] and said["detail"]["code"] == headers["x-sie-error-code"]


def test_a_broken_message_behind_a_good_one_has_the_form_of_its_own_path(guarded: Guarded) -> None:
    with RawClient(guarded.server.port) as client:
        client.socket.sendall(
            b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\nPOST /v2/models/m/infer HTTP/1.1\r\nContent-Length: x\r\n\r\n"
        )
        assert client.answer()[0] == 200
        status, said = client.json()
    assert status == 400 and said["error"].startswith("Malformed request")
