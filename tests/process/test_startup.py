"""The first seconds of a server: what it prints, what it answers while models load, what it says of a failed one."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.lifecycle import Models
from tests.harness.ports import free_port
from tests.harness.server import (
    FAKE_CATALOG,
    ROOT,
    Server,
    alive,
    make_server,
    serving,
    wait_until,
)


@contextlib.contextmanager
def starting(
    tmp_path: Path, models: tuple[str, ...], catalog: Path = FAKE_CATALOG, **settings: object
) -> Iterator[Server]:
    """A server whose frontend answers, while its models may still load."""
    server = make_server(tmp_path, models, settings, catalog)
    server.fresh = False
    server.start()
    try:
        wait_until(lambda: answers(server), what="a frontend")
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
    finally:
        server.kill_everything()


def answers(server: Server) -> bool:
    """Whether the frontend answers at all."""
    with contextlib.suppress(OSError):
        return server.get("/livez", timeout_s=5).status == 200
    return False


def joined(server: Server) -> bool:
    """Whether the frontend knows its worker's models."""
    return "loading" in server.get("/readyz").body.decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends without gRPC, one model that loads and one that does not."""
    models, settings = ("fake/broken", "fake/echo"), {"server.frontends": 2}
    with serving(
        tmp_path_factory.mktemp("startup"), models, settings, supervised=False, fresh=True
    ) as running:
        yield running


def test_the_start_up_block_is_printed_once_with_url_models_and_devices(server: Server) -> None:
    wait_until(lambda: " is ready\n" in server.log, what="the block")
    before = set(server.frontend_pids())
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(map(alive, before)), what="new frontends")
    wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
    lines = server.log.splitlines()
    block = lines[next(at for at, line in enumerate(lines) if line.startswith("Penstock ")) :][:9]
    assert f"http://localhost:{server.port}" in block[1]
    assert "fake/broken: failed" in block[2]
    assert "fake/echo: loaded on cpu" in block[3]
    assert "worker 0" in block[4]
    assert "cpu, 1 threads, 32 MiB arena" in block[4]
    assert "limits" in block[5]
    assert "no keys" in block[6]
    assert str(server.run_dir) in block[7]
    assert "off" in block[8]
    assert server.log.count(" is ready\n") == 1


def test_without_grpc_its_library_is_not_loaded(server: Server) -> None:
    for pid in server.frontend_pids():
        assert "cygrpc" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_model_that_fails_to_load_is_reported_and_the_others_are_served(server: Server) -> None:
    assert server.encode("fake/echo", ["served"]).status == 200
    answer = server.encode("fake/broken", ["x"])
    assert answer.status == 502
    assert answer.json()["detail"]["code"] == "MODEL_LOAD_FAILED"
    assert answer.headers["x-sie-error-code"] == "MODEL_LOAD_FAILED"
    assert "retry-after" not in answer.headers
    assert server.get("/readyz?model=fake/broken").status == 503
    assert server.metric("penstock_model_state", model="fake/broken", state="failed") == 1
    assert "model fake/broken failed to load" in server.log


def test_a_server_none_of_whose_models_loads_is_alive_but_not_ready(tmp_path: Path) -> None:
    with starting(tmp_path, ("fake/broken",)) as server:
        wait_until(lambda: b"no model could be loaded" in server.get("/readyz").body, what="the reason")
        assert server.get("/readyz").status == 503
        assert server.get("/healthz").status == 200
        assert server.encode("fake/broken", ["x"]).status == 502
        wait_until(lambda: "is not ready: no model could be loaded\n" in server.log, what="the block")
        wait_until(lambda: "  help  " in server.log, what="the end of the block")
        assert "  model      fake/broken: failed" in server.log and " is ready\n" not in server.log


@pytest.mark.long
def test_a_model_that_is_loaded_answers_while_another_of_the_start_loads(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    models.write("org/early"), models.write("org/long", load_s=60)
    both = ("org/early", "org/long")
    with starting(tmp_path, both, models.directory, **{"worker.load_threads": 1}) as server:
        wait_until(lambda: server.get("/readyz?model=org/early").status == 200, what="the first model")
        assert server.encode("org/early", ["served"]).status == 200
        assert b"models are loading" in server.get("/readyz").body
        assert server.get("/readyz?model=org/long").status == 503
        assert server.get("/readyz?model=org/none").status == 404
        wait_until(lambda: "  try  " in server.log, what="the first block")
        head, _, block = server.log.partition(" answers; the start goes on with ")
        assert head.endswith("Penstock 0.1.0") and " is ready\n" not in server.log
        assert "  model      org/early: loaded on cpu\n" in block
        assert "  model      org/long: loading on cpu\n" in block


@pytest.mark.long
def test_requests_wait_for_a_model_that_loads_and_for_one_whose_turn_has_not_come(tmp_path: Path) -> None:
    with starting(tmp_path, ("fake/late", "fake/echo"), **{"worker.load_threads": 1}) as server:
        assert server.get("/readyz").status == 503
        assert server.get("/healthz").status == 200
        wait_until(lambda: joined(server), what="the worker")
        assert server.metric("penstock_model_state", model="fake/echo", state="loaded") == 0
        with ThreadPoolExecutor(2) as pool:
            statuses = pool.map(
                lambda model: server.encode(model, ["early"]).status, ("fake/late", "fake/echo")
            )
            assert list(statuses) == [200, 200]
        wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
        assert server.metric("penstock_model_load_seconds", model="fake/late") >= 2


@pytest.mark.long
def test_a_short_wait_for_a_load_ends_with_503_model_loading(tmp_path: Path) -> None:
    settings = {"limits.load_wait_s": 0.2, "limits.restart_wait_s": 0.2}
    with starting(tmp_path, ("fake/late", "fake/echo"), **settings) as server:
        unjoined = server.encode("fake/late", ["x"])
        wait_until(lambda: joined(server), what="the worker")
        loading = server.encode("fake/late", ["x"])
        assert server.get("/readyz").status == 503
        assert server.get("/healthz").status == 200
        for answer in (unjoined, loading):
            assert answer.status == 503
            assert answer.json()["detail"]["code"] == "MODEL_NOT_LOADED"
            assert answer.headers["x-sie-error-code"] == "MODEL_LOADING"
            assert int(answer.headers["retry-after"]) >= 1
        assert "loading" in loading.json()["detail"]["message"]
        refused = [
            server.metric("penstock_rejected_total", model="fake/late", reason=reason)
            for reason in ("no_worker", "loading")
        ]
        assert sum(refused) == 2
        assert refused[1] >= 1
        wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
        assert server.encode("fake/late", ["x"]).status == 200


@pytest.mark.long
def test_every_line_of_a_start_with_a_real_model_a_reload_and_a_stop_is_json(tmp_path: Path) -> None:
    model = "sentence-transformers/all-MiniLM-L6-v2"
    settings = {"log.format": "json", "grpc.enabled": "true", "grpc.bind": f"127.0.0.1:{free_port()}"}
    with serving(tmp_path, (model,), settings, ROOT / "config" / "models", fresh=True) as server:
        wait_until(lambda: " is ready; url " in server.log, what="the line of the start")
        before = server.frontend_pids()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not any(map(alive, before)) and server.frontend_pids(), what="the new frontend")
        wait_until(lambda: server.get("/readyz").status == 200, what="readiness")
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert all(line.keys() >= {"time", "level", "source", "message"} for line in lines)
    assert {line["level"] for line in lines} == {"info"}
    sources = {line["source"].partition("-")[0] for line in lines}
    assert sources == {"arbiter", "frontend", "supervisor", "worker"}
