"""R6: a worker that hangs, as a stopped process or in its device thread."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault import serving
from tests.harness.load import Load
from tests.harness.server import PATIENCE_S, Server, alive, wait_until
from tests.tiny.programs import write_model

MODEL = "fake/slow"
HANG_TIMEOUT_S = 8.0
SETTINGS = {
    "worker.count": 2,
    "worker.heartbeat_timeout_s": HANG_TIMEOUT_S,
    "worker.hang_timeout_s": HANG_TIMEOUT_S,
    "limits.restart_wait_s": 40,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers that may hang for eight seconds."""
    with serving(tmp_path_factory.mktemp("hang"), models=(MODEL,), settings=SETTINGS) as running:
        yield running


def both_up(server: Server) -> None:
    """Wait until two workers answer."""
    wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")


def test_a_stopped_worker_is_killed_and_replaced_and_no_request_fails(server: Server) -> None:
    both_up(server)
    with Load(server.port, clients=8, model=MODEL) as load:
        wait_until(lambda: load.done > 40, what="traffic")
        victim = wait_until(lambda: server.worker_pid(0), what="a worker")
        os.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: not alive(victim), what="the end of the stopped worker")
        assert time.monotonic() - stopped > HANG_TIMEOUT_S / 2
        wait_until(lambda: server.worker_pid(0) not in (None, victim), what="its successor")
        both_up(server)
        outcome = load.stop()
    assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])
    assert max(outcome.latencies_s) < HANG_TIMEOUT_S + PATIENCE_S
    assert server.metric("penstock_worker_restarts_total", worker="worker-0", reason="hang") == 1


def test_a_worker_that_stops_only_briefly_stays(server: Server) -> None:
    both_up(server)
    worker = server.worker_pid(1)
    assert worker is not None
    before = server.metric("penstock_worker_restarts_total")
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1.5)  # the fault itself, not a wait for something
    os.kill(worker, signal.SIGCONT)
    both_up(server)
    assert all(server.encode(MODEL, [f"after the pause {n}"]).status == 200 for n in range(10))
    assert server.worker_pid(1) == worker
    assert server.metric("penstock_worker_restarts_total") == before


@pytest.mark.long
def test_an_input_that_hangs_the_device_is_refused_and_bystanders_survive(server: Server) -> None:
    both_up(server)
    before = server.metric("penstock_worker_restarts_total")
    with Load(server.port, clients=8, model=MODEL) as load, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: load.done > 40, what="traffic")
        answer = pool.submit(server.encode, MODEL, ["#hang"], 3 * PATIENCE_S).result(4 * PATIENCE_S)
        assert answer.status == 500
        assert answer.json()["detail"]["code"] == "WORKER_CRASHED"
        both_up(server)
        seen = load.done
        wait_until(lambda: load.done > seen + 40, what="traffic afterwards")
        outcome = load.stop()
    assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])
    wait_until(lambda: server.metric("penstock_worker_restarts_total") == before + 2, what="two restarts")
    refused = server.metric("penstock_poison_total", reason="refused")
    assert server.encode(MODEL, ["#hang"]).status == 500
    assert server.metric("penstock_poison_total", reason="refused") == refused + 1
    assert server.metric("penstock_worker_restarts_total") == before + 2


@pytest.mark.long
def test_a_step_of_ten_seconds_ends_no_worker_and_others_go_elsewhere(tmp_path: Path) -> None:
    settings = {
        "worker.count": 2,
        "worker.heartbeat_timeout_s": HANG_TIMEOUT_S,
        "repository.dirs": tmp_path / "models",
        "repository.allow_python": True,
    }
    write_model(tmp_path / "models", "slow", "sleeper")

    def run(server: Server, milliseconds: float) -> int:
        tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "FP32", "data": [milliseconds]}
        return server.post("/v2/models/sleeper/infer", {"inputs": [tensor]}).status

    with serving(tmp_path, models=(MODEL,), settings=settings) as server:
        both_up(server)
        assert {run(server, 1.0) for _ in range(30)} == {200}, "the model usually takes a millisecond"
        with Load(server.port, clients=8, model=MODEL) as load, ThreadPoolExecutor(1) as pool:
            long = pool.submit(run, server, 10_000.0)
            wait_until(lambda: load.done > 40, what="traffic")
            assert long.result(60) == 200
            outcome = load.stop()
        assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])
        assert server.metric("penstock_worker_restarts_total") == 0
