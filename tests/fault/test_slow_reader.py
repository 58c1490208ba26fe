"""R10: a client that reads a 100 MB answer slowly or stops reading holds neither shared memory nor other clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest

from tests.fakes.adapter import vector_of
from tests.fault import rounds, serving
from tests.harness.broker import Broker
from tests.harness.cluster import WAYS, bridge_beside, gateway
from tests.harness.quiet import OF_THE_ARENA, wait_quiet
from tests.harness.raw import RawClient
from tests.harness.server import Server, wait_until

DIMS = 262144
ITEM_NBYTES = DIMS * 4
ITEMS = 100
BESIDE = 40
"""Items for whose answer there is room beside a copy of a large one."""
COPY_AFTER_S = 1.5
ONE_PIECE = 64
"""Items of a request that a gateway does not cut; room is for two such answers."""
STALL_S = 3.0
MIB = 1 << 20
RECEIVE_NBYTES = 64 << 10
SETTINGS = {
    "arena.bytes": 256 * MIB,
    "arena.lease_copy_after_s": COPY_AFTER_S,
    "arena.copy_out_bytes": 150 * MIB,
}
"""An arena that holds two answers of 100 MiB, and room for one private copy of one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose clients may stop reading for longer than a test takes."""
    settings = {**SETTINGS, "server.write_stall_s": 600}
    with serving(
        tmp_path_factory.mktemp("slow"), models=("fake/large",), settings=settings, supervised=False
    ) as running:
        yield running


@pytest.fixture(scope="module")
def near(server: Server, place: Path, one_broker: Broker) -> Iterator[Server]:
    """A gateway over the workers of `server`, with the same settings."""
    settings = {**SETTINGS, "server.write_stall_s": 600}
    with (
        bridge_beside(server, one_broker.url),
        gateway(place / "near", [one_broker.url], settings) as running,
    ):
        wait_until(lambda: running.encode("fake/large", ["x"]).status == 200, what="the first answer")
        yield running


@pytest.fixture(params=WAYS)
def either(request: pytest.FixtureRequest, server: Server) -> Server:
    """`server`, or the gateway over its workers."""
    if request.param == "workers":
        return server
    found: Server = request.getfixturevalue("near")
    return found


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Server]:
    """A server that drops clients which have stopped reading for `STALL_S`."""
    settings = {**SETTINGS, "server.write_stall_s": STALL_S}
    with serving(tmp_path, models=("fake/large",), settings=settings, supervised=False) as running:
        yield running


def texts(name: str, items: int = ITEMS) -> list[str]:
    """The inputs of one large request."""
    return [f"{name} {number}" for number in range(items)]


def asked(server: Server, name: str, items: int = ITEMS) -> RawClient:
    """A client with a small receive buffer that has asked for so many MiB and read only the head."""
    client = RawClient(server.port, RECEIVE_NBYTES)
    ask(client, name, items)
    return client


def ask(client: RawClient, name: str, items: int = ITEMS) -> None:
    """Ask for so many MiB and read only the head."""
    client.encode("fake/large", texts(name, items))
    assert client.head()[0] == 200
    assert client.expected_nbytes > items * ITEM_NBYTES


def resident_nbytes(server: Server) -> int:
    """Private and shared resident memory of the only frontend, less the arena that it maps."""
    memory = psutil.Process(server.frontend_pids()[0]).memory_info()
    return int(memory.rss - memory.shared)


def wait_free_arena(server: Server) -> None:
    """Wait until no block of the arena is in use, in a sample that is later than this call."""
    wait_quiet(server, gauges=OF_THE_ARENA)


def connections(server: Server) -> int:
    """Connections that the frontend serves; those of `Server.metric` have ended when it returns."""
    process = psutil.Process(server.frontend_pids()[0])
    return sum(
        1
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.laddr.port == server.port
    )


def assert_right(body: bytes, name: str, asked_for: int = ITEMS) -> None:
    """Every item of the answer is the vector of its text."""
    items = msgpack.unpackb(body, raw=False, strict_map_key=False)["items"]
    assert len(items) == asked_for
    for item, sent in zip(items, texts(name, asked_for), strict=True):
        values = np.frombuffer(item["dense"]["values"][b"data"], "<f4")
        np.testing.assert_array_equal(values, vector_of(sent, DIMS).astype("<f4"))


def test_the_arena_is_free_while_a_slow_client_still_reads_and_the_body_arrives_whole(server: Server) -> None:
    before = resident_nbytes(server)
    for turn in range(rounds(short=1, long=20)):
        with asked(server, f"slow {turn}") as client:
            parts = [client.read(MIB)]
            wait_free_arena(server)
            held = resident_nbytes(server) - before
            assert held < ITEMS * ITEM_NBYTES + 48 * MIB, f"{held >> 20} MiB held for one slow reader"
            parts.append(client.read(client.expected_nbytes - MIB))
        assert_right(b"".join(parts), f"slow {turn}")
        wait_until(lambda: resident_nbytes(server) - before < 48 * MIB, what="the private copy's end")


def test_a_fast_client_gets_the_same_body_while_others_do_not_read(server: Server) -> None:
    # On a busy machine the fast one is slower than the time after which answers are copied, and needs room for its own.
    with asked(server, "idle"), asked(server, "fast", BESIDE) as fast:
        body = fast.read(fast.expected_nbytes)
        assert_right(body, "fast", BESIDE)
        assert server.encode("fake/large", ["small"]).status == 200
    wait_quiet(server)


def test_a_client_that_stops_reading_is_dropped_and_its_memory_comes_back(strict: Server) -> None:
    before = resident_nbytes(strict)
    for turn in range(rounds(short=1, long=20)):
        began = time.monotonic()
        with RawClient(strict.port, RECEIVE_NBYTES) as client:
            wait_until(lambda: connections(strict) == 1, what="the connection")
            ask(client, f"stalled {turn}")
            wait_free_arena(strict)
            wait_until(lambda: connections(strict) == 0, what="the end of the connection")
            assert time.monotonic() - began > STALL_S * 0.8, "dropped before the time allowed"
            with pytest.raises(OSError, match=r"reset|ended"):
                client.read(client.expected_nbytes)
        wait_until(lambda: resident_nbytes(strict) - before < 48 * MIB, what="the private copy's end")
    assert strict.encode("fake/large", ["still here"]).status == 200


@pytest.mark.long
def test_slow_readers_beyond_the_room_for_copies_are_cut_off_and_the_arena_is_free(
    either: Server, server: Server
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(asked(either, f"crowd {number}")) for number in range(2)]
        wait_free_arena(server)
        outcomes = []
        for number, client in enumerate(clients):
            try:
                body = client.read(client.expected_nbytes)
            except OSError:
                outcomes.append("cut")
            else:
                assert_right(body, f"crowd {number}")
                outcomes.append("whole")
    assert sorted(outcomes) == ["cut", "whole"]
    wait_quiet(server)


@pytest.mark.long
def test_answers_of_one_piece_wait_at_a_gateway_until_slow_readers_have_theirs(
    near: Server, server: Server
) -> None:
    before = resident_nbytes(near)
    with asked(near, "first", ONE_PIECE) as first, asked(near, "second", ONE_PIECE) as second:
        with RawClient(near.port, RECEIVE_NBYTES) as third:
            third.encode("fake/large", texts("third", ONE_PIECE))
            wait_until(lambda: near.metric("penstock_requests_in_flight") == 1, what="the third request")
            wait_free_arena(server)
            assert near.encode("fake/echo", ["small"]).status == 200
            held = resident_nbytes(near) - before
            assert held < SETTINGS["arena.copy_out_bytes"] + 48 * MIB, f"{held >> 20} MiB held"
            assert_right(first.read(first.expected_nbytes), "first", ONE_PIECE)
            assert third.head()[0] == 200
            assert_right(third.read(third.expected_nbytes), "third", ONE_PIECE)
        assert_right(second.read(second.expected_nbytes), "second", ONE_PIECE)
    wait_until(lambda: resident_nbytes(near) - before < 48 * MIB, what="the end of the answers")
