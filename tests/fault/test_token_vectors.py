"""Token vectors, whose place is known only once their texts are tokens, under a full arena, kills and disconnects."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.fakes.adapter import terms_of, token_vectors_of, vector_of
from tests.fault import serving, three
from tests.harness.quiet import wait_quiet
from tests.harness.raw import RawClient
from tests.harness.server import Server, alive, wait_until

MODEL = "fake/tokens"
TOKEN_DIMS, TERMS, DIMS = 2048, 300, 16
HOLD_S = 2.0
TRIES = 10
FOR_EVER_S = 600.0
SETTINGS = {
    "arena.bytes": 20 << 20,
    "worker.healthy_after_s": 0.5,
    "limits.restart_wait_s": 40,
}
"""Room for two answers of 8 MiB, which slow readers keep."""


def keep_leases(place: Path, seconds: float) -> Path:
    """Settings with which slow readers keep an answer for so long."""
    config = place / "server.yaml"
    config.write_text(f"arena: {{lease_copy_after_s: {seconds}}}\n")
    return config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps its files."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def hasty(place: Path) -> Iterator[Server]:
    """One worker with a model that gives dense, sparse and token vectors by default; leases end after `HOLD_S`."""
    with serving(place, three((MODEL,)), settings=SETTINGS, config=keep_leases(place, HOLD_S)) as running:
        yield running


@pytest.fixture(scope="module")
def server(hasty: Server, place: Path) -> Server:
    """The same, whose leases last as long as a test wants."""
    keep_leases(place, FOR_EVER_S)
    before = hasty.frontend_pids()
    hasty.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not any(map(alive, before)), what="the end of the old frontend")
    hasty.wait_ready()
    return hasty


def long_texts(name: str) -> list[str]:
    """Two texts of 512 tokens: 8 MiB of token vectors, more than the kernel's buffers take."""
    return [f"{name} {number} ".ljust(2047, "x") for number in range(2)]


def ask(server: Server, texts: list[str], **headers: str) -> RawClient:
    """A client that has asked for all outputs of texts and reads nothing yet."""
    client = RawClient(server.port, receive_nbytes=64 << 10)
    client.encode(MODEL, texts, headers=headers)
    return client


def assert_right(body: bytes, texts: list[str]) -> None:
    """Every item of a msgpack answer is its text's, in all outputs."""
    items = msgpack.unpackb(body, raw=False, strict_map_key=False)["items"]
    for text, item in zip(texts, items, strict=True):
        found = {name: _array(item[name]["values"]) for name in ("dense", "sparse", "multivector")}
        np.testing.assert_array_equal(found["dense"], vector_of(text, DIMS))
        assert found["sparse"].tolist() == list(terms_of(text, TERMS).values())
        expected = token_vectors_of(text, min(512, len(text) // 4 + 1), TOKEN_DIMS)
        np.testing.assert_array_equal(found["multivector"], expected)


def _array(packed: dict[bytes, object]) -> np.ndarray:
    return np.frombuffer(packed[b"data"], packed[b"type"]).reshape(packed[b"shape"])  # type: ignore[call-overload,no-any-return]


def fill(server: Server, stack: ExitStack) -> list[tuple[RawClient, list[str]]]:
    """Two clients that hold the arena by not reading, with their texts."""
    held = []
    for number in range(2):
        texts = long_texts(f"holder {number}")
        client = stack.enter_context(ask(server, texts))
        assert client.head()[0] == 200
        held.append((client, texts))
    return held


def test_token_vectors_without_room_wait_until_a_slow_reader_has_lost_its_lease(hasty: Server) -> None:
    with ExitStack() as stack:
        began = time.monotonic()
        held = fill(hasty, stack)
        status, _, body = stack.enter_context(ask(hasty, long_texts("third"))).answer()
        assert status == 200
        assert time.monotonic() - began > HOLD_S * 0.9, "the arena was not full"
        assert_right(body, long_texts("third"))
        for client, texts in held:
            assert_right(client.read(client.expected_nbytes), texts)
    wait_quiet(hasty)


def test_token_vectors_without_room_before_the_deadline_get_503_and_small_ones_pass(server: Server) -> None:
    # A frontend that has not heard of the worker in time answers 504 by itself.
    for _ in range(TRIES):
        with ExitStack() as stack:
            fill(server, stack)
            late = stack.enter_context(ask(server, long_texts("late"), **{"X-Request-Timeout": "1.0"}))
            refused, headers, told = late.answer()
            status, _, body = stack.enter_context(ask(server, ["small"])).answer()
        assert status == 200
        assert_right(body, ["small"])
        wait_quiet(server)
        if refused != 504:
            break
    assert (refused, headers["x-sie-error-code"]) == (503, "RESOURCE_EXHAUSTED"), told
    assert int(headers["retry-after"]) >= 1


def test_a_client_that_leaves_while_its_token_vectors_wait_for_room_leaves_nothing(server: Server) -> None:
    waiting = server.metric("penstock_cancelled_total", model=MODEL)
    with ExitStack() as stack:
        held = fill(server, stack)
        leaving = ask(server, long_texts("leaving"))
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=MODEL) == 1, what="a third")
        leaving.close()
        wait_until(
            lambda: server.metric("penstock_cancelled_total", model=MODEL) > waiting, what="its cancellation"
        )
        for client, texts in held:
            assert_right(client.read(client.expected_nbytes), texts)
    wait_quiet(server)
    assert server.encode(MODEL, long_texts("after")).status == 200


@pytest.mark.long
def test_a_worker_killed_while_its_answers_are_read_and_others_wait_loses_no_answer(server: Server) -> None:
    with ExitStack() as stack:
        held = fill(server, stack)
        parked = stack.enter_context(ask(server, long_texts("parked")))
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=MODEL) == 1, what="a third")
        pid = server.worker_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for client, texts in held:
            assert_right(client.read(client.expected_nbytes), texts)
        status, _, body = parked.answer()
        assert status == 200, body
        assert_right(body, long_texts("parked"))
    assert server.worker_pid() != pid
    wait_quiet(server)


def test_items_that_fail_while_being_prepared_leave_the_rows_of_the_others_in_place(server: Server) -> None:
    texts = [f"text {number} ".ljust(number % 37, "y") for number in range(300)]
    for lost in (0, 130, 131, 299):
        texts[lost] = f"#lost {lost}"
    with RawClient(server.port) as client:
        client.encode(MODEL, texts, headers={"X-Penstock-Item-Errors": "1"})
        status, _, body = client.answer()
    assert status == 200
    items = msgpack.unpackb(body, raw=False, strict_map_key=False)["items"]
    assert [at for at, item in enumerate(items) if "error" in item] == [0, 130, 131, 299]
    for text, item in zip(texts, items, strict=True):
        if "error" not in item:
            expected = token_vectors_of(text, len(text) // 4 + 1, TOKEN_DIMS)
            np.testing.assert_array_equal(_array(item["multivector"]["values"]), expected)
            assert _array(item["sparse"]["values"]).tolist() == list(terms_of(text, TERMS).values())
    wait_quiet(server)


def test_token_vectors_larger_than_the_arena_are_refused_with_both_sizes(server: Server) -> None:
    answer = server.encode(MODEL, long_texts("x") * 3)
    detail = answer.json()["detail"]
    assert (answer.status, detail["code"]) == (400, "INVALID_INPUT")
    assert "arena.bytes" in detail["message"] and str(3 * 8 << 20)[:4] in detail["message"]
    wait_quiet(server)
