"""R4: kill -9 the arbiter, the supervisor, everything; nobody is orphaned and the next start needs no hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.fault import rounds, three
from tests.harness.server import PATIENCE_S, Server, make_server, stopped, wait_until

GONE_AFTER_S = PATIENCE_S
EACH = rounds(short=1, long=2)
"""Workers, and frontends."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that each test finds running and leaves running."""
    server = make_server(
        tmp_path_factory.mktemp("killed"),
        three(("fake/echo",)),
        settings={"worker.count": EACH, "server.frontends": EACH},
    )
    server.fresh = False
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
    assert_serves(server)


def assert_serves(server: Server) -> None:
    """A started server becomes ready, with one arena and one socket per worker."""
    server.wait_ready()
    wait_until(lambda: server.metric("penstock_worker_up") == EACH, what="all workers")
    assert server.encode("fake/echo", ["after the restart"]).status == 200
    assert len(server.arenas()) == EACH
    assert len(list(server.run_dir.glob("worker-*.sock"))) == EACH
    assert server.metric("penstock_shm_bytes_used") == 0


def test_after_the_death_of_the_arbiter_everything_ends(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    wait_until(lambda: not server.pids(), GONE_AFTER_S, "the end of all processes")
    server.assert_nothing_left()
    assert_starts_again(server)


def test_a_start_before_the_frontends_of_a_dead_arbiter_have_ended_waits_for_their_addresses(
    server: Server,
) -> None:
    starts, supervisor = server.log.count("starts in"), server.supervisor_pid()
    with stopped(*server.frontend_pids()):
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
        server.start()
        wait_until(
            lambda: server.owner_pid() == server.process.pid, what="the new owner of the run directory"
        )
        assert server.process.poll() is None
        assert server.log.count("starts in") == starts, "it began before the addresses were free"
    wait_until(lambda: server.supervisor_pid() not in (None, supervisor), what="the new supervisor")
    assert_serves(server)


def test_after_the_death_of_the_supervisor_the_server_ends_as_a_unit(server: Server) -> None:
    supervisor = server.supervisor_pid()
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not server.pids(), GONE_AFTER_S, "the end of all processes")
    assert server.process.wait(60) != 0
    assert not server.arenas()
    assert_starts_again(server)


def test_after_the_death_of_everything_at_once_the_next_start_needs_no_hand(server: Server) -> None:
    server.kill_all_processes()
    wait_until(lambda: not server.pids(), what="the end of all processes")
    assert len(server.arenas()) == EACH
    assert_starts_again(server)
