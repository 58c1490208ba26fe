"""Live and ready of TRTIS v1: strict and relaxed with a model that fails, without a worker, in a reload and a stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from ipc.protos import trtis_v1_pb2 as pb
from tests.conformance.trtis import infer, status_of
from tests.conformance.trtis_transports import TRANSPORTS, Asked, Stub
from tests.harness.raw import RawClient, accepts
from tests.harness.rpc import address_of, grpc_settings
from tests.harness.server import Server, alive, make_server, serving, wait_until
from tests.tiny.programs import SCRIPTED, write_repository

INPUTS = 'input { name: "INPUT0" dims: 16 } input { name: "INPUT1" dims: 16 }'
GOOD = f'batch_size: 1 {INPUTS} output {{ name: "OUTPUT0" }} id: 7'
RAW = (np.arange(16, dtype="<i4").tobytes(), np.full(16, 3, dtype="<i4").tobytes())
DRAIN_S = 15


def strictness(strict: bool) -> str:
    """The settings file of a strict server, or of a relaxed server."""
    return f"trtis: {{strict_readiness: {strict}}}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server one of whose models fails to load; how strict the server is stands in its settings file.

    The last test stops the server.
    """
    place = tmp_path_factory.mktemp("trtis-health")
    repository = write_repository(place / "models", ("add_sub", "broken"), SCRIPTED)
    config = place / "server.yaml"
    config.write_text(strictness(True))
    settings = grpc_settings(**{"repository.dirs": repository, "server.drain_s": DRAIN_S})
    with serving(place, ("fake/echo",), settings, config=config) as running:
        yield running


@pytest.fixture(params=[True, False], ids=["strict", "relaxed"], scope="module")
def strict(server: Server, request: pytest.FixtureRequest) -> bool:
    """Whether the server is strict, once the server's frontends are ones with that setting."""
    chosen = bool(request.param)
    config = Path(server.environment["PENSTOCK_CONFIG"])
    if config.read_text() != strictness(chosen):
        config.write_text(strictness(chosen))
        old = server.frontend_pids()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not any(map(alive, old)), what="the end of the old frontends")
        server.wait_ready()
    wait_until(lambda: status(server, "broken").ready_state == pb.MODEL_UNAVAILABLE, what="the failure")
    return chosen


def status(server: Server, model: str) -> pb.ModelVersionStatus:
    """What the status says of version 1 of a model."""
    found = pb.ServerStatus.FromString(server.get(f"/api/status/{model}?format=binary").body)
    assert found.ready_state == pb.SERVER_READY
    return found.model_status[model].version_status[1]


def test_a_model_that_fails_makes_a_strict_server_not_ready_and_no_other(
    server: Server, strict: bool
) -> None:
    live, ready = server.get("/api/health/live"), server.get("/api/health/ready")
    assert (live.status, ready.status) == (200, 400 if strict else 200)
    for answer in (live, ready):
        assert status_of(answer).code == pb.SUCCESS and answer.body == b"", "the request worked all the same"
    with grpc.insecure_channel(address_of(server)) as channel:
        found = Stub(channel).call("Health", pb.HealthRequest(mode="ready"), pb.HealthResponse)
    assert found.request_status.code == pb.SUCCESS and found.health != strict
    assert status(server, "add_sub").ready_state == pb.MODEL_READY
    assert infer(server, "add_sub", GOOD, b"".join(RAW)).status.code == pb.SUCCESS


def test_the_reason_of_the_failure_is_in_the_status_and_in_the_refusal(server: Server, strict: bool) -> None:
    reason = status(server, "broken").ready_state_reason.message
    assert reason
    found = pb.ServerStatus.FromString(server.get("/api/status/broken?format=binary").body)
    shown = found.model_status["broken"].config
    assert (shown.name, shown.max_batch_size, [one.name for one in shown.input]) == (
        "broken",
        8,
        ["INPUT0", "INPUT1"],
    )
    refused = infer(server, "broken", GOOD, b"".join(RAW)).status
    assert refused.code == pb.UNAVAILABLE
    assert refused.msg == f"Inference request for unknown model 'broken': its load failed: {reason}", (
        refused.msg
    )


