"""R9: clients that vanish. Their queued work goes at once, the device never runs it, and nothing of them stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.holding import holding
from tests.fault import rounds, serving
from tests.harness.quiet import wait_quiet
from tests.harness.raw import RawClient
from tests.harness.server import Server, wait_until

MODEL = "fake/slow"
ONE_AT_A_TIME = {"batch.max_items": 1, "batch.bulk_tokens": 1_000_000, "arena.inline_bytes": 0}
LONG_TEXT = "device time " * 100
"""1200 characters: 301 tokens, 50 ms of the fake device."""
STAYING = 100
"""Texts of a request that keeps the device for five seconds."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker that runs one item per batch and puts every result into the arena."""
    models = (MODEL, "fake/large")
    with serving(tmp_path_factory.mktemp("gone"), models=models, settings=ONE_AT_A_TIME) as running:
        yield running


def in_flight(server: Server, count: int) -> bool:
    """Whether exactly `count` requests are in work."""
    return server.metric("penstock_requests_in_flight", model=MODEL) == count


def batches(server: Server) -> float:
    """Batches that the device has run."""
    return server.metric("penstock_batch_size_count", model=MODEL)


def cancelled(server: Server, stage: str) -> float:
    """Requests that the worker dropped in that stage."""
    return server.metric("penstock_cancelled_total", model=MODEL, stage=stage)


def answered(server: Server, status: str) -> float:
    """Requests that ended with that HTTP status."""
    return server.metric("penstock_requests_total", operation="encode", code=status)


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_queued_work_of_clients_that_left_goes_at_once_and_never_runs(server: Server, tmp_path: Path) -> None:
    ran, dropped = batches(server), cancelled(server, "queued")
    saved = server.metric("penstock_cancelled_saved_seconds_total", model=MODEL)
    with RawClient(server.port) as staying, holding(tmp_path) as hold:
        # Before its first batch the worker cannot tell what time is saved.
        texts = [LONG_TEXT, f"#hold {hold}", "formed meanwhile", "queued meanwhile"]
        staying.encode(MODEL, texts, accept="application/json")
        wait_until(lambda: in_flight(server, 1) and batches(server) > ran, what="the blocking request")
        leaving = [RawClient(server.port) for _ in range(8)]
        for number, client in enumerate(leaving):
            client.encode(MODEL, [f"leaving {number} {LONG_TEXT}"] * 5)
        wait_until(
            lambda: in_flight(server, 9) and server.metric("penstock_queue_depth", model=MODEL) > 7 * 5,
            what="eight requests behind it",
        )
        for client in leaving:
            client.close()
        wait_until(lambda: cancelled(server, "queued") == dropped + 8, what="eight cancellations")
        wait_until(lambda: in_flight(server, 1), what="the end of the eight requests")
        hold.unlink()
        status, body = staying.json()
    assert status == 200
    assert len(body["items"]) == len(texts)
    wait_until(lambda: batches(server) == ran + len(texts), what="the batches of the client that stayed")
    assert cancelled(server, "queued") == dropped + 8
    assert server.metric("penstock_cancelled_saved_seconds_total", model=MODEL) > saved
    wait_quiet(server)
    assert batches(server) == ran + len(texts), "work of clients that had left was run"


def test_work_on_the_device_ends_with_its_batch_and_the_rest_is_dropped(server: Server) -> None:
    ran = batches(server)
    client = RawClient(server.port)
    client.encode(MODEL, [f"{number} {LONG_TEXT}" for number in range(2 * STAYING)])
    wait_until(lambda: batches(server) > ran, what="the first batch")
    client.close()
    wait_until(lambda: cancelled(server, "running") > 0, what="a cancellation")
    wait_quiet(server)
    assert batches(server) - ran < STAYING, "the device went on for a client that had left"


@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_an_upload_that_its_client_leaves_is_no_bad_request(server: Server, framing: str) -> None:
    gone, refused = answered(server, "499"), answered(server, "400")
    head = f"POST /v1/encode/{MODEL} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    with RawClient(server.port) as client:
        client.socket.sendall(head.encode() + b'd\r\n{"items": []}\r\n')
        wait_until(lambda: client_is_read(server, client), what="the first bytes at the frontend")
    wait_until(lambda: answered(server, "499") == gone + 1, what="the end of the upload")
    assert answered(server, "400") == refused


def client_is_read(server: Server, client: RawClient) -> bool:
    """Whether the frontend has taken all that the client sent."""
    local = client.socket.getsockname()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{server.port:04X}") and fields[2].endswith(f":{local:04X}"):
            return fields[4].endswith(":00000000")
    return False


def is_lost(server: Server, pid: int) -> bool:
    """Whether the death of a worker has been noticed, or another one is there already."""
    return server.get("/readyz").status == 503 or server.worker_pid() not in (None, pid)


def test_a_client_that_leaves_while_a_worker_starts_costs_no_work(server: Server) -> None:
    gone, pid = answered(server, "499"), server.worker_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_lost(server, pid), what="the loss of the worker")
    with RawClient(server.port) as client:
        client.encode(MODEL, [f"nobody waits for {number} {LONG_TEXT}" for number in range(STAYING)])
        wait_until(lambda: client_is_read(server, client), what="the request at the frontend")
    wait_until(lambda: answered(server, "499") == gone + 1, what="the end of the request")
    wait_until(lambda: server.get("/readyz").status == 200, what="the next worker")
    wait_quiet(server)


def test_many_disconnects_leave_nothing(server: Server) -> None:
    frontend, worker = server.frontend_pids()[0], server.worker_pid()
    assert worker is not None
    assert server.encode("fake/large", ["warm"]).status == 200
    wait_quiet(server)
    before = descriptors(frontend), descriptors(worker)
    for turn in range(rounds(short=10, long=500)):
        clients = [RawClient(server.port, receive_nbytes=4096) for _ in range(20)]
        for number, client in enumerate(clients):
            if number % 4:
                client.encode(MODEL, [f"{turn} {number}"] * 3)
            else:
                client.encode("fake/large", [f"{turn} {number} {item}" for item in range(2)])
        if turn % 2:
            assert clients[0].head()[0] == 200
        for client in clients:
            client.close()
    wait_quiet(server)
    assert server.encode(MODEL, ["still here"]).status == 200
    wait_until(
        lambda: descriptors(frontend) <= before[0] + 2 and descriptors(worker) <= before[1] + 2,
        what="as few descriptors as before",
    )
    assert (server.frontend_pids(), server.worker_pid()) == ([frontend], worker)


@pytest.mark.sample(1)
@pytest.mark.parametrize("items", [500, 560, 620])
def test_a_client_that_leaves_behind_a_large_body_is_noticed(server: Server, items: int) -> None:
    before = answered(server, "499")
    with RawClient(server.port) as client:
        client.encode(MODEL, [f"{number} {LONG_TEXT}" for number in range(items)])
        wait_until(lambda: in_flight(server, 1), what="the request in work")
    wait_until(lambda: answered(server, "499") == before + 1, what="the end of the request")
    wait_quiet(server)
