"""Strangers at the gRPC port, and callers that want all of it: calls, connections, messages that never come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from frontend.engine.answer import CopyBudget
from frontend.grpc import connections
from frontend.grpc.connections import Peer, host_of, surplus
from frontend.grpc.server import GrpcServer
from frontend.http.bodies import Places
from frontend.protocols.kserve_v2.grpc.service import KserveService
from frontend.protocols.trtis_v1.grpc import TrtisService
from frontend.server import state
from ipc.protos import kserve_v2_pb2 as pb
from tests.fakes.tensors import services_of
from tests.fuzz.http2 import END_HEADERS, HEADERS, PREFACE, RST_STREAM, SETTINGS, block, fields_of, frame
from tests.harness.ports import free_port

KSERVE, TRTIS = "/inference.GRPCInferenceService/", "/nvidia.inferenceserver.GRPCService/"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
CLOSED = (f"{KSERVE}ModelInfer", f"{KSERVE}ModelStreamInfer", f"{TRTIS}Infer", f"{TRTIS}StreamInfer",
          f"{TRTIS}SharedMemoryControl", REFLECTION, WATCH)  # fmt: skip
WEB, OPS = api_keys.fresh(), api_keys.fresh()
GATE = Gate(tuple(KeyEntry(name, api_keys.hashed(key)) for name, key in (("web", WEB), ("ops", OPS))))
PLACES = 16


class Running:
    """A server in this process, of which `door` is asked how things stand."""

    def __init__(self, server: GrpcServer, port: int) -> None:
        self.server, self.port = server, port
        self.door = server._server.door

    @property
    def taken(self) -> int:
        """Places that calls hold."""
        return self.door._places.limit - self.door._places.free

    async def answers(self, key: str = "") -> str:
        """How a fresh client fares, by the name of the status."""
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            ask = channel.unary_unary(f"{KSERVE}ModelReady", pb.ModelReadyRequest.SerializeToString, None)
            try:
                await ask(pb.ModelReadyRequest(name="none"), metadata=metadata, timeout=20)
            except aio.AioRpcError as error:
                return str(error.code().name)
        return "OK"


class Flood:
    """Calls of one connection that are opened and never go on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._number = 1
        self.ended: dict[int, bytes] = {}
        """What came for each call that has ended."""
        self.whole = b""
        self._hearing = asyncio.get_running_loop().create_task(self._hear())

    def open(self, path: str, count: int, **more: str) -> None:
        """Send the heads of so many calls."""
        for _ in range(count):
            head = block(fields_of(path, **more))
            self._writer.write(frame(HEADERS, END_HEADERS, self._number, head))
            self._number += 2

    def close(self) -> None:
        """Leave."""
        self._hearing.cancel()
        self._writer.close()

    async def _hear(self) -> None:
        heard: dict[int, bytes] = {}
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                data = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                stream = int.from_bytes(head[5:], "big")
                self.whole += head + data
                heard[stream] = heard.get(stream, b"") + data
                if head[3] == RST_STREAM:
                    self.ended[stream] = heard.pop(stream)


