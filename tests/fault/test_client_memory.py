"""Clients' shared memory that shrinks, vanishes or is unregistered under requests, and processes that die around it."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.processes.paths import SHM_ROOT
from tests.fault import rounds
from tests.harness.server import Answer, Server, serving, wait_until
from tests.harness.shared import ClientObject, client_object, in_region, infer, register, unregister
from tests.tiny.programs import SCRIPTED, write_repository

COUNT = 1 << 18
NBYTES = 4 * COUNT
MODELS = ("identity_fp32", "slow")
VALUES = np.arange(COUNT, dtype=np.float32)
KNOWN = (
    "Unable to open shared memory region",
    "Unable to find shared memory region",
    "Invalid shared memory region",
    "its object has shrunk",
)


@contextmanager
def server_of(tmp_path: Path, **settings: Any) -> Iterator[Server]:
    """A server that has an identity of FP32 and offers shared memory."""
    chosen = {
        "repository.dirs": write_repository(tmp_path / "models", MODELS, SCRIPTED),
        "repository.allow_python": "true",
        "shared_memory.enabled": "true",
        **settings,
    }
    with serving(tmp_path, ("fake/echo",), chosen) as running:
        wait_until(lambda: _ready(running), what="the models")
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends over one worker."""
    with server_of(tmp_path_factory.mktemp("memory"), **{"server.frontends": 2}) as running:
        yield running


def through(region: str) -> dict[str, Any]:
    """A request whose input and output fill the two halves of a region."""
    return {
        "inputs": [in_region("INPUT", region, 0, NBYTES, datatype="FP32", shape=[1, COUNT])],
        "outputs": [in_region("OUTPUT", region, NBYTES, NBYTES)],
    }


