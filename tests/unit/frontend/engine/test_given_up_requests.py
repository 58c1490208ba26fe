"""A worker that dies on a request whose caller has gone: the channel still says on which request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from msgspec import structs

from frontend.engine.interface import Payload, bytes_of
from frontend.engine.local import dealer
from frontend.engine.local.channel import MOST_GIVEN_UP, MOST_GIVEN_UP_NBYTES, Channel
from ipc.errors import DeadlineExceeded, WorkerLost
from ipc.memory.arena import Block
from ipc.memory.input_arena import InputArena, InputBlock
from ipc.processes.paths import RunPaths
from ipc.wire.messages import EncodeCall, Failure, InputItem, Inputs, Work

WORK = Work("m", EncodeCall([InputItem("text")], ["dense"]), 2**62, 9, "req")
Sent = tuple[int, asyncio.Future[Any]]


class ReadBlock(InputBlock):
    """A block whose bytes are gone as soon as nobody reads them."""

    def end_reader(self) -> None:
        self.buffer[:] = bytes(len(self.buffer))


class Talk:
    """A channel whose messages go nowhere, and what it says about requests that were given up."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], root: Path) -> None:
        self.channel = Channel(context, RunPaths(root, "test", root), 0, "f0", lambda: None)
        self.channel.on_suspect = self._note
        self.channel._connect()
        self.accused: list[tuple[str, bytes, bool]] = []

    def _note(self, work: Work, payload: Payload, alone: bool) -> None:
        self.accused.append((work.request_id, bytes(bytes_of(payload)), alone))

    def send(self, name: str, payload: Payload = b"") -> Sent:
        """A request of that name is under way."""
        return self.channel.submit(structs.replace(WORK, request_id=name), payload)

    def give_up(self, name: str, payload: Payload = b"") -> int:
        """A request of that name is under way, and its caller leaves."""
        number, future = self.send(name, payload)
        self.channel.abandon(number, future)
        return number


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Sockets that take everything."""
    monkeypatch.setattr(dealer, "send", lambda socket, frames: None)
    found: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield found
    found.term()


def test_a_death_accuses_a_request_that_nobody_waits_for_any_more(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = cast("InputArena", SimpleNamespace(inputs=Inputs("path", "epoch")))

    async def run() -> list[tuple[str, bytes, bool]]:
        talk = Talk(context, tmp_path)
        left, _ = talk.give_up("left", b"raw"), talk.give_up("named by no record")
        block = ReadBlock(Block(64, 8, 1), memoryview(bytearray(b"in block")), arena)
        read, large = talk.give_up("block", block), talk.give_up("large", bytes(MOST_GIVEN_UP_NBYTES + 1))
        answered = talk.give_up("answered")
        talk.channel._on_failure(Failure(answered, "INFERENCE_ERROR", "failed"), b"")
        late, expired = talk.send("late")
        with monkeypatch.context() as clock:
            clock.setattr(time, "monotonic_ns", lambda: WORK.deadline_ns + 10**12)
            talk.channel._expire()
        with pytest.raises(DeadlineExceeded):
            await expired
        waiting, answer = talk.send("waits")
        talk.channel._reset("died", {left, read, large, answered, late, waiting}, alone=True)
        with pytest.raises(WorkerLost) as lost:
            await answer
        assert lost.value.suspect
        talk.channel.close()
        return talk.accused

    accused = sorted(asyncio.run(run()))
    assert accused == [("block", b"in block", True), ("late", b"", True), ("left", b"raw", True)]


def test_requests_that_were_given_up_are_remembered_up_to_a_number(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    async def run() -> list[int]:
        talk = Talk(context, tmp_path)
        numbers = {talk.give_up(str(at)) for at in range(MOST_GIVEN_UP + 2)}
        talk.channel._reset("died", numbers)
        talk.channel.close()
        return sorted(int(name) for name, _, _ in talk.accused)

    assert asyncio.run(run()) == list(range(2, MOST_GIVEN_UP + 2))
