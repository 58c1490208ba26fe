"""A server with addresses of their own for metrics and health: what they answer, with keys, and while it drains."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.keys import bearer, write_keys
from tests.harness.ports import free_port
from tests.harness.raw import RawClient, accepts
from tests.harness.server import Answer, Server, make_server, serving, wait_until


def apart() -> dict[str, str]:
    """Settings of both addresses."""
    return {f"server.{what}_bind": f"127.0.0.1:{free_port()}" for what in ("metrics", "health")}


def at(server: Server, what: str) -> Server:
    """The same server through another address."""
    bind = server.environment[f"PENSTOCK_SERVER__{what.upper()}_BIND"]
    found = dataclasses.replace(server, port=int(bind.rpartition(":")[2]))
    found.process = server.process
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("listeners"), settings=apart(), supervised=False) as running:
        yield running


def test_metrics_are_on_their_own_address_and_on_the_main_one(server: Server) -> None:
    for place in (server, at(server, "metrics")):
        assert place.get("/metrics").status == 200 and place.metric("penstock_build_info") == 1
    assert at(server, "health").get("/metrics").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/livez",
        "/readyz",
        "/ping",
        "/healthz",
        "/health",
        "/v2/health/live",
        "/v2/health/ready",
        "/api/health/ready",
    ],
)
def test_health_is_on_its_own_address_and_on_the_main_one(server: Server, path: str) -> None:
    for place in (server, at(server, "health")):
        assert place.get(path).status == 200
    assert at(server, "metrics").get(path).status == (400 if path.startswith("/api/") else 404)


def _said(answer: Answer) -> object:
    """The body of an error without the id of its request, which the header has as well."""
    found = answer.json() if answer.body else {}
    assert found.pop("request_id", answer.headers["x-request-id"]) == answer.headers["x-request-id"]
    return found


@pytest.mark.parametrize("what", ["metrics", "health"])
def test_everything_else_is_unknown_there(server: Server, what: str) -> None:
    place = at(server, what)
    for path, nothing in (
        ("/", "/nope"),
        ("/v1/models", "/nope"),
        ("/docs", "/nope"),
        ("/nope", "/nope"),
        ("/v2", "/v2/nope"),
        ("/api/status", "/api/health/nope"),
        ("/api/tags", "/api/nope"),
    ):
        answer, unknown = place.get(path), server.get(nothing)
        assert (answer.status, _said(answer)) == (unknown.status, _said(unknown)), path
        for header in ("x-request-id", "x-trace-id", "x-sie-server-version"):
            assert answer.headers[header] and unknown.headers[header], header
    assert place.encode("fake/echo", ["a"]).status == 404
    assert place.request("POST", "/v1/encode/fake/echo", b"x" * (1 << 20)).status == 404
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    assert place.request("GET", "/ws/status", headers=upgrade).status == 404
    assert server.encode("fake/echo", ["a"]).status == 200


def test_the_addresses_are_in_the_start_up_block(server: Server) -> None:
    wait_until(lambda: "  try  " in server.log or "  not built  " in server.log, what="the block")
    for what in ("metrics", "health"):
        bind = server.environment[f"PENSTOCK_SERVER__{what.upper()}_BIND"]
        assert any(line.split() == [what, bind] for line in server.log.splitlines())


def test_keys_are_asked_for_there_as_elsewhere_and_metrics_may_leave_the_main_address(
    tmp_path: Path,
) -> None:
    made = write_keys(tmp_path / "keys.yaml", {"reader": {"scopes": ["infer"]}})
    settings = {
        **apart(),
        "server.keys_file": tmp_path / "keys.yaml",
        "server.open_metrics": "false",
        "server.metrics_on_bind": "false",
    }
    with serving(tmp_path, settings=settings, workers=False) as server:
        key = bearer(made["reader"])
        metrics = at(server, "metrics")
        assert metrics.get("/metrics").status == 401
        assert metrics.request("GET", "/metrics", headers=key).status == 200
        assert metrics.request("GET", "/v1/models", headers=key).status == 404
        assert server.request("GET", "/metrics", headers=key).status == 404
        assert at(server, "health").get("/livez").status == 200


def test_a_frontend_that_a_reload_replaces_leaves_its_probes_to_the_next_one(tmp_path: Path) -> None:
    settings = {**apart(), "server.drain_s": 20, "server.frontends": 1}
    with serving(tmp_path, settings=settings, supervised=False) as server:
        health = at(server, "health")
        with RawClient(server.port) as polled, RawClient(server.port) as kept:

            def ready(client: RawClient) -> int:
                client.socket.sendall(b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n")
                return int(client.answer()[0])

            assert ready(kept) == 200
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: ready(polled) == 503, what="the drain of the old frontend")
            assert not any(b"draining" in health.get("/readyz").body for _ in range(20))
            assert ready(kept) == 503, "the old one was there all the time"


def test_probes_of_life_are_answered_while_the_server_drains_and_no_address_outlives_it(
    tmp_path: Path,
) -> None:
    settings = {**apart(), "server.drain_s": 5}
    with serving(tmp_path, models=("fake/slow",), settings=settings) as server:
        health, metrics = at(server, "health"), at(server, "metrics")
        with (
            RawClient(health.port) as probe,
            RawClient(metrics.port) as scrape,
            RawClient(server.port) as busy,
        ):
            busy.encode("fake/slow", ["long " * 300] * 30)
            wait_until(lambda: server.metric("penstock_requests_in_flight") >= 1, what="a request in work")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not accepts(server.port), what="the drain")
            probe.socket.sendall(b"GET /readyz HTTP/1.1\r\nHost: h\r\n\r\n")
            status, headers, body = probe.answer()
            assert (status, headers["connection"], body) == (503, "close", b"not ready\ndraining\n")
            for path in ("/healthz", "/livez", "/v2/health/live"):
                assert health.get(path).status == 200, path
            assert health.get("/readyz").status == 503
            scrape.socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            assert scrape.answer()[0] == 200
            assert busy.answer()[0] == 200
            assert not accepts(metrics.port)
        assert server.process.wait(60) == 0
        assert not accepts(health.port)
        wait_until(lambda: not server.pids(), what="the end of all processes")


def test_a_reload_keeps_the_addresses_and_refuses_others(tmp_path: Path) -> None:
    chosen = apart()
    config = tmp_path / "server.yaml"

    def write(**more: str) -> None:
        names = {name.partition(".")[2]: value for name, value in chosen.items()}
        config.write_text(json.dumps({"server": {**names, **more}}))

    write()
    with serving(tmp_path, config=config, workers=False) as server:
        server.environment |= {
            f"PENSTOCK_{name.replace('.', '__').upper()}": value for name, value in chosen.items()
        }
        write(metrics_bind=f"127.0.0.1:{free_port()}")
        server.process.send_signal(signal.SIGHUP)
        refused = "server.health_bind and server.mcp_port cannot change while the server runs"
        wait_until(lambda: refused in server.log, what="the refusal")
        assert at(server, "metrics").get("/metrics").status == 200
        write(version_header="9.9.9")
        server.process.send_signal(signal.SIGHUP)
        wait_until(
            lambda: server.get("/healthz").headers["x-sie-server-version"] == "9.9.9", what="the new frontend"
        )
        wait_until(lambda: at(server, "health").get("/livez").status == 200, what="the new frontend's health")
        assert at(server, "metrics").get("/metrics").status == 200


def test_addresses_of_one_port_are_a_wrong_configuration(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.environment["PENSTOCK_SERVER__HEALTH_BIND"] = f"127.0.0.2:{server.port}"
    server.start()
    try:
        assert server.process.wait(60) == 3
    finally:
        server.kill_everything()
    assert "need another port than server.bind" in server.log
