"""R1: kill -9 a worker under load."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.fault import rounds, serving
from tests.harness.load import Load
from tests.harness.server import wait_until


def test_kill_one_of_two_workers_under_load_fails_no_request(tmp_path: Path) -> None:
    with serving(
        tmp_path, models=("fake/slow",), settings={"worker.count": 2, "worker.healthy_after_s": 0.5}
    ) as server:
        wait_until(lambda: server.starts(0) and server.starts(1), what="two workers")
        with Load(server.port, clients=16, model="fake/slow") as load:
            for kill in range(rounds(short=1, long=100)):
                before = load.done
                wait_until(lambda seen=before: load.done > seen + 30, what="traffic")
                slot = kill % 2
                victim, starts = server.worker_pid(slot), server.starts(slot)
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
                wait_until(lambda at=slot, seen=starts: server.starts(at) > seen, what="the worker's return")
                wait_until(lambda: server.metric("penstock_worker_up") == 2, what="both workers")
            outcome = load.stop()
        assert outcome.failed == 0, (outcome.statuses, outcome.broken[:5], outcome.bodies[:3])
        assert max(outcome.latencies_s) < 30


@pytest.mark.long
def test_kill_the_only_worker_makes_requests_wait_or_answers_503_with_retry_after(tmp_path: Path) -> None:
    with (
        serving(tmp_path, models=("fake/slow",), settings={"worker.healthy_after_s": 0.5}) as server,
        Load(server.port, clients=8, model="fake/slow") as load,
    ):
        for _ in range(rounds(short=2, long=50)):
            before = load.done
            wait_until(lambda seen=before: load.done > seen + 20, what="traffic")
            os.kill(wait_until(server.worker_pid), signal.SIGKILL)
        outcome = load.stop()
        assert not outcome.broken and not outcome.wrong
        assert set(outcome.statuses) <= {200, 503}
        assert max(outcome.latencies_s) < 50
