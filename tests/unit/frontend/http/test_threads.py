"""Threads for large work: whose turn it is, what deadlines and leaving end, and where pictures are decoded."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.http import image_headers, threads, tracebacks
from frontend.http.threads import Line, Steps, in_steps, off_loop
from frontend.protocols.kserve_v2 import conversions
from frontend.scope import current_scope, plain_scope
from frontend.services import Services
from frontend.tensors.request import InputTensor, TensorRequest
from ipc import deadline
from ipc.catalog.model_config import ModelConfig
from ipc.errors import DeadlineExceeded, QueueFull
from ipc.settings import Limits
from tests.fakes.tensors import InferReply, elements, entry, loaded, run, services_of, tensor
from tests.tiny.pictures import encoded, picture

PICTURES = ModelConfig(
    name="eye",
    max_batch_size=64,
    inputs=(tensor("A", "UINT8", 8, 8, 3),),
    outputs=(tensor("O", "UINT8", -1),),
)


class Gate:
    """Work that notes who did it, and waits."""

    def __init__(self) -> None:
        self.may, self.begun, self.order = threading.Event(), threading.Event(), list[str]()

    def wait(self, name: str = "gate") -> None:
        self.order.append(name)
        self.begun.set()
        assert self.may.wait(60)

    def note(self, name: str) -> None:
        self.order.append(name)


def asks(caller: str, work: Coroutine[Any, Any, Any], timeout_s: float = 30) -> asyncio.Task[Any]:
    """The work of a request of `caller`."""

    async def ask() -> Any:
        made = plain_scope()
        made.host, made.deadline_ns = caller, deadline.after(timeout_s)
        current_scope.set(made)
        return await work

    return asyncio.ensure_future(ask())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def waiting(line: Line) -> int:
    """Pieces that no thread has taken."""
    return sum(map(len, line._waiting.values()))


@pytest.fixture
def gate() -> Any:
    made = Gate()
    yield made
    made.may.set()


def test_a_caller_with_much_work_waits_behind_its_own(gate: Gate) -> None:
    line = Line("test", 1)

    async def test() -> None:
        tasks = [asks("greedy", line.run(gate.wait))]
        await until(gate.begun.is_set)
        for number in range(5):
            tasks.append(asks("greedy", line.run(lambda number=number: gate.note(f"greedy {number}"))))
        tasks.append(asks("modest", line.run(lambda: gate.note("modest"))))
        await until(lambda: waiting(line) == 6)
        gate.may.set()
        await asyncio.gather(*tasks)

    asyncio.run(test())
    assert gate.order == ["gate", "greedy 0", "modest", *(f"greedy {number}" for number in range(1, 5))]


def test_between_two_steps_others_have_their_turn(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PIECE_S", 0.0)
    line = Line("test", 1)

    def steps() -> Steps[str]:
        gate.wait("first")
        yield
        gate.note("second")
        return "done"

    async def test() -> None:
        long = asks("a", in_steps(steps(), line))
        await until(gate.begun.is_set)
        short = asks("a", line.run(lambda: gate.note("short")))
        await until(lambda: waiting(line) == 1)
        gate.may.set()
        assert await long == "done"
        await short

    asyncio.run(test())
    assert gate.order == ["first", "short", "second"]


def test_what_waits_ends_with_its_client_and_its_deadline(gate: Gate) -> None:
    line = Line("test", 1)

    async def test() -> None:
        holding = asks("a", line.run(gate.wait))
        await until(gate.begun.is_set)
        left = asks("b", line.run(lambda: gate.note("left")))
        late = asks("c", line.run(lambda: gate.note("late")), timeout_s=0.05)
        await until(lambda: waiting(line) >= 1)
        left.cancel()
        with pytest.raises(DeadlineExceeded):
            await late
        with pytest.raises(asyncio.CancelledError):
            await left
        assert waiting(line) == 0 and not holding.done()
        gate.may.set()
        await holding
        await line.run(lambda: gate.note("next"))

    asyncio.run(test())
    assert gate.order == ["gate", "next"]


def test_steps_end_with_their_client_after_the_one_that_runs(gate: Gate) -> None:
    line, closed = Line("test", 1), threading.Event()

    def steps() -> Steps[None]:
        try:
            gate.wait("first")
            yield
            gate.note("never")
        finally:
            closed.set()

    async def test() -> None:
        task = asks("a", in_steps(steps(), line))
        await until(gate.begun.is_set)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "memory that a thread reads is not given back"
        gate.may.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    original = threads.PIECE_S
    threads.PIECE_S = 0.0
    try:
        asyncio.run(test())
    finally:
        threads.PIECE_S = original
    assert gate.order == ["first"] and closed.is_set()


def test_errors_of_work_arrive() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    def steps() -> Steps[None]:
        yield
        fail()

    async def test() -> None:
        for work in (off_loop(fail), in_steps(steps())):
            with pytest.raises(ValueError, match="wrong"):
                await work

    asyncio.run(test())


def test_an_error_keeps_nothing_of_its_work_in_memory() -> None:
    """Else the body of every refused request would stay until the collector comes by."""

    class Body:
        pass

    def refuse(body: Body) -> None:
        raise ValueError("wrong")

    def steps(body: Body) -> Steps[None]:
        yield
        refuse(body)

    async def refused(begin: Callable[[Body], Coroutine[Any, Any, None]]) -> weakref.ref[Body]:
        body = Body()
        kept = weakref.ref(body)
        with pytest.raises(ValueError, match="wrong") as caught:
            await begin(body)
        tracebacks.forget(caught.value)
        del caught, body
        return kept

    async def test() -> None:
        for begin in (lambda body: off_loop(refuse, body), lambda body: in_steps(steps(body))):
            kept = await refused(begin)
            await until(lambda kept=kept: kept() is None)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(test())
    finally:
        gc.enable()


def eye(root: Path, **settings: str) -> Services:
    """Services of a model that takes pictures."""
    return services_of(
        root, [entry("eye@1")], [loaded("eye@1", PICTURES)],
        lambda request: InferReply.of(O=np.zeros((1, 1), np.int32)), **settings,
    )  # fmt: skip


def looking(made: Services, count: int) -> Coroutine[Any, Any, Any]:
    """A request of so many pictures."""
    given = InputTensor("A", "BYTES", [count], elements(*[encoded(picture(1, 8, 8))] * count))
    conversions.defer(PICTURES, [given], made.settings.limits)
    made_context = plain_scope()
    made_context.deadline_ns = deadline.after(30)
    return run(made, made_context, TensorRequest("eye", None, [given], None))


def test_pictures_hold_up_no_large_body_and_end_with_their_client(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, decode = eye(tmp_path), conversions.decode

    def gated(data: bytes, where: str) -> np.ndarray:
        gate.wait(where)
        return decode(data, where)

    monkeypatch.setattr(conversions, "decode", gated)
    monkeypatch.setattr(threads, "PIECE_S", 0.0)

    async def test() -> None:
        requests = [asks(f"10.0.0.{number}", looking(made, 50)) for number in range(4)]
        await until(lambda: len(gate.order) == threads.THREADS)
        assert await off_loop(lambda: "a large honest body") == "a large honest body"
        for request in requests:
            request.cancel()
        await until(lambda: not waiting(threads.MAKING))
        gate.may.set()
        assert all(isinstance(one, asyncio.CancelledError)
                   for one in await asyncio.gather(*requests, return_exceptions=True))  # fmt: skip
        assert len(gate.order) == threads.THREADS, "no other picture is decoded for who has left"
        assert made.tensor_inference.inputs.pixels.free == made.tensor_inference.inputs.pixels.limit
        made.engine.client.inputs.close()

    asyncio.run(test())


def test_headers_of_large_images_are_looked_at_beside_the_loop(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sees that the look has begun, and what is left of it ends with the client."""
    monkeypatch.setattr(image_headers, "check_image", lambda data, where, limits: gate.wait(where))
    monkeypatch.setattr(threads, "PIECE_S", 0.0)
    large = [(f"items[{number}]", bytes(image_headers.LONG_NBYTES)) for number in range(3)]

    async def test() -> None:
        task = asks("a", image_headers.check_all(large, Limits()))
        await until(gate.begun.is_set)
        task.cancel()
        await asyncio.sleep(0)
        gate.may.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(test())
    assert gate.order == ["items[0]"]