async def flood(port: int, host: str = "127.0.0.1") -> Flood:
    """A connection that has said hello, from an address of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    writer.write(PREFACE + frame(SETTINGS))
    return Flood(reader, writer)


async def until(done: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(root: Path, gate: Gate, **settings: str) -> AsyncIterator[Running]:
    port = free_port()
    made = services_of(
        root, [], [], grpc__bind=f"127.0.0.1:{port}", grpc__max_rpcs=str(PLACES),
        server__graceful_timeout_s="1", **settings,
    )  # fmt: skip
    made.access, made.started, made.slot = gate, True, 0
    made.copies = CopyBudget(1 << 20)
    made.recorder = SimpleNamespace(  # type: ignore[assignment]
        finished=lambda *_: None, refused=lambda *_: None, called=lambda *_: None, in_flight=lambda *_: None
    )
    server = GrpcServer(made, [KserveService(made.settings.kserve, made.restrictions), TrtisService(made)])
    await server.start()
    try:
        yield Running(server, port)
    finally:
        await server.stop()
        made.engine.client.inputs.close()


def play(
    root: Path, gate: Gate, session: Callable[[Running], Coroutine[Any, Any, None]], **settings: str
) -> None:
    async def run() -> None:
        async with running(root, gate, **settings) as server:
            await session(server)

    asyncio.run(run())


def test_a_call_without_a_valid_key_ends_on_its_head_and_holds_no_place(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        stranger = await flood(server.port)
        for path in CLOSED:
            stranger.open(path, 2 * PLACES)
            stranger.open(path, 1, authorization=f"Bearer {WEB}x")
            stranger.open(path, 1, x_api_key=api_keys.fresh())
        await until(lambda: len(stranger.ended) == len(CLOSED) * (2 * PLACES + 2))
        assert all(b"grpc-status\x0216" in told for told in stranger.ended.values()), "UNAUTHENTICATED"
        assert server.taken == 0
        assert await server.answers(WEB) == "OK"
        stranger.close()

    play(tmp_path, GATE, session)


def test_one_caller_leaves_places_for_others(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        greedy = await flood(server.port)
        greedy.open(f"{KSERVE}ModelStreamInfer", 3 * PLACES, authorization=f"Bearer {WEB}")
        await until(lambda: len(greedy.ended) == 3 * PLACES - PLACES // 2)
        assert server.taken == PLACES // 2
        assert await server.answers(WEB) == "UNAVAILABLE"
        assert await server.answers(OPS) == "OK"
        greedy.close()
        await until(lambda: server.taken == 0)
        assert await server.answers(WEB) == "OK"

    play(tmp_path, GATE, session)


def test_without_keys_the_address_is_the_caller(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        greedy = await flood(server.port, "127.0.0.2")
        greedy.open(f"{KSERVE}ModelStreamInfer", PLACES)
        greedy.open(WATCH, PLACES)
        greedy.open(REFLECTION, PLACES)
        await until(lambda: len(greedy.ended) == 3 * PLACES - PLACES // 2)
        assert await server.answers() == "OK"
        greedy.close()

    play(tmp_path, Gate(), session)


def test_health_checks_need_no_key_and_end_when_their_message_does_not_come(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        stranger = await flood(server.port)
        stranger.open(CHECK, 4 * PLACES)
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = channel.unary_unary(CHECK, None, health_pb2.HealthCheckResponse.FromString)
            answer = await check(b"", timeout=20)
            assert answer.status in (health_pb2.HealthCheckResponse.SERVING,
                                     health_pb2.HealthCheckResponse.NOT_SERVING)  # fmt: skip
        await until(lambda: len(stranger.ended) == 4 * PLACES)
        assert server.taken == 0 and server.door._open_places.free == server.door._open_places.limit
        stranger.close()

    play(tmp_path, GATE, session, server__header_deadline_s="2")


def test_a_message_that_never_comes_holds_a_place_no_longer_than_a_request_may_take(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        slow = await flood(server.port)
        slow.open(f"{KSERVE}ModelInfer", 2, authorization=f"Bearer {WEB}")
        await until(lambda: len(slow.ended) == 2)
        assert server.taken == 0
        slow.close()

    play(tmp_path, GATE, session, limits__request_timeout_s="0.5")


def test_messages_that_are_none_are_errors_of_the_client_and_print_no_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def session(server: Running) -> None:
        async with aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            with pytest.raises(aio.AioRpcError) as check:
                await channel.unary_unary(CHECK)(b"\xff\xff", timeout=20)
            with pytest.raises(aio.AioRpcError) as watch:
                [one async for one in channel.unary_stream(WATCH)(b"\xff\xff", timeout=20)]
            assert {check.value.code(), watch.value.code()} == {grpc.StatusCode.INVALID_ARGUMENT}
            stream = channel.stream_stream(REFLECTION)(iter([b"\xff\xff"]), timeout=20)
            assert [one async for one in stream], "an error of the contract"

    with caplog.at_level(logging.WARNING):
        play(tmp_path, Gate(), session)
    assert not [record for record in caplog.records if record.exc_info], caplog.text


def test_idle_connections_of_one_address_leave_room_for_others(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        connections = [await flood(server.port, "127.0.0.2")]
        connections[0].open(f"{KSERVE}ModelStreamInfer", 1)
        await until(lambda: server.taken == 1)
        connections += [await flood(server.port, "127.0.0.2") for _ in range(PLACES)]
        await until(lambda: sum(not one._hearing.done() for one in connections) <= PLACES // 2)
        assert not connections[0]._hearing.done(), "one that holds a call stays"
        # NOTE: gRPC's core counts a connection until the core has read its end, a while after the client has.
        async with asyncio.timeout(60):
            while await server.answers() != "OK":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for one in connections:
            one.close()

    play(tmp_path, Gate(), session, grpc__max_connections=str(PLACES))


def test_no_more_connections_are_taken_than_are_set_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NOTE: else a look between a connection and its call could end the connection as one of too many idle ones.
    monkeypatch.setattr(connections, "surplus", lambda *of: set())

    async def session(server: Running) -> None:
        kept = [await flood(server.port) for _ in range(4)]
        for one in kept:
            one.open(f"{KSERVE}ModelStreamInfer", 1)
        await until(lambda: server.taken == 4)
        more = await flood(server.port)
        more.open(f"{KSERVE}ModelStreamInfer", 1)
        await until(more._hearing.done)
        assert not any(one._hearing.done() for one in kept)
        for one in (*kept, more):
            one.close()

    play(tmp_path, Gate(), session, grpc__max_connections="4")


def test_idle_connections_end(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        idle, busy = await flood(server.port), await flood(server.port)
        busy.open(f"{KSERVE}ModelStreamInfer", 1, authorization=f"Bearer {WEB}")
        await until(idle._hearing.done)
        assert not busy._hearing.done(), "asked to leave without an error, then closed"
        assert connections.GOAWAY in idle.whole
        idle.close()
        busy.close()

    play(tmp_path, GATE, session, server__keepalive_s="1")


def test_a_caller_has_no_more_places_than_are_free() -> None:
    places = Places(10)
    assert sum(places.take("a") for _ in range(20)) == 5
    assert sum(places.take("b") for _ in range(20)) == 3
    assert sum(places.take("c") for _ in range(20)) == 1
    assert places.take("d") and not places.take("e")
    places.give("a")
    assert places.take("e")


def test_surplus_connections_are_the_oldest_idle_ones_of_who_has_most() -> None:
    since = {Peer("10.0.0.1", port): float(port) for port in range(70)}
    since |= {Peer("10.0.0.2", port): 1e9 for port in range(20)}
    ending = surplus(since, {Peer("10.0.0.1", 0)}, 100)
    assert ending == {Peer("10.0.0.1", port) for port in range(1, 51)}
    assert not surplus(since, (), 1000)


@pytest.mark.parametrize(
    ("name", "address", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::1", "2001:db8::/64"),
        ("ipv6:[::ffff:10.0.0.1]:5000", "10.0.0.1", "10.0.0.1"),
        ("unix:/run/x", "", ""),
    ],
)
def test_addresses_of_one_host_count_for_one_caller(name: str, address: str, host: str) -> None:
    peer = Peer.named(name)
    assert peer.address == address and host_of(peer) == host
    assert not address or Peer.of(address, 5000) == peer


def test_descriptors_are_set_apart_for_http_grpc_and_all_else() -> None:
    assert state.connection_shares((10_000, 2048), -1) == [10_000, 2048]
    assert state.connection_shares((10_000, 2048), 12_560) == [10_000, 2048]
    http, rpc = state.connection_shares((10_000, 2048), 1024)
    assert 0 < rpc < http and http + rpc + state.OTHERS <= 1024
    http, rpc = state.connection_shares((10_000, 2048), 64)
    assert http + rpc <= 32 and rpc >= 1


def test_a_connection_that_ended_is_forgotten(tmp_path: Path) -> None:
    async def session(server: Running) -> None:
        client = socket.create_connection(("127.0.0.1", server.port))
        client.close()
        assert await server.answers(WEB) == "OK"
        await until(lambda: not server.door.calls.running)

    play(tmp_path, GATE, session)
