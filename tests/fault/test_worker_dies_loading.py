"""Workers that die while they load a model: the load goes on in the next life, and a model that kills is left alone."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.lifecycle import Models, serving_models, state
from tests.harness.load import Load
from tests.harness.server import wait_until


@pytest.mark.long
def test_a_request_that_waits_for_a_load_outlives_the_worker_that_loads(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    late = models.write("org/late", load_s=2)
    with (
        serving_models(tmp_path, models, {"limits.load_wait_s": 40}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(server.encode, late, ["patience"])
        wait_until(lambda: state(server, late) == "loading", what="the load")
        os.kill(wait_until(server.worker_pid), signal.SIGKILL)
        assert waiting.result(60).status == 200


@pytest.mark.long
def test_a_model_that_kills_its_worker_in_the_load_is_not_loaded_a_third_time(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    crash = tmp_path / "crash"
    crash.touch()
    deadly, good = models.write("org/deadly", crash_file=str(crash)), models.write("org/good")
    with serving_models(
        tmp_path,
        models,
        {"limits.load_wait_s": 60, "limits.restart_wait_s": 60, "worker.healthy_after_s": 0.1},
    ) as server:
        answer = server.encode(deadly, ["x"])
        assert (answer.status, answer.json()["detail"]["code"]) == (502, "MODEL_LOAD_FAILED")
        assert "died twice" in answer.json()["detail"]["message"]
        pid = server.worker_pid()
        assert server.encode(good, ["x"]).status == 200
        assert server.encode(deadly, ["x"]).status == 502
        assert server.worker_pid() == pid, "the third life goes on"
        crash.unlink()
        assert server.post(f"/v1/admin/load/{deadly}", {}).status == 200, "by hand it may be tried again"


@pytest.mark.long
def test_a_model_that_keeps_its_worker_busy_gets_another_one(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    busy, quiet = models.write("org/busy", batch_ms=40), models.write("org/quiet")
    settings = {"worker.count": 2, "batch.max_items": 1}
    with serving_models(tmp_path, models, settings) as server:
        wait_until(lambda: server.metric("penstock_worker_up") == 2, what="two workers")
        assert server.encode(quiet, ["x"]).status == 200
        with Load(server.port, clients=48, model=busy) as running:
            wait_until(lambda: running.done > 20, what="traffic")
            assert server.metric("sie_model_loaded", model=busy) >= 1

            def replicas() -> float:
                return server.metric("penstock_model_state", model=busy, state="loaded")

            wait_until(lambda: replicas() == 2, what="the second copy")
            outcome = running.stop()
        assert outcome.failed == 0, (outcome.statuses, outcome.bodies[:2])
        assert server.metric("penstock_model_state", model=quiet, state="loaded") == 1, "the cold one stays"
