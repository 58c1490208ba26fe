"""Streams without a server: what clients do that do not read, or leave, and answers that come aside of others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode, aio

from frontend.grpc import unary
from frontend.grpc.call import Answer, Method, Several
from frontend.grpc.received import Form
from frontend.grpc.rpc import Rpc
from frontend.grpc.streaming import Streams
from frontend.grpc.unary import Unary
from frontend.services import Services
from ipc.errors import InvalidInput
from ipc.protos import kserve_v2_pb2 as pb
from tests.fakes.tensors import services_of
from tests.harness.server import wait_until

FORM = Form(pb.ModelInferRequest, 0)
NBYTES = 100_000


class FakeRpc:
    """An rpc whose client sends these messages and takes `takes` answers; then `stuck` happens to a write."""

    def __init__(self, models: list[str], takes: int, stuck: Callable[[], Any], left_s: float = 3600) -> None:
        self._models, self._takes, self._stuck, self._left_s = models, takes, stuck, left_s
        self.written: list[Answer] = []
        self.attempts = 0
        self.aborted: tuple[Any, ...] = ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float:
        return self._left_s

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def read(self) -> Any:
        if not self._models:
            return aio.EOF
        message = pb.ModelInferRequest(model_name=self._models.pop(0))
        message.parameters["filler"].string_param = "x" * NBYTES
        return FORM.receive(message.SerializeToString())

    async def write(self, answer: Answer) -> None:
        self.attempts += 1
        if len(self.written) >= self._takes:
            await self._stuck()
        self.written.append(answer)

    async def abort(self, code: StatusCode, message: str, trailers: Any) -> None:
        self.aborted = code, message
        raise aio.AbortError("aborted")


class Contract:
    """Messages to `several` get answers for ever, to `failing` one and an error, to `slow` one at `release`."""

    protocol = "kserve"
    descriptor: Any = None

    def __init__(self, services: Services) -> None:
        self._inputs = services.engine.client.inputs
        self.release = asyncio.Event()

    async def answer(self, call: Any, message: Any) -> Answer | Several:
        if message.model_name == "slow":
            await self.release.wait()
            return b"slow"
        return Several(self._answers(message.model_name))

    async def _answers(self, name: str) -> AsyncGenerator[Answer, None]:
        block = await self._inputs.reserve(NBYTES)
        assert block is not None
        try:
            yield b"first"
            if name == "failing":
                raise InvalidInput("no more")
            while True:
                yield b"more"
        finally:
            block.release()

    def message_of(self, error: Any) -> str:
        return str(error.message)


def serve(root: Path, rpc: FakeRpc, during: Callable[[Contract, Services], Any] | None = None) -> list[str]:
    """The stream from its beginning to its end, with nothing left afterwards; the statuses that were counted."""
    counted: list[str] = []

    def finished(protocol: str, operation: str, model: str, status: str, *of: Any) -> None:
        counted.append(status)

    async def run() -> None:
        services = services_of(root, [], [])
        services.started = True
        services.finisher.recorder = SimpleNamespace(finished=finished)  # type: ignore[assignment]
        contract = Contract(services)
        method = Method(contract.answer, "infer", failed=lambda call, message, error: error.message.encode())
        try:
            async with asyncio.timeout(60):
                runner = Unary(services, contract, method, "/s/m", FORM)
                served = Rpc("/s/m", rpc)
                serving = asyncio.ensure_future(Streams(8).serve(runner, served))
                served.cut_off = serving.cancel
                if during is not None:
                    await during(contract, services)
                await asyncio.gather(serving, return_exceptions=True)
            # What was cancelled ends now.
            for _ in range(5):
                await asyncio.sleep(0)
            assert services.engine.client.inputs.used_nbytes == 0
            assert services.bodies.held_nbytes == 0
        finally:
            services.engine.client.inputs.close()

    asyncio.run(run())
    return counted


def test_a_message_whose_answers_never_began_is_counted_all_the_same(tmp_path: Path) -> None:
    """The rpc ends in the turn of the event loop in which the writing of its answers would begin."""
    rpc = FakeRpc(["several"], 1, asyncio.Event().wait)
    make_task = asyncio.BaseEventLoop.create_task

    async def during(contract: Contract, services: Services) -> None:
        [serving] = (task for task in asyncio.all_tasks() if "Streams.serve" in repr(task.get_coro()))
        loop = asyncio.get_running_loop()

        def create_task(coroutine: Any, **more: Any) -> Any:
            task = make_task(loop, coroutine, **more)  # type: ignore[arg-type]
            if "_write_several" in repr(coroutine):
                task.cancel()
                serving.cancel()
            return task

        loop.create_task = create_task  # type: ignore[method-assign, assignment]

    assert serve(tmp_path, rpc, during) == ["499"]
    assert rpc.attempts == 0


def test_a_client_that_never_reads_holds_nothing_beyond_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unary, "WRITE_GRACE_NS", 100_000_000)
    left_s, attempts = 0.1, 0
    while attempts < 2:  # on a busy machine a deadline may pass before the second answer
        left_s *= 2
        rpc = FakeRpc(["several"], 1, asyncio.Event().wait, left_s)
        assert serve(tmp_path, rpc) == ["504"]
        assert rpc.aborted[0] is StatusCode.DEADLINE_EXCEEDED
        attempts = rpc.attempts
    assert rpc.written == [b"first"] and attempts == 2, "it was not sent a message that it would not read"


def test_a_client_that_goes_away_during_a_write_is_no_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone() -> None:
        raise aio.InternalError("Failed ExecuteBatch")

    rpc = FakeRpc(["several"], 1, gone)
    with caplog.at_level(logging.WARNING):
        assert serve(tmp_path, rpc) == ["499"]
    assert rpc.attempts == 2 and not rpc.aborted
    assert not caplog.records


def test_what_has_ended_gives_its_room_back_beside_a_slow_one_before_it(tmp_path: Path) -> None:
    """More messages than may be in work at once, behind one that is not answered yet."""
    rpc = FakeRpc(["slow", *["failing"] * 20], 100, asyncio.Event().wait)

    async def during(contract: Contract, services: Services) -> None:
        await asyncio.to_thread(wait_until, lambda: len(rpc.written) >= 40, what="the answers of all but one")
        assert len(rpc.written) == 40 and set(rpc.written) == {b"first", b"no more"}
        contract.release.set()

    assert sorted(serve(tmp_path, rpc, during)) == ["200", *["400"] * 20]
    assert rpc.written[-1] == b"slow"
