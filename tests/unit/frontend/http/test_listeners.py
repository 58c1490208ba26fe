"""Which paths are answered on which port, and addresses that cannot be told apart."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import falcon
import pytest

from frontend.http.listeners import Listeners, addresses, binds, check_addresses, refuse
from frontend.protocols.registry import as_bytes, protocols
from frontend.protocols.sie import SieProtocol
from ipc.errors import ConfigError
from ipc.settings import Grpc, Server, Settings

APART = Server(metrics_bind="127.0.0.1:8002", health_bind="[::1]:8003")
TOGETHER = Server(metrics_bind="127.0.0.1:8002", health_bind="127.0.0.1:8002", metrics_on_bind=False)
HEALTH = (
    "/livez",
    "/readyz",
    "/ping",
    "/healthz",
    "/health",
    "/v2/health/live",
    "/v2/health/ready",
    "/api/health/live",
    "/api/health/ready",
)
IS_PROBE = protocols().is_probe
OTHERS = ("/", "/v1/models", "/v2", "/v2/models/m/ready", "/api/status", "/healthy", "/docs", "/metrics/more")


def scope(path: str, port: int | None, kind: str = "http", method: str = "GET") -> dict[str, Any]:
    return {"type": kind, "path": path, "server": None if port is None else ("h", port), "method": method}


@pytest.mark.parametrize("port", [8080, None])
def test_the_main_address_answers_everything(port: int | None) -> None:
    for server in (Server(), APART):
        for path in (*HEALTH, *OTHERS, "/metrics"):
            assert Listeners(server).serves(scope(path, port), IS_PROBE)


def test_the_other_addresses_answer_their_own_paths_alone() -> None:
    found = Listeners(APART)
    for path in HEALTH:
        assert found.serves(scope(path, 8003), IS_PROBE) and not found.serves(scope(path, 8002), IS_PROBE), (
            path
        )
    for path in OTHERS:
        assert not found.serves(scope(path, 8002), IS_PROBE) and not found.serves(
            scope(path, 8003), IS_PROBE
        ), path
    assert found.serves(scope("/metrics", 8002), IS_PROBE) and not found.serves(
        scope("/metrics", 8003), IS_PROBE
    )


def test_both_may_be_one_address_and_metrics_may_be_there_alone() -> None:
    found = Listeners(TOGETHER)
    assert addresses(TOGETHER) == ["127.0.0.1:8080", "127.0.0.1:8002"]
    assert all(found.serves(scope(path, 8002), IS_PROBE) for path in (*HEALTH, "/metrics"))
    assert not found.serves(scope("/metrics", 8080), IS_PROBE)
    assert found.serves(scope("/readyz", 8080), IS_PROBE)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (Server(metrics_bind="8002"), r"server\.metrics_bind: expected HOST:PORT"),
        (Server(health_bind="unix:/run/health"), r"server\.health_bind: expected HOST:PORT"),
        (Server(metrics_bind="::1:8003"), r"server\.metrics_bind: expected HOST:PORT or \[HOST\]:PORT"),
        (Server(health_bind="[::1:8003"), r"server\.health_bind: expected HOST:PORT"),
        (Server(metrics_bind="10.0.0.1:8080"), "another port than server.bind, which has 8080"),
        (Server(bind="127.0.0.1:8000", health_bind="127.0.0.2:8000"), "which has 8000"),
        (Server(bind="127.0.0.1"), r"server\.bind: expected HOST:PORT"),
        (Server(metrics_bind="127.0.0.1:1", health_bind="127.0.0.2:1"), "one port on two hosts"),
        (Server(bind="127.0.0.1:x"), r"server\.bind: expected HOST:PORT"),
        (Server(bind="*:8000"), r"server\.bind: expected HOST:PORT"),
        (Server(metrics_on_bind=False), "needs server.metrics_bind"),
        (Server(bind="127.0.0.1:8001"), r"grpc\.bind = 127.0.0.1:8001: needs another port than server\.bind"),
        (
            Server(health_bind="0.0.0.0:8001"),
            r"another port than server\.health_bind, which has 0.0.0.0:8001",
        ),
    ],
)
def test_addresses_that_cannot_be_served_are_refused(server: Server, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_addresses(Settings(server=server))


def test_without_grpc_its_port_is_free() -> None:
    check_addresses(Settings(server=Server(bind="127.0.0.1:8001"), grpc=Grpc(enabled=False)))


def test_a_unix_socket_beside_other_addresses_is_the_main_address() -> None:
    found = Listeners(Server(bind="unix:/run/penstock.sock", metrics_bind="127.0.0.1:8002"))
    assert found.serves(
        {"type": "http", "path": "/v1/models", "server": ("/run/penstock.sock", None)}, IS_PROBE
    )


@pytest.mark.parametrize(("method", "body"), [("GET", b'{"detail":"Not Found"}'), ("HEAD", b"")])
def test_a_refusal_looks_like_that_of_an_unknown_path(method: str, body: bytes) -> None:
    sent = refused({**scope("/v1/models", 8002, method=method), "headers": []})
    assert sent[0]["status"] == 404 and sent[1]["body"] == body
    headers = dict(sent[0]["headers"])
    assert re.fullmatch(b"req_[0-9a-f]{32}", headers[b"x-request-id"])
    assert re.fullmatch(b"[0-9a-f]{32}", headers[b"x-trace-id"])
    assert headers[b"x-sie-server-version"] == b"9.9.9"


def test_a_refusal_has_the_ids_of_its_caller() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01".encode()
    given = [(b"x-request-id", b"mine"), (b"traceparent", parent)]
    headers = dict(refused({**scope("/v1/models", 8002), "headers": given})[0]["headers"])
    assert headers[b"x-request-id"] == b"mine" and headers[b"x-trace-id"] == b"a" * 32


def test_a_handshake_is_refused_in_the_same_way_where_the_server_can_answer_it() -> None:
    handshake = {**scope("/ws/status", 8002, kind="websocket"), "headers": []}
    assert refused(handshake) == [{"type": "websocket.close"}]
    sent = refused({**handshake, "extensions": {"websocket.http.response": {}}})
    assert [message["type"] for message in sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert sent[0]["status"] == 404 and b"x-request-id" in dict(sent[0]["headers"])


def refused(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What a server is told to send."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    render = partial(SieProtocol().render_http, falcon.HTTPNotFound(), asked["path"])
    asyncio.run(
        refuse(asked, send, Settings(server=Server(version_header="9.9.9")), lambda: as_bytes(render()))
    )
    return sent


def test_the_port_of_mcp_answers_its_path_alone_and_no_other_port_does() -> None:
    server = Server(mcp_port=8004, metrics_bind="127.0.0.1:8002")
    assert addresses(server) == ["127.0.0.1:8080", "127.0.0.1:8002", "127.0.0.1:8004"]
    found = Listeners(server)
    assert found.serves(scope("/mcp", 8004), IS_PROBE)
    for path in (*HEALTH, *OTHERS, "/metrics", "/mcp/more"):
        assert not found.serves(scope(path, 8004), IS_PROBE), path
    for port in (8080, 8002, None):
        assert not found.serves(scope("/mcp", port), IS_PROBE)
    assert binds(Settings(server=server))["127.0.0.1:8004"] == "server.mcp_port"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server(mcp_port=8080), "server.mcp_port = 8080: another address"),
        (Server(mcp_port=8002, metrics_bind="127.0.0.1:8002"), "server.mcp_port = 8002: another address"),
        (Server(mcp_port=8004, bind="unix:/tmp/socket"), "needs HOST:PORT"),
    ],
)
def test_a_port_of_mcp_that_cannot_be_told_apart_is_refused(server: Server, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Listeners(server)