def descriptors(pid: int | None) -> list[str]:
    """Objects of clients that a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(f"{SHM_ROOT}/client_"):
            found.append(target)
    return found


class Asking:
    """Threads that send one request after the other until they are stopped; the answers by status."""

    def __init__(self, server: Server, request: dict[str, Any], threads: int = 3) -> None:
        self._server, self._request, self._stop = server, request, threading.Event()
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            self.answers.append(infer(self._server, "identity_fp32", self._request))

    def good(self) -> int:
        """Answers with 200 so far."""
        return sum(answer.status == 200 for answer in list(self.answers))

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def refused_for_their_memory(answers: list[Answer]) -> None:
    """Every answer that is not good names what is wrong with the region."""
    for answer in answers:
        if answer.status != 200:
            assert answer.status in (400, 404), answer.body
            assert any(text in answer.json()["error"] for text in KNOWN), answer.body


def check_whole(server: Server, memory: ClientObject, region: str) -> None:
    """A request through a region gives the client what it wrote."""
    memory.write(VALUES)
    memory.write(np.zeros(COUNT, np.float32), NBYTES)
    assert infer(server, "identity_fp32", through(region)).status == 200
    assert (memory.read("<f4", NBYTES, COUNT) == VALUES).all()


def test_an_object_that_shrinks_and_grows_all_the_time_harms_only_its_requests(server: Server) -> None:
    chance = random.Random(11)
    with client_object(2 * NBYTES) as memory:
        worker = server.worker_pid()
        assert register(server, "r", memory.key, 2 * NBYTES).status == 200
        with Asking(server, through("r")) as asking:
            for _ in range(rounds(short=40, long=3000)):
                memory.truncate(chance.choice((0, 1, NBYTES - 1, NBYTES, NBYTES + 4097, 2 * NBYTES)))
                until = len(asking.answers)
                wait_until(lambda until=until: len(asking.answers) > until, what="the next answer")
            memory.truncate(2 * NBYTES)
            good = asking.good()
            wait_until(lambda: asking.good() > good, what="a good answer")
        refused_for_their_memory(asking.answers)
        assert any(answer.status == 400 for answer in asking.answers)
        check_whole(server, memory, "r")
        assert server.worker_pid() == worker
        wait_until(lambda: not descriptors(worker), what="the object to be closed")
        assert unregister(server, "r").status == 200


def test_unregistering_under_load_ends_in_unknown_regions_and_nothing_stays_open(server: Server) -> None:
    with client_object(2 * NBYTES) as memory:
        worker = server.worker_pid()
        assert register(server, "r", memory.key, 2 * NBYTES).status == 200
        with Asking(server, through("r")) as asking:
            for _ in range(rounds(short=5, long=300)):
                good = asking.good()
                wait_until(lambda good=good: asking.good() > good, what="a good answer")
                assert unregister(server, "r").status == 200
                # The name is taken until the requests that use the region have ended.
                wait_until(
                    lambda: register(server, "r", memory.key, 2 * NBYTES).status == 200,
                    what="the next region",
                )
            unregister(server, "r")
        refused_for_their_memory(asking.answers)
        assert infer(server, "identity_fp32", through("r")).status == 404
        wait_until(lambda: not descriptors(worker), what="the object to be closed")


@pytest.mark.long
def test_a_request_that_has_begun_keeps_memory_that_is_unregistered_and_unlinked(tmp_path: Path) -> None:
    with server_of(tmp_path) as server, client_object(8) as memory:
        memory.write(np.array([1500, 0], np.float32))
        register(server, "r", memory.key, 8)
        request = {
            "inputs": [in_region("INPUT", "r", 0, 4, datatype="FP32", shape=[1, 1])],
            "outputs": [in_region("OUTPUT", "r", 4, 4)],
        }
        held = memory.path.open("rb")
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(infer(server, "slow", request)))
        thread.start()
        wait_until(lambda: descriptors(server.worker_pid()), what="the request to begin")
        unregister(server, "r")
        memory.path.unlink()
        thread.join(60)
        assert answers[0].status == 200, answers[0].body
        assert np.frombuffer(held.read(), np.float32)[1] == 1500
        held.close()
        wait_until(lambda: not descriptors(server.worker_pid()), what="the object to be closed")


@pytest.mark.long
def test_regions_stay_when_frontends_and_workers_are_killed(tmp_path: Path) -> None:
    # NOTE: every life counts as a healthy one, or the delays before the next would double with each kill.
    with (
        server_of(tmp_path, **{"worker.healthy_after_s": 0.1}) as server,
        client_object(2 * NBYTES) as memory,
    ):
        register(server, "r", memory.key, 2 * NBYTES)
        for _ in range(rounds(short=2, long=30)):
            frontend, worker = server.frontend_pids()[0], server.worker_pid()
            assert worker is not None
            os.kill(frontend, signal.SIGKILL)
            wait_until(lambda gone=frontend: server.frontend_pids() not in ([], [gone]), what="a frontend")
            wait_until(lambda: _ready(server), what="the server")
            assert [region["name"] for region in server.get("/v2/systemsharedmemory/status").json()] == ["r"]
            check_whole(server, memory, "r")
            os.kill(worker, signal.SIGKILL)
            wait_until(lambda gone=worker: server.worker_pid() not in (None, gone), what="a worker")
            wait_until(lambda: _ready(server), what="the models")
            check_whole(server, memory, "r")
        assert memory.path.exists()


def _ready(server: Server) -> bool:
    try:
        return all(server.get(f"/v2/models/{model}/ready", timeout_s=5).status == 200 for model in MODELS)
    except OSError:
        return False


@pytest.mark.long
def test_the_next_start_knows_no_region_and_leaves_the_clients_object(tmp_path: Path) -> None:
    with client_object(64) as memory:
        with server_of(tmp_path) as server:
            register(server, "r", memory.key, 64)
        server.start()
        server.wait_ready()
        assert server.get("/v2/systemsharedmemory/status").json() == []
        server.stop()
        assert memory.path.stat().st_size == 64
