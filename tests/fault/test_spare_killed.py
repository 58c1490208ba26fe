"""Kills and stops around the moment in which a spare becomes a worker: every slot comes back, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.fault import rounds, serving
from tests.harness.server import Server, wait_until
from tests.process.test_spare import spare_pids

SETTINGS = {"worker.spare": 1, "worker.healthy_after_s": 0.1}
"""Every life counts as a healthy one, so that no back-off grows over the rounds."""


def kill(*pids: int | None) -> None:
    """SIGKILL to processes of which some may have died."""
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def waiting_spare(server: Server) -> int:
    """The spare that waits for a slot now."""

    def found() -> int | None:
        taken = {server.worker_pid(slot) for slot in (0, 1)}
        return next((pid for pid in spare_pids(server) if pid in server.pids() and pid not in taken), None)

    pid: int = wait_until(found, what="a spare")
    return pid


@pytest.mark.long
def test_slots_come_back_whatever_dies_with_or_after_the_spare(tmp_path: Path) -> None:
    """Two slots want one spare; the spare dies with a worker; the spare dies as soon as it has a slot."""
    with serving(tmp_path, settings={**SETTINGS, "worker.count": 2}) as server:
        draw = random.Random(3)
        for number in range(rounds(short=6, long=30)):
            wait_until(lambda: server.metric("penstock_worker_up") == 2, what="both workers")
            spare, workers = waiting_spare(server), [server.worker_pid(slot) for slot in (0, 1)]
            lives = [server.starts(slot) for slot in (0, 1)]
            if number % 3 == 0:
                kill(*workers)
            elif number % 3 == 1:
                kill(*workers, spare)
            else:
                kill(workers[0])
                wait_until(lambda spare=spare: f"(pid {spare}, a spare)" in server.log, what="the assignment")
                time.sleep(draw.uniform(0, 0.3))  # the fault itself, not a wait for something
                kill(spare)
            wait_until(lambda before=lives[0]: server.starts(0) > before, what="a new life")
        wait_until(lambda: server.metric("penstock_worker_up") == 2, what="both workers")
        assert server.encode("fake/echo", ["again"]).status == 200


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.5, 0.9, 1.3, 1.8])
def test_a_stop_while_a_spare_becomes_a_worker_leaves_nothing(after_s: float, tmp_path: Path) -> None:
    with serving(tmp_path, settings={**SETTINGS, "worker.count": 1}) as server:
        waiting_spare(server)
        kill(server.worker_pid())
        time.sleep(after_s)  # the fault itself, not a wait for something
        server.stop()
