"""Unary rpcs that last: their clients leave, their deadlines pass, their messages are too large, their methods fail."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from frontend.grpc import rpc
from frontend.grpc.accepting import Door, Server
from frontend.grpc.call import Method
from frontend.grpc.rpc import ServedUnary
from frontend.grpc.server import mount
from frontend.grpc.streaming import Streams
from frontend.http.bodies import Places
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb
from tests.fakes.tensors import services_of

LIMIT_NBYTES = 1000


class Contract:
    """ModelInfer waits until `release`; the model `bug` has a fault."""

    protocol = "kserve"
    descriptor = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    def __init__(self) -> None:
        self.methods: Mapping[str, Method] = {"ModelInfer": Method(self._answer, "infer")}
        self.entered, self.release = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def _answer(self, call: Any, message: Any) -> bytes:
        if message.model_name == "bug":
            raise ValueError("a fault")
        if message.model_name == "surrogate":
            raise InvalidInput("no file \udcff")
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b"answered"

    def message_of(self, error: Any) -> str:
        return str(error.message)


def named(model: str) -> bytes:
    """A request."""
    return pb.ModelInferRequest(model_name=model).SerializeToString()


Ask = Callable[..., Any]


def play(root: Path, session: Callable[[Contract, Ask], Awaitable[None]]) -> list[str]:
    """A session with a client, after which nothing is left; the statuses that were counted."""
    counted: list[str] = []
    made = services_of(root, [], [])
    made.started = True
    made.finisher.recorder = SimpleNamespace(  # type: ignore[assignment]
        finished=lambda *of: counted.append(of[3])
    )

    async def run() -> None:
        server, contract = (
            Server([("grpc.max_receive_message_length", LIMIT_NBYTES)], Door(made.access, made.settings)),
            Contract(),
        )
        mount(server, made, contract, Streams(8))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(60), aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await session(contract, channel.unary_unary(f"/{contract.descriptor.full_name}/ModelInfer"))
                places = server.door._places
                while places.free < places.limit or server._core.underway.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not server.door.calls.running and not made.bodies.held_nbytes
        finally:
            await server.stop(0)

    try:
        asyncio.run(run())
    finally:
        made.engine.client.inputs.close()  # type: ignore[attr-defined]
    return counted


def test_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        asked = ask(b"")
        await contract.entered.wait()
        asked.cancel()
        while not contract.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert play(tmp_path, session) == ["499"]


def test_a_deadline_that_passes_cancels_the_request(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        timeout_s = 1
        while not contract.entered.is_set():  # on a busy machine a deadline may pass before the rpc is there
            timeout_s *= 2
            with pytest.raises(aio.AioRpcError) as failure:
                await ask(b"", timeout=timeout_s)
            assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while not contract.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert set(play(tmp_path, session)) == {"504"}


def test_a_request_that_lasts_is_answered(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        asked = ask(b"")
        await contract.entered.wait()
        asyncio.get_running_loop().call_later(0.2, contract.release.set)
        assert await asked == b"answered"
        assert "x-request-id" in dict(await asked.trailing_metadata())

    assert play(tmp_path, session) == ["200"]


def test_a_message_over_the_limit_ends_the_rpc_before_its_request_begins(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        with pytest.raises(aio.AioRpcError) as failure:
            await ask(bytes(LIMIT_NBYTES + 1))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not contract.entered.is_set()

    assert play(tmp_path, session) == []


def test_a_fault_of_a_method_ends_its_rpc_alone(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        with pytest.raises(aio.AioRpcError) as failure:
            await ask(named("bug"))
        assert (failure.value.code(), failure.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
        contract.release.set()
        assert await ask(b"") == b"answered"

    assert play(tmp_path, session) == ["500", "200"]


def test_an_answer_that_leaves_late_ends_its_rpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine looks at an answer before the answer has left."""
    monkeypatch.setattr(rpc, "LOOK_S", 0.0)

    async def session(contract: Contract, ask: Ask) -> None:
        contract.release.set()
        for _ in range(20):
            assert await ask(b"") == b"answered"

    assert play(tmp_path, session) == ["200"] * 20


def test_an_error_of_letters_that_grpc_cannot_send_is_told_with_their_numbers(tmp_path: Path) -> None:
    async def session(contract: Contract, ask: Ask) -> None:
        with pytest.raises(aio.AioRpcError) as failure:
            await ask(named("surrogate"), timeout=60)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.value.details() == "no file \\udcff"

    assert play(tmp_path, session) == ["400"]


def test_a_fault_of_a_refusal_costs_its_rpc_alone(tmp_path: Path) -> None:
    contract = Contract()

    def fail(error: Any) -> str:
        raise ValueError("a fault")

    async def run() -> None:
        made = services_of(tmp_path, [], [])
        made.started, contract.message_of = True, fail  # type: ignore[method-assign]
        contract.release.set()
        door = Door(made.access, made.settings)
        server = Server([], door)
        mount(server, made, contract, Streams(8))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        places, door._places = door._places, Places(0)
        try:
            async with asyncio.timeout(60), aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary(f"/{contract.descriptor.full_name}/ModelInfer")
                with pytest.raises(aio.AioRpcError, match="internal error"):
                    await ask(b"", timeout=60)
                door._places = places
                assert await ask(b"", timeout=60) == b"answered"
        finally:
            await server.stop(0)
            made.engine.client.inputs.close()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_no_rpc_that_has_ended_waits_for_the_collector(tmp_path: Path) -> None:
    """Otherwise the messages of many rpcs would stay in memory until it runs."""

    async def session(contract: Contract, ask: Ask) -> None:
        asked = ask(b"")
        await contract.entered.wait()
        asyncio.get_running_loop().call_later(0.2, contract.release.set)
        assert await asked == await ask(b"") == b"answered"
        for bad in (bytes(LIMIT_NBYTES + 1), named("surrogate"), named("bug")):
            with pytest.raises(aio.AioRpcError):
                await ask(bad)
        contract.entered.clear()
        contract.release.clear()
        left = ask(b"")
        await contract.entered.wait()
        left.cancel()
        while not contract.cancelled or any(isinstance(each, ServedUnary) for each in gc.get_objects()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    gc.collect()
    gc.disable()
    # The objects of other tests are no concern of this one, and to look at millions of them takes seconds.
    gc.freeze()
    try:
        play(tmp_path, session)
    finally:
        gc.unfreeze()
        gc.enable()
