"""API keys on the wire: every route and every form of error, hostile heads, and no key in anything that is written."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.conftest import Keyed
from tests.conformance.hostile import exchange
from tests.harness.cluster import is_gateway
from tests.harness.keys import SLOW_KEYS, STRANGER, bearer
from tests.harness.server import PATIENCE_S, Answer, Server

TEXT = {"items": [{"text": "a"}]}


@dataclass(frozen=True)
class Route:
    """One route, and what it answers to a key with the right scope."""

    method: str
    path: str
    body: Any = None
    openai: bool = False
    foreign: str = ""
    admin: bool = False
    good: tuple[int, ...] = (200,)

    def ask(self, server: Server, headers: Mapping[str, str]) -> Answer:
        """One request."""
        body = None if self.body is None else json.dumps(self.body).encode()
        sent = {"Content-Type": "application/json", "Accept": "application/json", **headers}
        return server.request(self.method, self.path, body, sent)


ROUTES = (
    Route("POST", "/v1/encode/fake/echo", TEXT),
    Route("POST", "/v1/score/fake/echo", {"query": {"text": "a"}, **TEXT}, good=(200, 400)),
    Route("POST", "/v1/extract/fake/echo", TEXT, good=(200, 400)),
    Route("GET", "/v1/models"),
    Route("GET", "/v1/models/fake/echo"),
    Route("GET", "/nowhere", good=(404,)),
    Route("GET", "/ws/status", good=(426,)),
    Route("POST", "/v1/embeddings", {"model": "fake/echo", "input": "a"}, openai=True),
    Route(
        "POST",
        "/v1/rerank",
        {"model": "fake/echo", "query": "a", "documents": ["a"]},
        openai=True,
        good=(200, 400, 404),
    ),
    Route("POST", "/", {"inputs": "a"}, foreign="tei", good=(200, 424)),
    Route("POST", "/embed", {"inputs": "a"}, foreign="tei", good=(200, 424)),
    Route("POST", "/pooling", {"model": "fake/echo", "input": "a"}, foreign="bare"),
    Route("GET", "/models", foreign="bare"),
    Route(
        "POST", "/v2/embed", {"model": "fake/echo", "texts": ["a"], "input_type": "image"}, foreign="cohere"
    ),
    Route("POST", "/v1/admin/load/fake/echo", {}, admin=True, good=(200, 202, 404)),
    Route("POST", "//v1/admin/load/fake/echo", {}, admin=True, good=(200, 202, 404)),
)
assert len(ROUTES) <= SLOW_KEYS
OPEN = ("/", "/healthz", "/livez", "/readyz", "/ping", "/health", "/metrics")
OPENAI = {
    401: ("invalid_api_key", "invalid_request_error"),
    403: ("insufficient_permissions", "invalid_request_error"),
    429: ("rate_limit_exceeded", "requests"),
}
CODES = {401: "UNAUTHORIZED", 403: "FORBIDDEN", 429: "RATE_LIMIT"}
KINDS = {401: "AuthenticationError", 403: "PermissionDeniedError", 429: "RateLimitError"}
"""Types of errors of vLLM and infinity."""


@pytest.fixture
def guarded(either_keyed: Keyed) -> Keyed:
    """The server that the tests of keys share, or a gateway whose only box is this server."""
    return either_keyed


def assert_refused(answer: Answer, route: Route, status: int, of_gateway: bool) -> None:
    """The error of a refusal in the form of the route, with the headers that every answer has.

    SIE's form has the message once more beside `detail` at a gateway.
    """
    assert answer.status == status, answer.body[:300]
    for name in ("x-request-id", "x-trace-id", "x-sie-server-version"):
        assert answer.headers[name]
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert ("retry-after" in answer.headers) == (status == 429)
    if route.foreign:
        assert_foreign(answer.json(), route.foreign, status)
        return
    detail = answer.json()["detail"]
    assert detail["code"] == CODES[status] == answer.headers["x-sie-error-code"]
    if route.openai:
        code, kind = OPENAI[status]
        error = {"message": detail["message"], "type": kind, "param": None, "code": code}
        assert answer.json() == {
            "error": error,
            "detail": {**detail, "error": error},
            "message": detail["message"],
        }
    else:
        more = {"message": detail["message"]} if of_gateway or route.path.startswith("/v1/models/") else {}
        assert answer.json() == {"detail": detail} | more


def assert_foreign(body: dict[str, Any], form: str, status: int) -> None:
    """The body of a refusal in the form of another server."""
    if form == "tei":
        kind = "Overloaded" if status == 429 else "Validation"
        assert body == {"error": body["error"], "error_type": kind} and body["error"]
    elif form == "cohere":
        assert body == {"message": body["message"]} and body["message"]
    else:
        wanted = {"type": KINDS[status], "param": None, "code": status}
        assert body["error"] == {"message": body["error"]["message"], **wanted} and len(body) == 1


@pytest.mark.parametrize("number", range(len(ROUTES)), ids=[f"{r.method} {r.path}" for r in ROUTES])
def test_each_route_answers_each_kind_of_key_in_its_own_form(guarded: Keyed, number: int) -> None:
    route, known, of_gateway = ROUTES[number], guarded.keys, is_gateway(guarded.server)
    good = (*route.good, 501) if of_gateway and route.admin else route.good
    lacking = known["infer" if route.admin else "admin"]
    missing = route.ask(guarded.server, {})
    assert_refused(missing, route, 401, of_gateway)
    assert missing.headers["www-authenticate"] == 'Bearer realm="penstock"'
    wrong = route.ask(guarded.server, bearer(STRANGER))
    assert_refused(wrong, route, 403 if route.admin else 401, of_gateway)
    assert (
        route.admin or wrong.headers["www-authenticate"] == 'Bearer realm="penstock", error="invalid_token"'
    )
    assert_refused(route.ask(guarded.server, bearer(lacking)), route, 403, of_gateway)
    for name in ("both", "admin" if route.admin else "infer"):
        assert route.ask(guarded.server, bearer(known[name])).status in good
    slow = bearer(known[f"slow-{number}"])
    assert route.ask(guarded.server, slow).status in good
    limited = route.ask(guarded.server, slow)
    assert_refused(limited, route, 429, of_gateway)
    assert 90 < int(limited.headers["retry-after"]) <= 100


@pytest.mark.parametrize("path", OPEN)
def test_probes_metrics_and_the_page_need_no_key(guarded: Keyed, path: str) -> None:
    assert guarded.server.get(path).status == 200
    assert guarded.server.request("GET", path, headers=bearer(STRANGER)).status == 200


def test_a_refusal_comes_before_the_body_is_asked_for(guarded: Keyed) -> None:
    head = (
        "POST /v1/encode/fake/echo HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        "Content-Length: 100000000\r\nExpect: 100-continue\r\n\r\n"
    )
    answer = exchange(guarded.server, head.encode(), 10)
    assert answer.startswith(b"HTTP/1.1 401 "), answer[:100]
    assert b"100 Continue" not in answer
    assert b"connection: close" in answer.lower()


HOSTILE = {
    "10,000 bytes": b"Authorization: Bearer " + b"x" * 10_000,
    "not ASCII": b"Authorization: Bearer \xff\xfe\xc3\xbc",
    "two headers": b"Authorization: Bearer KEY\r\nAuthorization: Bearer " + STRANGER.encode(),
    "the good one last": b"Authorization: Bearer " + STRANGER.encode() + b"\r\nAuthorization: Bearer KEY",
    "two in one header": b"Authorization: Bearer KEY, Bearer KEY",
    "two kinds of header": b"Authorization: Bearer KEY\r\nX-API-Key: " + STRANGER.encode(),
    "Basic": b"Authorization: Basic eDp5",
    "Basic with a key": b"Authorization: Basic KEY",
    "no scheme": b"Authorization: KEY",
    "empty": b"Authorization:",
    "only the scheme": b"Authorization: Bearer",
    "cookie": b"Cookie: token=KEY",
}


def raw_get(server: Server, path: str, fields: bytes) -> bytes:
    """The answer to a GET with these header lines."""
    return exchange(
        server,
        b"GET " + path.encode() + b" HTTP/1.1\r\nHost: t\r\nConnection: close\r\n" + fields + b"\r\n\r\n",
        10,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused_cleanly(guarded: Keyed, name: str) -> None:
    fields = HOSTILE[name].replace(b"KEY", guarded.keys["both"].encode())
    assert raw_get(guarded.server, "/v1/models", fields).startswith(b"HTTP/1.1 401 ")
    refused = raw_get(guarded.server, "/v1/admin/load/fake/echo", fields)
    assert refused.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 403 "))
    assert guarded.keys["both"].encode() not in refused
    assert guarded.server.request("GET", "/v1/models", headers=bearer(guarded.keys["infer"])).status == 200


@pytest.mark.parametrize(
    "fields", [b"authorization: bearer KEY", b"AUTHORIZATION:  BEARER  KEY", b"X-Api-Key: KEY"]
)
def test_case_and_the_other_header_do_not_matter(guarded: Keyed, fields: bytes) -> None:
    sent = fields.replace(b"KEY", guarded.keys["infer"].encode())
    assert raw_get(guarded.server, "/v1/models", sent).startswith(b"HTTP/1.1 200 ")


def test_a_key_in_the_address_lets_nobody_in(guarded: Keyed) -> None:
    for name in ("token", "key", "api_key", "access_token"):
        assert guarded.server.get(f"/v1/models?{name}={guarded.keys['infer']}").status == 401


def handshake(server: Server, *fields: str) -> bytes:
    """The head of the answer to a WebSocket handshake, and the body of a refusal."""
    lines = (
        f"GET /ws/status?token={STRANGER} HTTP/1.1",
        "Host: t",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        *fields,
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        found = b""
        while b"\r\n\r\n" not in found or (not found.startswith(b"HTTP/1.1 101") and b"}" not in found):
            piece = connection.recv(4096)
            if not piece:
                break
            found += piece
        return found.partition(b"\r\n\r\n")[0] if found.startswith(b"HTTP/1.1 101") else found


def test_a_websocket_takes_the_key_as_a_header_or_a_subprotocol_that_is_never_selected(
    guarded: Keyed,
) -> None:
    server, key = guarded.server, guarded.keys["infer"]
    refused = handshake(server)
    assert refused.startswith(b"HTTP/1.1 401 ") and b"UNAUTHORIZED" in refused
    assert handshake(server, f"Sec-WebSocket-Protocol: penstock.key.{STRANGER}").startswith(b"HTTP/1.1 401 ")
    assert handshake(server, f"Authorization: Bearer {guarded.keys['admin']}").startswith(b"HTTP/1.1 403 ")
    assert handshake(server, f"Authorization: Bearer {key}").startswith(b"HTTP/1.1 101 ")
    accepted = handshake(server, f"Sec-WebSocket-Protocol: penstock.status, penstock.key.{key}")
    assert accepted.startswith(b"HTTP/1.1 101 ")
    assert b"penstock.status" in accepted and b"penstock.key" not in accepted


def test_requests_are_counted_by_the_names_in_the_file_and_no_others(guarded: Keyed) -> None:
    server, known = guarded.server, guarded.keys
    before = server.metric("penstock_requests_by_key_total", key="both", code="200")
    refused = server.metric("penstock_access_refused_total", reason="unauthenticated")
    for _ in range(3):
        assert server.request("GET", "/v1/models", headers=bearer(known["both"])).status == 200
        assert server.request("GET", "/v1/models", headers=bearer(STRANGER)).status == 401
    assert server.metric("penstock_requests_by_key_total", key="both", code="200") == before + 3
    assert server.metric("penstock_access_refused_total", reason="unauthenticated") == refused + 3
    lines = server.get("/metrics").body.decode().splitlines()
    names = {
        line.split('key="')[1].split('"')[0]
        for line in lines
        if line.startswith("penstock_requests_by_key_total{")
    }
    assert names == {*known, "-"}, "and one for all who have no key of the file"


def test_the_log_names_the_key_that_called_an_admin_route(guarded: Keyed) -> None:
    ROUTES[-2].ask(guarded.server, bearer(guarded.keys["admin"]))
    lines = [json.loads(line) for line in guarded.server.log.splitlines() if line.startswith("{")]
    found = [
        line
        for line in lines
        if "POST /v1/admin/load/fake/echo" in line["message"] and line.get("key") == "admin"
    ]
    assert found and found[-1]["message"].endswith("for key admin") and found[-1]["request_id"]
