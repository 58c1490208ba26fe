"""R12: shared memory that is full. Requests wait or get 503 with Retry-After, nothing crashes, and it recovers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.fault import rounds, serving
from tests.harness.quiet import wait_quiet
from tests.harness.raw import RawClient
from tests.harness.server import ROOT, Server, make_server, wait_until
from tests.harness.small_disk import small_disk

MIB = 1 << 20
DIMS = 262144
ARENA_NBYTES = 16 * MIB
ITEMS = 7
"""Items of a request: 7 MiB, so that the arena holds two answers and not a third."""
HOLD_S = 2.0
TRIES = 10
EXIT_CONFIG = 3
EXIT_UNFIT = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An arena for two answers, which slow readers keep for `HOLD_S`."""
    settings = {"arena.bytes": ARENA_NBYTES, "arena.lease_copy_after_s": HOLD_S}
    with serving(
        tmp_path_factory.mktemp("full"), models=("fake/large",), settings=settings, supervised=False
    ) as running:
        pid = running.worker_pid()
        yield running
        assert running.worker_pid() == pid, "the worker did not survive"


def ask(server: Server, name: str, **headers: str) -> RawClient:
    """A client that has asked for 7 MiB and reads nothing yet."""
    client = RawClient(server.port, receive_nbytes=64 << 10)
    client.encode("fake/large", [f"{name} {number}" for number in range(ITEMS)], headers=headers)
    return client


def fill(server: Server, stack: ExitStack) -> list[RawClient]:
    """Two clients that hold the whole arena by not reading."""
    clients = [stack.enter_context(ask(server, f"holder {number}")) for number in range(2)]
    for client in clients:
        assert client.head()[0] == 200
    return clients


def assert_right(body: bytes, name: str) -> None:
    """Every item of an answer is the vector of its text."""
    items = msgpack.unpackb(body, raw=False, strict_map_key=False)["items"]
    for number, item in enumerate(items):
        values = np.frombuffer(item["dense"]["values"][b"data"], "<f4")
        np.testing.assert_array_equal(values, vector_of(f"{name} {number}", DIMS).astype("<f4"))


def test_a_request_without_room_waits_until_a_slow_reader_has_lost_its_lease(server: Server) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        holders = fill(server, stack)
        status, _, body = stack.enter_context(ask(server, "third")).answer()
        assert status == 200
        assert_right(body, "third")
        assert time.monotonic() - began > HOLD_S * 0.9, "the arena was not full"
        for number, holder in enumerate(holders):
            assert_right(holder.read(holder.expected_nbytes), f"holder {number}")
    wait_quiet(server)


def test_a_request_without_room_before_its_deadline_gets_503_with_retry_after(server: Server) -> None:
    # NOTE: a frontend that has not heard of the worker in time answers 504 by itself, and where the request comes too
    # late, it gets the place of a holder.
    for _ in range(TRIES):
        with ExitStack() as stack:
            fill(server, stack)
            impatient = stack.enter_context(ask(server, "impatient", **{"X-Request-Timeout": "0.6"}))
            status, headers, body = impatient.answer()
            small = server.encode("fake/large", ["x"], timeout_s=10)
            assert small.status == 200, "a result for which there is room must not wait for ever"
        wait_quiet(server)
        if status == 503:
            break
    assert status == 503, body
    assert headers["x-sie-error-code"] == "RESOURCE_EXHAUSTED"
    assert int(headers["retry-after"]) >= 1


def test_many_large_answers_at_once_all_arrive_whole(server: Server) -> None:
    for turn in range(rounds(short=1, long=50)):
        with ExitStack() as stack:
            clients = [stack.enter_context(ask(server, f"{turn} {number}")) for number in range(8)]
            for number, client in enumerate(clients):
                status, _, body = client.answer()
                assert status == 200, body
                assert_right(body, f"{turn} {number}")
    wait_quiet(server)


def test_a_result_larger_than_the_arena_is_refused_with_both_sizes(server: Server) -> None:
    answer = server.encode("fake/large", ["x"] * 17)
    assert answer.status == 400
    detail = answer.json()["detail"]
    assert detail["code"] == "INVALID_INPUT"
    assert str(17 * MIB) in detail["message"]
    assert "arena.bytes" in detail["message"]


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk(tmp_path / "shm", 4 * MIB) as mount:
        yield mount


@pytest.mark.long
def test_a_worker_on_a_shm_that_is_too_small_exits_with_the_size_needed(
    small_shm: Path, tmp_path: Path
) -> None:
    server = make_server(tmp_path, settings={"run.shm_dir": small_shm, "arena.bytes": 8 * MIB})
    done = subprocess.run(
        [sys.executable, "-m", "workers", "--slot", "0"],
        cwd=ROOT,
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_UNFIT
    assert f"arena.bytes {8 * MIB}" in done.stderr
    assert str(small_shm) in done.stderr
    assert "Traceback" not in done.stderr
    server.assert_nothing_left()


def test_a_server_on_a_shm_that_is_too_small_does_not_start(small_shm: Path, tmp_path: Path) -> None:
    server = make_server(tmp_path, settings={"run.shm_dir": small_shm, "arena.bytes": 8 * MIB})
    server.fresh = False
    server.start()
    try:
        assert server.process.wait(60) == EXIT_CONFIG, server.log
        wait_until(lambda: not server.pids(), what="the end of all processes")
        assert f"arena.bytes {8 * MIB}" in server.log
        server.assert_nothing_left()
    finally:
        server.kill_everything()


@pytest.mark.long
def test_a_server_on_a_shm_that_just_holds_its_arena_serves(small_shm: Path, tmp_path: Path) -> None:
    settings = {"run.shm_dir": small_shm, "arena.bytes": 3 * MIB, "arena.inline_bytes": 0}
    with serving(tmp_path, models=("fake/echo",), settings=settings) as server:
        assert server.encode("fake/echo", ["fits"]).status == 200