def lives(server: Server) -> bool:
    """Whether a frontend answers."""
    try:
        return server.get("/api/health/live").status == 200
    except OSError:
        return False


def test_without_a_worker_the_server_is_not_ready(tmp_path: Path) -> None:
    settings = grpc_settings(**{"limits.restart_wait_s": 0.2, "limits.load_wait_s": 0.2})
    server = make_server(tmp_path, ("fake/echo",), settings)
    server.environment["PENSTOCK_SUPERVISE"] = "0"
    server.fresh = False
    server.start()
    asked = Asked(
        "echo", 'batch_size: 1 input { name: "text" dims: 1 batch_byte_size: 5 } id: 7', (b"\1\0\0\0a",)
    )
    try:
        wait_until(lambda: lives(server), what="the frontend")
        assert server.get("/api/health/ready").status == 400
        with grpc.insecure_channel(address_of(server)) as channel:
            for over in TRANSPORTS.values():
                told = over(server, Stub(channel), asked)
                assert told.status.code == pb.UNAVAILABLE, told.status
                assert told.status.msg.startswith("Server not ready: "), told.status.msg
        found = text_format.Parse(server.get("/api/status").body.decode(), pb.ServerStatus())
        assert found.ready_state == pb.SERVER_INITIALIZING
        assert server.stop() == 0
    finally:
        server.kill_everything()


def ask(
    client: RawClient, path: str, header: str = "", body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """One answer over a kept connection."""
    fields = f"Host: h\r\nContent-Length: {len(body)}\r\n" + (
        f"NV-InferRequest: {header}\r\n" if header else ""
    )
    client.socket.sendall(f"{'POST' if header else 'GET'} {path} HTTP/1.1\r\n{fields}\r\n".encode() + body)
    return client.answer()


@pytest.mark.parametrize("strict", [False], indirect=True, ids=["relaxed"])
def test_kept_connections_hear_that_the_server_exits_but_nothing_of_a_reload(
    server: Server, strict: bool
) -> None:
    with RawClient(server.port) as kept:
        assert ask(kept, "/api/status/add_sub")[0] == 200
        [old] = server.frontend_pids()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(server.frontend_pids()) - {old}, DRAIN_S, "the new frontend")
        # The new frontend is there before the old one is told to end.
        wait_until(lambda: ends(kept), DRAIN_S, "the end of the kept connection")
    wait_until(lambda: server.get("/api/health/ready").status == 200, what="readiness")
    wait_until(lambda: old not in server.frontend_pids(), DRAIN_S * 2, "the end of the old frontend")
    paths = ("/api/health/live", "/api/health/ready", "/api/status", "/api/status/add_sub")
    clients = [RawClient(server.port) for _ in range(len(paths) + 1)]
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not accepts(server.port), DRAIN_S, "the drain")
    for client, path in zip(clients, paths, strict=False):
        code, headers, body = ask(client, path)
        told = text_format.Parse(headers["nv-status"], pb.RequestStatus())
        assert (code, body, told.code) == (400, b"", pb.UNAVAILABLE), path
        assert told.msg.startswith("Server exiting") and headers["retry-after"] == "1"
    assert ask(clients[-1], "/api/infer/add_sub", GOOD, b"".join(RAW))[0] == 200
    for client in clients:
        client.close()
    assert server.process.wait(40) == 0
    wait_until(lambda: not server.pids(), what="the end of all processes")


def ends(kept: RawClient) -> bool:
    """Whether the answer to a request, which is right, is the last one of its connection."""
    code, headers, _ = ask(kept, "/api/status/add_sub")
    assert code == 200
    return headers.get("connection") == "close"
