"""R4: kill -9 the arbiter, the supervisor, everything; nobody is orphaned and the next start needs no hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.fault import three
from tests.harness.server import Server, make_server, wait_until

GONE_AFTER_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that each test finds running and leaves running."""
    server = make_server(
        tmp_path_factory.mktemp("killed"),
        three(("fake/echo",)),
        settings={"worker.count": 2, "server.frontends": 2},
    )
    server.start()
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
    finally:
        server.kill_everything()


def assert_starts_again(server: Server) -> None:
    """The next start works on what the last one left, and leaves one arena and one socket per worker."""
    server.start()
    server.wait_ready()
    wait_until(lambda: server.metric("penstock_worker_up") == 2, 30, "two workers")
    assert server.encode("fake/echo", ["after the restart"]).status == 200
    assert len(server.arenas()) == 2
    assert len(list(server.run_dir.glob("worker-*.sock"))) == 2
    assert server.metric("penstock_shm_bytes_used") == 0


def test_after_the_death_of_the_arbiter_everything_ends(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(10)
    wait_until(lambda: not server.pids(), GONE_AFTER_S, "the end of all processes")
    server.assert_nothing_left()
    assert_starts_again(server)


def test_after_the_death_of_the_supervisor_the_server_ends_as_a_unit(server: Server) -> None:
    supervisor = server.supervisor_pid()
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not server.pids(), GONE_AFTER_S, "the end of all processes")
    assert server.process.wait(10) != 0
    assert not server.arenas()
    assert_starts_again(server)


def test_after_the_death_of_everything_at_once_the_next_start_needs_no_hand(server: Server) -> None:
    server.kill_all_processes()
    wait_until(lambda: not server.pids(), 10, "the end of all processes")
    assert len(server.arenas()) == 2
    assert_starts_again(server)
