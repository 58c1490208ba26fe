"""What arrives or is sent in one turn travels together, on both sides of the socket."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from frontend.engine.local import dealer
from frontend.engine.local.channel import Channel
from ipc.errors import WorkerLost
from ipc.memory.arena import BLOCKS_OFFSET, Arena, Block, LeaseTable
from ipc.memory.input_arena import InputArena, InputBlock
from ipc.processes.paths import RunPaths
from ipc.wire import codec
from ipc.wire.messages import Cancel, EncodeCall, InputItem, Inputs, Leaving, Ping, Pong, Submit, Work
from tests.fakes.clock import Clock
from workers.endpoint import endpoint as router
from workers.endpoint.endpoint import Endpoint
from workers.endpoint.sessions import Handler, Session

WORK = Work("m", EncodeCall([InputItem("text")], ["dense"]), 2**62, 9, "req")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A bare ROUTER at `tmp_path/socket`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"ipc://{tmp_path}/socket")
    yield socket
    context.destroy()


async def until_connected(connected: dealer.Dealer) -> None:
    """Return once the socket takes messages; one Ping has left then."""
    async with asyncio.timeout(60):
        connected.put(Ping(0))
        while not connected.flush():
            await asyncio.sleep(0.001)
            connected.put(Ping(0))


def test_messages_of_one_turn_leave_in_one_bundle_and_those_of_the_next_in_another(
    peer: zmq.Socket[bytes], tmp_path: Path
) -> None:
    async def run() -> None:
        sent: list[bool] = []
        socket = dealer.connect(peer.context, tmp_path / "socket", "f0")
        connected = dealer.Dealer(socket, lambda message, payload: None, sent.append)
        await until_connected(connected)
        assert len(peer.recv_multipart()) == 2
        connected.put(Ping(1))
        connected.put(Cancel(2), b"raw")
        connected.put(Ping(3))
        await asyncio.sleep(0)
        connected.put(Ping(4))
        await asyncio.sleep(0)
        _key, *frames = peer.recv_multipart()
        arrived = [(codec.decode_to_worker(text), payload) for text, payload in codec.unpack(frames)]
        assert arrived == [(Ping(1), b""), (Cancel(2), b"raw"), (Ping(3), b"")]
        assert [codec.decode_to_worker(text) for text, _ in codec.unpack(peer.recv_multipart()[1:])] == [
            Ping(4)
        ]
        assert sent[-2:] == [True, True]
        connected.close()

    asyncio.run(run())


def test_a_bad_message_of_a_worker_is_dropped_and_its_neighbours_are_taken(
    peer: zmq.Socket[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        taken: list[Any] = []
        both = asyncio.Event()

        def take(message: Any, payload: bytes) -> None:
            taken.append((message, payload))
            if message == Pong(2):
                raise RuntimeError("a bug behind one message")
            if message == Leaving():
                both.set()

        socket = dealer.connect(peer.context, tmp_path / "socket", "f0")
        connected = dealer.Dealer(socket, take, lambda sent: None)
        await until_connected(connected)
        peer.send_multipart([b"f0", b"no bundle"])
        good, unlucky = codec.encode(Pong(1)), codec.encode(Pong(2))
        head = codec._encoder.encode(([good, b"\xc1", unlucky, codec.encode(Leaving())], [0]))
        peer.send_multipart([b"f0", head, b"raw"])
        async with asyncio.timeout(60):
            await both.wait()
        assert taken == [(Pong(1), b"raw"), (Pong(2), b""), (Leaving(), b"")]
        connected.close()

    asyncio.run(run())
    assert all(text in caplog.text for text in ("bad frames", "bad message", "could not be taken"))


@pytest.mark.parametrize("drains", [False, True])
def test_a_worker_that_sends_without_a_pause_shares_the_loop_until_it_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    clock = Clock.of(dealer, monkeypatch)
    arrived = [[bytes(frame) for frame in bundle_of(Pong(number))] for number in range(20)]
    seen: list[Any] = []

    def receive(socket: object) -> list[bytes]:
        if not arrived:
            raise zmq.Again
        clock.now += dealer.LOOK_S / 4
        return arrived.pop(0)

    monkeypatch.setattr(dealer, "receive", receive)

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dealer.connect(context, tmp_path / "socket", "f0")
        made = dealer.Dealer(socket, lambda message, payload: seen.append(message.seq), lambda sent: None)
        if drains:
            made.drain()
        while arrived:
            await asyncio.sleep(0)
            seen.append("others")
        made.close()
        context.term()

    asyncio.run(run())
    assert [each for each in seen if each != "others"] == list(range(20))
    # The descriptor and the end of a turn may both lead to a look in one turn.
    assert seen.count("others") in ((0,) if drains else range(2, 6))


def bundle_of(message: Any) -> list[codec.Payload]:
    """The frames of one message."""
    bundle = codec.Bundle()
    bundle.add(message)
    return bundle.take()


def test_requests_of_a_turn_that_the_socket_does_not_take_fail_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def send(socket: object, frames: list[codec.Payload]) -> None:
        refused.append(len(codec.unpack([bytes(frames[0])])))
        raise zmq.Again

    monkeypatch.setattr(dealer, "send", send)

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        channel = Channel(context, RunPaths(tmp_path, "test", tmp_path), 0, "f0", lambda: None)
        with pytest.raises(WorkerLost):
            channel.submit(WORK)
        channel._connect()
        futures = [channel.submit(WORK)[1] for _ in range(3)]
        assert channel.cost == 27 and not refused
        for future in futures:
            with pytest.raises(WorkerLost, match="takes no requests"):
                await future
        assert refused == [3] and channel.cost == 0
        channel.close()
        context.term()

    asyncio.run(run())


def test_a_request_and_the_word_where_its_inputs_lie_are_taken_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[Any]] = []

    def send(socket: object, frames: list[codec.Payload]) -> None:
        arrived = codec.unpack([bytes(frame) for frame in frames])
        tried.append([codec.decode_to_worker(text) for text, _ in arrived])
        if len(tried) == 1:
            raise zmq.Again

    monkeypatch.setattr(dealer, "send", send)
    inputs = Inputs("path", "epoch")
    arena = cast("InputArena", SimpleNamespace(inputs=inputs))

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        channel = Channel(context, RunPaths(tmp_path, "test", tmp_path), 0, "f0", lambda: None)
        channel._connect()
        for number in range(codec.MAX_MESSAGES - 1):
            channel._put(Cancel(number))
        block = InputBlock(Block(64, 8, 1), memoryview(bytearray(8)), arena)
        request, future = channel.submit(WORK, block)
        await asyncio.sleep(0)
        assert len(tried[0]) == codec.MAX_MESSAGES - 1
        assert tried[1] == [inputs, Submit(request, WORK, False, block.ref)] and not future.done()
        channel.close()
        with pytest.raises(WorkerLost):
            await future
        context.term()

    asyncio.run(run())


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """One with two sessions; `handler.submitted` are the ids of the requests."""
    (tmp_path / "run").mkdir()
    paths = RunPaths(tmp_path / "run", "test", tmp_path)
    arena = Arena(tmp_path / "arena", BLOCKS_OFFSET + 4096, "e" * 16)
    handler = SimpleNamespace(
        submitted=[], tick=lambda: None, turn_ended=lambda: None, cancel=lambda session, request: None
    )
    handler.submit = lambda session, message, payload: handler.submitted.append(message.id)
    made = Endpoint(paths, 0, LeaseTable(arena), cast("Handler", handler))
    for key in (b"f0", b"f1"):
        session = Session(key, 1, key.decode(), os.getpid(), os.pidfd_open(os.getpid()))
        made.sessions._by_key[key] = made.sessions._by_fd[session.pidfd] = session
    yield made
    made.close()
    arena.close()


def test_answers_of_one_turn_go_back_in_one_bundle_for_each_session(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[bytes, list[codec.Payload]]] = []
    monkeypatch.setattr(router, "send", lambda socket, key, frames: sent.append((key, frames)))
    for key in (b"f0", b"f1", b"f0"):
        endpoint._dispatch(key, Ping(7), b"")
    endpoint._dispatch(b"f0", Submit(1, WORK), b"")
    assert endpoint._handler.submitted == [1]  # type: ignore[attr-defined]
    assert not sent, "the turn has not ended"
    endpoint.post(lambda: endpoint.broadcast(Leaving()))
    endpoint.stop()
    endpoint.run()
    told = {
        key: [codec.decode_to_frontend(bytes(text)) for text, _ in codec.unpack(cast("list[bytes]", frames))]
        for key, frames in sent
    }
    assert len(sent) == 2
    assert told == {b"f0": [Pong(7), Pong(7), Leaving()], b"f1": [Pong(7), Leaving()]}


def test_many_posted_calls_wake_the_endpoint_once(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = os.eventfd_write

    def counted(fd: int, value: int) -> None:
        written.append(fd)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", counted)
    order: list[int] = []
    for number in range(5):
        endpoint.post(lambda number=number: order.append(number))  # type: ignore[misc]
    endpoint.post(lambda: endpoint.post(endpoint.stop))
    assert len(written) == 1
    endpoint.run()
    assert order == [0, 1, 2, 3, 4], "a call that is posted by a call wakes the endpoint again"


def test_calls_posted_without_a_wake_run_together_after_the_wake(endpoint: Endpoint) -> None:
    order: list[int] = []

    def woken() -> bool:
        return bool(select.select([endpoint._wake], [], [], 0)[0])

    endpoint.post(lambda: order.append(1), wake=False)
    endpoint.post(lambda: order.append(2), wake=False)
    assert not woken(), "the endpoint sleeps until somebody wakes it"
    endpoint.wake()
    assert woken()
    endpoint.stop()
    endpoint.run()
    assert order == [1, 2]
    endpoint.wake()
    assert not woken(), "nothing was posted"


def test_a_call_posted_without_a_wake_runs_at_the_next_tick(endpoint: Endpoint) -> None:
    endpoint.post(endpoint.stop, wake=False)
    endpoint.run()
    assert not endpoint.has_posted


def test_a_call_of_another_thread_takes_along_what_was_posted_without_a_wake(endpoint: Endpoint) -> None:
    order: list[int] = []
    endpoint.post(lambda: order.append(1), wake=False)
    endpoint.post(lambda: order.append(2))
    endpoint.stop()
    endpoint.run()
    assert order == [1, 2]


def test_a_thread_that_ends_after_the_endpoint_writes_into_no_other_file(endpoint: Endpoint) -> None:
    endpoint.close()
    later = [os.memfd_create("later") for _ in range(8)]
    try:
        endpoint.post(lambda: None)
        assert [os.fstat(fd).st_size for fd in later] == [0] * 8
    finally:
        for fd in later:
            os.close(fd)


def test_a_session_that_takes_nothing_is_dropped_and_the_others_are_answered(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def send(socket: object, key: bytes, frames: list[codec.Payload]) -> None:
        if key == b"f0":
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        sent.append(key)

    monkeypatch.setattr(router, "send", send)
    endpoint._poller = cast("zmq.Poller", SimpleNamespace(unregister=lambda fd: None))
    endpoint._dispatch(b"f0", Submit(1, WORK), b"")
    endpoint.fail(b"f0", 1, WorkerLost("x"))
    endpoint._dispatch(b"f1", Ping(1), b"")
    endpoint._flush()
    assert sent == [b"f1"]
    assert [session.key for session in endpoint.sessions] == [b"f1"]
