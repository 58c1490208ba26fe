"""Whom a frontend that is being replaced asks to leave, and when it may write to a connection of gRPC's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from frontend.grpc import connections
from tests.harness.server import wait_until

Pair = tuple[socket.socket, socket.socket, int]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The server's and the client's side of a connection, and the server's port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            server, _ = listener.accept()
            with server:
                yield server, client, port


def read(client: socket.socket) -> bytes:
    """What has come, without waiting."""
    client.setblocking(False)
    try:
        return client.recv(4096)
    except BlockingIOError:
        return b""


def test_the_frame_is_that_of_rfc_9113() -> None:
    assert connections.GOAWAY.hex() == "0000080700000000007fffffff00000000"


def test_a_connection_that_has_said_hello_is_asked_once(pair: Pair) -> None:
    server, client, port = pair
    server.sendall(b"settings")
    wait_until(lambda: connections._is_between_frames(server), what="the acknowledgement")
    assert read(client) == b"settings"
    asyncio.run(connections.ask_all_to_leave(port, 1))
    assert read(client) == connections.GOAWAY
    asyncio.run(connections.ask_all_to_leave(port, 0.3))
    assert read(client) == connections.GOAWAY, "another farewell asks again"
    asked = {client.getsockname()}
    assert not connections._ask_new_peers(port, asked)
    assert read(client) == b""


def test_a_connection_without_a_hello_is_left_alone(pair: Pair) -> None:
    _, client, port = pair
    asyncio.run(connections.ask_all_to_leave(port, 0.2))
    assert read(client) == b""


def test_a_connection_with_bytes_on_their_way_is_left_alone(pair: Pair) -> None:
    server, client, port = pair
    server.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += server.send(b"x" * 65536)
    assert not connections._is_between_frames(server)
    assert connections._ask_new_peers(port, set())
    client.settimeout(60)
    got = b""
    while len(got) < sent:
        got += client.recv(65536)
    assert got == b"x" * sent
    wait_until(lambda: connections._is_between_frames(server), what="the acknowledgement")
    assert connections._ask_new_peers(port, set())
    client.settimeout(60)
    assert client.recv(100) == connections.GOAWAY


def test_connections_of_other_ports_are_left_alone(pair: Pair) -> None:
    server, client, port = pair
    server.sendall(b"settings")
    wait_until(lambda: connections._is_between_frames(server), what="the acknowledgement")
    assert not connections._ask_new_peers(port + 1 if port < 65535 else port - 1, set())
    assert read(client) == b"settings"


def test_a_connection_on_which_a_call_begins_during_a_look_stays(pair: Pair) -> None:
    server, client, port = pair
    calls = connections.CallsByConnection()
    limiter = connections.ConnectionLimiter(port, 0, 3600, calls)
    peer = connections.Peer.of(*client.getsockname())
    calls.begin(peer)
    assert limiter.look(frozenset(), {}) == 0, "the call was not known when the look began"
    server.sendall(b"answer")
    calls.end(peer)
    assert limiter.look(frozenset(), dict(calls.ended)) == 1
    with pytest.raises(BrokenPipeError):
        server.sendall(b"answer")
