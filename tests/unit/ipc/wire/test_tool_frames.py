"""Frames with descriptors between frontends and the tool host."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from ipc.errors import ProtocolError
from ipc.wire.tools import (
    MAX_NBYTES,
    Cancel,
    Done,
    End,
    Link,
    Mount,
    Produced,
    PythonCall,
    Run,
    ShellCall,
    ShellResult,
    Wanted,
    to_frontend,
    to_host,
)
from tests.fakes.tool_host import until

RUNS = [
    Run(1, "a", True, PythonCall("1", [Wanted("plot.png", "png")])),
    Run(2, "b", False, ShellCall(["true"], timeout_s=1.5)),
    Cancel(1),
    End("a"),
]


class Pair:
    """A link that receives, and the bare socket or the link of the other side."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any] = to_host) -> None:
        self.far, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.messages: list[Any] = []
        self.fds: list[list[int]] = []
        self.ends: list[str] = []
        self.link = Link(near, decoder, self._receive, self.ends.append)

    def _receive(self, message: Any, fds: list[int]) -> None:
        self.messages.append(message)
        self.fds.append(fds)

    def close(self) -> None:
        self.link.close()
        self.far.close()


def run(test: Callable[[Pair], Awaitable[None]], decoder: msgspec.msgpack.Decoder[Any] = to_host) -> None:
    async def body() -> None:
        pair = Pair(decoder)
        try:
            await test(pair)
        finally:
            pair.close()

    asyncio.run(body())


def test_messages_arrive_in_order_with_their_descriptors() -> None:
    async def body(pair: Pair) -> None:
        sender = Link(pair.far, to_frontend, lambda *_: None, lambda _: None)
        files = [os.memfd_create(name) for name in "abc"]
        for number, fd in enumerate(files):
            os.write(fd, b"%d" % number)
        for number, fd in enumerate(files):
            sender.send(RUNS[number])
            sender.send(Mount("a", True, f"{number}.txt"), [fd])
        await until(lambda: len(pair.messages) == 6)
        assert [each for each in pair.messages if not isinstance(each, Mount)] == RUNS[:3]
        mounts = [(m.path, fds[0]) for m, fds in zip(pair.messages, pair.fds, strict=True) if fds]
        assert [(path, os.pread(fd, 9, 0)) for path, fd in mounts] == [
            (f"{n}.txt", b"%d" % n) for n in range(3)
        ]
        for _, fd in mounts:
            os.close(fd)
        sender.close()

    run(body)


def test_a_large_message_waits_for_a_slow_reader_and_keeps_its_descriptors() -> None:
    async def body(pair: Pair) -> None:
        sender = Link(pair.far, to_host, lambda *_: None, lambda _: None)
        result = ShellResult("success", "/w", stdout="x" * (8 << 20), exit_code=0)
        done = Done(7, result, [Produced("a", 3), Produced("b", 0, "not_produced"), Produced("c", 1)], left=2)
        sender.send(done, [os.memfd_create("a"), os.memfd_create("c")])
        sender.send(Done(8, ShellResult("success", "/w")))
        await until(lambda: len(pair.messages) == 2)
        assert pair.messages[0] == done
        assert [len(fds) for fds in pair.fds] == [2, 0]
        for fd in pair.fds[0]:
            os.close(fd)
        sender.close()

    run(body, to_frontend)


def frame(text: bytes, count: int = 0) -> bytes:
    return struct.pack("<IB", len(text), count) + text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<IB", MAX_NBYTES + 1, 0), "over the limit"),
        (struct.pack("<IB", 10, 200), "over the limit"),
        (frame(b"\xc1"), "undecodable"),
        (frame(msgspec.msgpack.encode(["run", 1, "a"])), "undecodable"),
        (frame(msgspec.msgpack.encode(Mount("a", True, "x")), 1), "do not fit"),
        (frame(msgspec.msgpack.encode(Cancel(1)), 1), "do not fit"),
    ],
)
def test_a_bad_frame_ends_the_connection_once(data: bytes, reason: str) -> None:
    async def body(pair: Pair) -> None:
        pair.far.sendall(data + frame(msgspec.msgpack.encode(Cancel(1))))
        await until(lambda: bool(pair.ends))
        assert len(pair.ends) == 1
        assert reason in pair.ends[0]
        assert pair.messages == []
        pair.link.send(Cancel(1))

    run(body)


def test_descriptors_without_a_message_end_the_connection_and_are_closed() -> None:
    async def body(pair: Pair) -> None:
        read, write = os.pipe()
        for _ in range(3):
            socket.send_fds(pair.far, [b"\0"], [write] * 60)
        os.close(write)
        await until(lambda: bool(pair.ends))
        assert os.read(read, 1) == b"", "a copy of the descriptor is still open"
        os.close(read)

    run(body)


def test_the_end_of_the_other_side_is_told_and_closes_what_waits() -> None:
    async def body(pair: Pair) -> None:
        pair.far.close()
        await until(lambda: bool(pair.ends))
        read, write = os.pipe()
        pair.link.send(Mount("a", True, "x"), [write])
        assert os.read(read, 1) == b""
        os.close(read)

    run(body)


def test_a_message_over_a_limit_is_refused_where_it_is_sent() -> None:
    async def body(pair: Pair) -> None:
        read, write = os.pipe()
        with pytest.raises(ProtocolError, match="do not fit"):
            pair.link.send(Cancel(1), [write])
        assert os.read(read, 1) == b""
        os.close(read)
        with pytest.raises(ProtocolError, match="is over"):
            pair.link.send(Run(1, "a", True, PythonCall("x" * MAX_NBYTES)))

    run(body)
