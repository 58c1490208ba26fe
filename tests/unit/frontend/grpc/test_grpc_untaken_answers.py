"""Answers over gRPC that nobody takes: how many bytes of them are held, for how long, and that their rpcs end."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.answer import CopyBudget
from frontend.grpc.accepting import Door, Server
from frontend.grpc.call import Method
from frontend.grpc.server import mount
from frontend.grpc.streaming import Streams
from frontend.grpc.unary import UntakenAnswer
from ipc.protos import kserve_v2_pb2 as pb
from tests.fakes.tensors import services_of
from tests.fuzz.http2 import PREFACE, RST_STREAM, SETTINGS, frame, rpc

NBYTES, RPCS = 8 << 20, 8
SETTINGS_OF_NO_WINDOW = struct.pack(">HI", 4, 0)


class Contract:
    """Every message is answered by as many bytes."""

    protocol = "kserve"
    descriptor = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def __init__(self) -> None:
        method = Method(self._answer, "infer")
        self.methods: Mapping[str, Method] = {"ModelInfer": method, "ModelStreamInfer": method}

    async def _answer(self, call: Any, message: Any) -> bytes:
        return bytes(NBYTES)

    def message_of(self, error: Any) -> str:
        return str(error.message)


async def until(done: Any) -> bool:
    """Whether `done()` came true within 20 s."""
    for _ in range(2000):
        if done():
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("method", "budget", "stall_s"),
    [
        ("ModelInfer", RPCS * (NBYTES + 1), 0.5),
        ("ModelInfer", 2 * NBYTES - 1, 600),
        ("ModelStreamInfer", RPCS * NBYTES, 600),
    ],
    ids=["time", "room", "stream"],
)
def test_answers_that_nobody_takes_are_dropped_and_freed(
    method: str, budget: int, stall_s: float, tmp_path: Path
) -> None:
    settings = {"server__write_stall_s": str(stall_s), "arena__lease_copy_after_s": "0.1"}
    made = services_of(tmp_path, [], [], limits__request_timeout_s="0.5", **settings)
    made.started, made.copies = True, CopyBudget(budget)
    made.recorder = SimpleNamespace(finished=lambda *_: None)  # type: ignore[assignment]
    dropped, ended = RPCS - 1 if budget < 2 * NBYTES else RPCS, set[int]()

    async def test() -> None:
        server, contract = Server([], Door(made.access, made.settings)), Contract()
        mount(server, made, contract, Streams(8))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PREFACE + frame(SETTINGS, 0, 0, SETTINGS_OF_NO_WINDOW))
        gc.disable()
        try:
            for number in range(RPCS):
                path = f"/{contract.descriptor.full_name}/{method}"
                writer.write(b"".join(rpc(2 * number + 1, path, b"")))
            async with asyncio.timeout(60):
                # gRPC ends an rpc, and frees what it holds for it, when nothing refers to it any more.
                while len(ended) < dropped:
                    head = await reader.readexactly(9)
                    await reader.readexactly(int.from_bytes(head[:3], "big"))
                    if head[3] == RST_STREAM:
                        ended.add(int.from_bytes(head[5:], "big"))
        finally:
            gc.enable()
            writer.close()
            await server.stop(0)
        assert len(ended) == dropped
        assert await until(lambda: made.copies.free_nbytes == budget), "nothing is counted any more"

    try:
        asyncio.run(test())
    finally:
        made.engine.client.inputs.close()


def test_what_is_taken_in_time_is_never_counted(tmp_path: Path) -> None:
    made = services_of(tmp_path, [], [], arena__lease_copy_after_s="0.05", server__write_stall_s="600")
    made.copies = CopyBudget(NBYTES)
    drops: list[str] = []

    async def test() -> None:
        taken = UntakenAnswer(made, "/a", NBYTES + 1, lambda: drops.append("taken"))
        slow = UntakenAnswer(made, "/b", NBYTES, lambda: drops.append("slow"))
        more = UntakenAnswer(made, "/c", 1, lambda: drops.append("more"))
        taken.end()
        assert await until(lambda: drops)
        assert (drops, made.copies.free_nbytes) == (["more"], 0)
        more.end()
        slow.end()
        slow.end()

    try:
        asyncio.run(test())
    finally:
        made.engine.client.inputs.close()
    assert (drops, made.copies.free_nbytes) == (["more"], NBYTES)
