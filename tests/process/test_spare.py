"""`worker.spare`: the slot of a killed worker goes to the process that waited for it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness.server import Server, serving, wait_until


def spare_pids(server: Server) -> list[int]:
    """Pids of all spares that were ever started, oldest first."""
    return [int(pid) for pid in re.findall(r"spare started \(pid (\d+)\)", server.log)]


@pytest.mark.long
def test_a_killed_worker_is_served_again_by_the_process_that_was_the_spare(tmp_path: Path) -> None:
    settings = {"worker.spare": 1, "worker.count": 1}
    # The notify socket of a supervisor that is killed is left to the next start.
    with serving(tmp_path, settings=settings, leftovers=True, fresh=True) as server:
        spare = wait_until(lambda: spare_pids(server), what="a spare")[0]
        worker = server.worker_pid()
        assert worker not in (None, spare)
        os.kill(worker or 0, signal.SIGKILL)
        wait_until(lambda: server.starts(0) == 2, what="the worker's return")
        assert server.worker_pid() == spare
        assert server.encode("fake/echo", ["again"]).status == 200
        second = wait_until(lambda: spare_pids(server)[1:], what="another spare")[0]
        os.kill(second, signal.SIGKILL)
        third = wait_until(lambda: spare_pids(server)[2:], what="one in the place of the dead spare")[0]
        assert third in server.pids()
        os.kill(server.supervisor_pid() or 0, signal.SIGKILL)
        wait_until(lambda: not server.pids(), what="the end of all processes, the spare's too")
        assert not server.arenas()
