"""What a test process that is killed leaves behind: no server, no arena, no socket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.server import ROOT, alive, wait_until

TESTS = """
import os, sys
from pathlib import Path
from tests.harness.nursery import Forked, Order, start

place, arenas, program = sys.argv[1:]
path = Path(place) / "nursery"
start(path, (), dict(os.environ))
server = {"PENSTOCK_RUN__SHM_DIR": arenas, "PENSTOCK_RUN__INSTANCE": "t1"}
Forked(path, Order({**os.environ, **server}, [arenas], place, program=program))
sys.stdin.read()
"""
SERVER = """
import fcntl, os, signal, sys

arena = os.open(sys.argv[1] + "/penstock.t1.f0.1", os.O_RDWR | os.O_CREAT)
fcntl.flock(arena, fcntl.LOCK_EX)
if os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Directory of the nursery's socket, and that of the arenas, where an arena of another server lies too."""
    place, arenas = tmp_path / "nurseries", tmp_path / "shm"
    for each in (place, arenas):
        each.mkdir()
    (arenas / "penstock.t2.f0.1").touch()
    return place, arenas


@pytest.fixture
def tests(places: tuple[Path, Path]) -> Iterator[subprocess.Popen[str]]:
    """A test process whose server has begun."""
    command = [sys.executable, "-c", TESTS, *map(str, places), SERVER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_killed_test_process_takes_its_servers_and_their_arenas_along(
    places: tuple[Path, Path], tests: subprocess.Popen[str]
) -> None:
    place, arenas = places
    assert tests.stdout is not None
    server = list(map(int, tests.stdout.readline().split()))
    assert len(server) == 2 and all(map(alive, server))
    assert (place / "nursery").is_socket()
    tests.kill()
    wait_until(lambda: not any(map(alive, server)), what="the end of the server and of what it has forked")
    wait_until(lambda: not place.exists(), what="the end of the nursery")
    assert [arena.name for arena in arenas.iterdir()] == ["penstock.t2.f0.1"]
