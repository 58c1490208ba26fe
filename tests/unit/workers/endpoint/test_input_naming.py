"""The arena of a frontend's inputs is named with every block: a worker that could not map it tries again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq.asyncio

from frontend.engine.local.channel import Channel
from frontend.engine.local.dealer import Dealer
from ipc.errors import ProtocolError
from ipc.memory import input_arena
from ipc.memory.arena import LeaseTable
from ipc.memory.input_arena import InputArena
from ipc.processes.paths import RunPaths
from ipc.wire import codec
from ipc.wire.messages import InferCall, Inputs, Submit, Work
from workers.endpoint.endpoint import Endpoint
from workers.endpoint.sessions import Handler, Session


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory and a directory for arenas."""
    for name in ("run", "shm"):
        (tmp_path / name).mkdir()
    return RunPaths(tmp_path / "run", "test", tmp_path / "shm")


def test_a_frontend_names_its_arena_before_every_block(paths: RunPaths) -> None:
    sent: list[Any] = []

    async def run() -> None:
        context: zmq.Context[Any] = zmq.Context()
        channel = Channel(context, paths, 0, "f0", lambda: None)
        dealer = SimpleNamespace(
            put=lambda message, payload=None, introduction=None: sent.extend((introduction, message))
        )
        channel._dealer = cast("Dealer", dealer)
        arena = InputArena(paths, "frontend-0", 1 << 20)
        for _ in range(2):
            block = await arena.reserve(1000)
            assert block is not None
            channel.submit(Work("m", InferCall([], []), 2**62, 16, "req"), block)
        arena.close()
        context.term()

    asyncio.run(run())
    assert [type(message) for message in sent] == [Inputs, Submit, Inputs, Submit]


def test_a_mapping_that_failed_is_tried_again_and_one_that_succeeded_is_kept(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Inputs] = []

    def view_of(paths: RunPaths, message: Inputs) -> Any:
        asked.append(message)
        if len(asked) == 1:
            raise ProtocolError("the input arena cannot be mapped")
        return SimpleNamespace(header=SimpleNamespace(epoch=message.epoch))

    monkeypatch.setattr(input_arena, "view_of", view_of)
    endpoint = Endpoint(paths, 0, cast("LeaseTable", None), cast("Handler", None))
    try:
        session = Session(b"f0", 1, "f0", 1, -1)
        monkeypatch.setattr(endpoint.sessions, "get", lambda key: session)
        named = codec.decode_to_worker(codec.encode(Inputs("/shm/a", "aa")))
        with pytest.raises(ProtocolError, match="cannot be mapped"):
            endpoint._dispatch(b"f0", named, b"")
        assert session.inputs is None
        for _ in range(2):
            endpoint._dispatch(b"f0", named, b"")
        assert session.inputs is not None and len(asked) == 2
    finally:
        endpoint.close()
