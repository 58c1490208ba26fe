"""R3: kill -9 a frontend that holds leases."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fault import rounds, serving
from tests.harness.load import Load
from tests.harness.server import Server, wait_until

ITEMS = 8


def slow_reader(port: int) -> socket.socket:
    """A client that asks for 8 MiB and reads none of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    body = json.dumps({"items": [{"text": str(n)} for n in range(ITEMS)]}).encode()
    head = f"POST /v1/encode/fake/wide HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def owner(server: Server, connection: socket.socket) -> int | None:
    """Pid of the frontend that serves this connection."""
    port = connection.getsockname()[1]
    for pid in server.frontend_pids():
        if any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections("tcp")):
            return pid
    return None


def sessions(worker: int) -> int:
    """Frontends registered with the worker: it holds a pidfd of each."""
    found = 0
    for entry in Path(f"/proc/{worker}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(entry.readlink()) == "anon_inode:[pidfd]"
    return found


def used(server: Server) -> tuple[float, float]:
    """(bytes, leases) of all arenas."""
    return server.metric("penstock_shm_bytes_used"), server.metric("penstock_shm_leases")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends whose clients may read as slowly as they like."""
    settings = {
        "server.frontends": 2,
        "arena.lease_copy_after_s": 600,
        "arena.lease_max_age_s": 600,
        "server.write_stall_s": 600,
    }
    models = ("fake/wide", "fake/echo", "fake/slow")
    with serving(
        tmp_path_factory.mktemp("killed"), models=models, settings=settings, supervised=False
    ) as running:
        yield running


def test_leases_of_a_killed_frontend_come_back_and_it_is_replaced(server: Server) -> None:
    wait_until(lambda: len(server.frontend_pids()) == 2, what="two frontends")
    worker = wait_until(server.worker_pid)
    assert used(server) == (0, 0)
    wait_until(lambda: sessions(worker) == 2, what="two sessions")
    descriptors = psutil.Process(worker).num_fds()
    for _ in range(rounds(short=3, long=1000)):
        with slow_reader(server.port) as connection, slow_reader(server.port) as second:
            wait_until(lambda: used(server)[1] == 2, what="two leases")
            assert used(server)[0] > 2 * ITEMS << 20
            victims = {wait_until(lambda c=c: owner(server, c), what="owner") for c in (connection, second)}
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            wait_until(lambda: _asked(server) == (0, 0), what="an empty arena")
            wait_until(
                lambda gone=victims: (
                    len(server.frontend_pids()) == 2 and not gone & {*server.frontend_pids()}
                ),
                what="new frontends",
            )
    assert server.worker_pid() == worker
    wait_until(lambda: sessions(worker) == 2, what="two sessions again")
    wait_until(lambda: psutil.Process(worker).num_fds() <= descriptors, what="the same number of descriptors")


def _asked(server: Server) -> tuple[float, float] | None:
    """`used`, or None while no frontend answers."""
    try:
        return used(server)
    except OSError:
        return None


def test_only_connections_of_the_killed_frontend_fail(server: Server) -> None:
    wait_until(lambda: len(server.frontend_pids()) == 2, what="two frontends")
    with Load(server.port, clients=16, model="fake/slow") as load:
        wait_until(lambda: load.done > 100, what="traffic")
        victim = server.frontend_pids()[0]
        served = len(
            [c for c in psutil.Process(victim).net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
        )
        os.kill(victim, signal.SIGKILL)
        seen = load.done
        wait_until(lambda: load.done > seen + 100, what="traffic afterwards")
        outcome = load.stop()
    assert len(outcome.broken) <= served
    assert set(outcome.statuses) == {200}
    assert outcome.wrong == 0
