"""The gRPC server of whole servers: one port for all frontends, and the end of its life."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from ipc.protos import kserve_v2_pb2 as pb
from tests.harness.rpc import (
    Rpc,
    RpcLoad,
    address_of,
    failure_of,
    grpc_settings,
    is_vector_of,
    text_request,
    trailers_of,
)
from tests.harness.server import Server, alive, make_server, serving, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def maps_grpc(pid: int) -> bool:
    """Whether a process has loaded gRPC's library."""
    return "cygrpc" in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends that speak gRPC."""
    settings = grpc_settings(**{"server.frontends": 2})
    with serving(tmp_path_factory.mktemp("grpc"), settings=settings, supervised=False, fresh=True) as running:
        yield running


def test_all_frontends_serve_one_port_and_only_they_load_grpc(server: Server) -> None:
    slots = [f"frontend-{slot}" for slot in (0, 1)]
    with RpcLoad(address_of(server), clients=4, fresh=True) as load:
        wait_until(lambda: all(_served_by(server, slot) for slot in slots), what="traffic at both frontends")
        assert set(load.stop()) == {"OK"}, load.details[:3]
    assert not maps_grpc(server.process.pid)
    assert all(map(maps_grpc, server.frontend_pids()))


def _served_by(server: Server, slot: str) -> int:
    """Requests in the ring of recent requests of one frontend: it is the only one that writes there."""
    ring = server.run_dir / "metrics" / f"{slot}.recent"
    return ring.read_bytes().count(b"infer") if ring.exists() else 0


def test_a_port_that_another_server_has_is_an_error_that_names_the_setting(
    server: Server, tmp_path: Path
) -> None:
    settings = {"grpc.enabled": "true", "grpc.bind": address_of(server)}
    other = make_server(tmp_path, settings=settings)
    other.fresh = False
    other.start()
    try:
        assert other.process.wait(60) == 3
    finally:
        other.kill_everything()
    assert f"grpc.bind: {settings['grpc.bind']} cannot be had" in other.log


@pytest.mark.long
def test_a_reload_does_not_move_the_port(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    settings = grpc_settings()
    config.write_text(f"grpc: {{max_rpcs: 100, bind: '{settings['grpc.bind']}'}}\n")
    del settings["grpc.bind"]
    with serving(tmp_path, settings=settings, config=config) as server:
        config.write_text("grpc: {max_rpcs: 100, bind: '127.0.0.1:1'}\n")
        server.process.send_signal(signal.SIGHUP)
        refused = "grpc.enabled and grpc.bind cannot change while the server runs"
        wait_until(lambda: refused in server.log, what="the refusal")


@pytest.mark.long
def test_reloads_under_load_fail_no_rpc(tmp_path: Path) -> None:
    with (
        serving(tmp_path, settings=grpc_settings(**{"server.frontends": 2})) as server,
        RpcLoad(address_of(server), clients=4) as kept,
        RpcLoad(address_of(server), clients=2, fresh=True) as fresh,
    ):
        for _ in range(3):
            before, seen = set(server.frontend_pids()), kept.done
            wait_until(lambda seen=seen: kept.done > seen + 50, what="traffic")
            server.process.send_signal(signal.SIGHUP)
            wait_until(
                lambda pids=before: not any(alive(pid) for pid in pids), what="the end of the old frontends"
            )
        for load in (kept, fresh):
            assert set(load.stop()) == {"OK"}, (load.statuses, load.details[:3])


def test_a_stop_finishes_what_runs_and_ends_watches_and_streams(tmp_path: Path) -> None:
    with serving(tmp_path, models=("fake/slow",), settings=grpc_settings()) as server:
        with Rpc(address_of(server)) as rpc:
            watched = rpc.watch()
            assert next(watched) == SERVING
            answers = rpc.stream(_endless("fake/slow"))
            assert is_vector_of("0", next(answers).infer_response)
            text = "long " * 400
            running = [rpc.start("ModelInfer", text_request("fake/slow", text)) for _ in range(4)]
            wait_until(lambda: server.metric("penstock_requests_in_flight") >= 5, what="rpcs in flight")
            server.process.send_signal(signal.SIGTERM)
            assert all(is_vector_of(text, one.result()) for one in running)
            assert list(watched) == [NOT_SERVING]
            error = failure_of(lambda: list(answers))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert trailers_of(error)["penstock-code"] == "DRAINING"
        assert server.process.wait(60) == 0
        wait_until(lambda: not server.pids(), what="the end of all processes")


def _endless(model: str) -> Iterator[pb.ModelInferRequest]:
    number = 0
    while True:
        yield text_request(model, str(number), str(number))
        number += 1


@pytest.mark.long
def test_what_outlasts_the_grace_time_is_cut_off(tmp_path: Path) -> None:
    settings = grpc_settings(**{"server.graceful_timeout_s": 3, "limits.load_wait_s": 60})
    with (
        serving(tmp_path, models=("fake/echo",), settings=settings) as server,
        Rpc(address_of(server)) as rpc,
    ):
        idle = rpc.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", lambda one: one, lambda one: one
        )(_never())
        wait_until(lambda: rpc.health() == SERVING, what="health")
        assert server.stop(20) == 0
        assert failure_of(lambda: list(idle)).code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        )


def _never() -> Iterator[bytes]:
    """A client that says nothing and does not hang up."""
    threading.Event().wait()
    yield b""


@pytest.mark.long
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_client_that_goes_away_ends_its_work(tmp_path: Path, how: str) -> None:
    settings = grpc_settings(**{"worker.heartbeat_timeout_s": 60})
    with serving(tmp_path, settings=settings) as server, Rpc(address_of(server)) as rpc:
        worker = server.worker_pid()
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        left = rpc.start("ModelInfer", text_request("fake/echo", "x"), 0.5 if how == "deadline" else 30)
        wait_until(lambda: server.metric("penstock_requests_in_flight") == 1, what="the rpc")
        if how == "cancel":
            left.cancel()
        wait_until(lambda: server.metric("penstock_requests_in_flight") == 0, what="its end")
        code = "499" if how == "cancel" else "504"
        wait_until(
            lambda: server.metric("penstock_requests_total", protocol="kserve", code=code) == 1,
            what="its count",
        )
        os.kill(worker, signal.SIGCONT)