def test_pixels_are_bounded_for_all_requests(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, decode = (
        eye(tmp_path, limits__max_image_pixels="64", limits__max_images="1"),
        conversions.decode,
    )
    monkeypatch.setattr(conversions, "decode", lambda data, where: (gate.wait(), decode(data, where))[1])
    assert made.tensor_inference.inputs.pixels.limit == 256

    async def test() -> None:
        request = asks("a", looking(made, 1))
        await until(gate.begun.is_set)
        assert made.tensor_inference.inputs.pixels.free == 256 - 64
        assert made.tensor_inference.inputs.pixels.take("a", 64)
        with pytest.raises(QueueFull, match="pixels"):
            await asks("a", looking(made, 1))
        made.tensor_inference.inputs.pixels.give("a", 64)
        gate.may.set()
        await request
        await asks("a", looking(made, 1))
        assert made.tensor_inference.inputs.pixels.free == 256
        made.engine.client.inputs.close()

    asyncio.run(test())


def test_a_step_that_takes_long_is_followed_by_others_work() -> None:
    """Steps are taken until their time is over, and then in the next turn."""
    taken: list[int] = []

    def steps() -> Steps[int]:
        for number in range(3):
            taken.append(number)
            time.sleep(threads.PIECE_S)
            yield
        return len(taken)

    line = SimpleNamespace(pieces=0)

    async def count(work: Callable[[], Any]) -> Any:
        line.pieces += 1
        return work()

    line.run = count
    assert asyncio.run(in_steps(steps(), line)) == 3  # type: ignore[arg-type]
    assert line.pieces == 4
