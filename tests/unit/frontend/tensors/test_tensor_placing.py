"""Inputs on their way to where a worker reads them: beside what was received, made by recipes, in turn with others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from frontend.http.threads import Steps
from frontend.scope import RequestScope, plain_scope
from frontend.services import Services
from frontend.tensors.request import InputTensor, Plan, Sequence, TensorRequest
from ipc import deadline
from ipc.catalog.model_config import ModelConfig, SequenceBatching
from ipc.errors import DeadlineExceeded, InvalidInput, QueueFull
from ipc.memory import copies
from ipc.memory.input_arena import InputBlock
from tests.fakes.tensors import InferReply, entry, loaded, run, services_of, tensor

T = TypeVar("T")
MIB = 1 << 20
OUTPUT = (tensor("O", "UINT8", -1),)
PLAIN = ModelConfig(
    name="plain",
    max_batch_size=0,
    inputs=(tensor("A", "UINT8", -1), tensor("B", "UINT8", -1, optional=True)),
    outputs=OUTPUT,
)
BATCH = ModelConfig(name="batch", max_batch_size=2, inputs=(tensor("A", "UINT8", -1),), outputs=OUTPUT)
FLOW = ModelConfig(
    name="flow",
    max_batch_size=1,
    inputs=(tensor("A", "UINT8", -1),),
    outputs=OUTPUT,
    sequence_batching=SequenceBatching(),
)
CONFIGS = {"plain@1": PLAIN, "batch@1": BATCH, "flow@1": FLOW}


class Repeated:
    """Makes so many bytes of each that was sent; once `may_write`, if that is given."""

    def __init__(self, times: int, may_write: threading.Event | None = None, rows: int = 0) -> None:
        self.times, self.rows, self._may_write = times, rows, may_write
        self.threads: list[str] = []
        self.writing = threading.Event()

    def plan(self, data: bytes | memoryview) -> Steps[Plan]:
        """Without a look at the content."""
        self.threads.append(threading.current_thread().name)
        nbytes = len(data) * self.times
        yield
        return Plan([self.rows, nbytes // self.rows] if self.rows else [nbytes])

    def write(self, data: bytes | memoryview, shape: list[int], place: memoryview) -> Steps[None]:
        """All of them."""
        self.threads.append(threading.current_thread().name)
        self.writing.set()
        if self._may_write is not None:
            assert self._may_write.wait(60)
        place[:] = self.made(data)
        yield

    def made(self, data: bytes | memoryview) -> bytes:
        """What comes of it."""
        return np.repeat(np.frombuffer(data, np.uint8), self.times).tobytes()


def services(root: Path, **settings: str) -> Services:
    """Services with an input arena of 4 MiB."""
    statuses = [loaded(name, config) for name, config in CONFIGS.items()]
    return services_of(
        root,
        [entry(name) for name in CONFIGS],
        statuses,
        lambda request: InferReply.of(O=np.zeros((1, 1), np.int32)),
        **{"arena__input_bytes": str(4 * MIB), **settings},
    )


def fresh(timeout_s: float = 60) -> RequestScope:
    """The context of a request."""
    made = plain_scope()
    made.deadline_ns = deadline.after(timeout_s)
    return made


def plain(*data: bytes | memoryview, block: InputBlock | None = None) -> TensorRequest:
    """Bytes for A and B, some of which may have been received into a block."""
    inputs = [InputTensor(name, "UINT8", [len(one)], one) for name, one in zip("AB", data, strict=False)]
    return TensorRequest("plain", None, inputs, None, block=block)


def repeated(recipe: Repeated, data: bytes = b"abc", model: str = "plain", **more: Any) -> TensorRequest:
    """What the recipe makes for A."""
    shape = [recipe.rows, -1] if recipe.rows else [-1]
    return TensorRequest(model, None, [InputTensor("A", "UINT8", shape, data, None, recipe)], None, **more)


def on_loop(made: Services, work: Coroutine[Any, Any, T]) -> T:
    """Run on a loop of its own; all bytes and blocks must have been given back."""

    async def test() -> T:
        try:
            return await asyncio.wait_for(work, 60)
        finally:
            await until(lambda: not made.engine.client.inputs.used_nbytes)
            assert made.bodies.held_nbytes == 0
            made.engine.client.inputs.verify()
            made.engine.client.inputs.close()

    return asyncio.run(test())


async def until(condition: Any) -> None:
    """Wait for it."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def received(made: Services, *data: bytes, beside: int = 0) -> tuple[InputBlock, list[memoryview]]:
    """Bytes one after another in a block that held something else, with room beside them."""
    block = await made.engine.client.inputs.reserve(sum(map(len, data)) + beside)
    assert block is not None
    block.buffer[:] = b"\xa5" * len(block.buffer)
    views, at = [], 0
    for one in data:
        block.buffer[at : at + len(one)] = one
        views.append(block.buffer[at : at + len(one)])
        at += len(one)
    return block, views


def sent(made: Services) -> list[list[bytes]]:
    """The inputs of each call, as a worker reads them."""
    client: Any = made.engine.client
    return [
        [payload[one.start : one.start + one.nbytes] for one in request.call.inputs]
        for request, payload in zip(client.requests, client.payloads, strict=True)
    ]


def last_payload(made: Services) -> Any:
    """The payload that was sent last."""
    client: Any = made.engine.client
    return client.given[-1]


def test_inputs_that_were_received_into_a_block_stay_there(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        block, (_, first, second) = await received(made, b"not sent", b"first", b"second")
        with block:
            before = copies.copied()
            await run(made, fresh(), plain(first, second, block=block))
            assert copies.copied() == before
        assert last_payload(made) is block and sent(made) == [[b"first", b"second"]]

    on_loop(made, test())


@pytest.mark.parametrize("order", [1, -1])
def test_what_was_not_received_goes_behind_it_and_nothing_is_copied_twice(order: int, tmp_path: Path) -> None:
    made, large = services(tmp_path), b"\7" * (2 * MIB + 3)

    async def test() -> None:
        for _ in range(2):
            block, [view] = await received(made, large, beside=100)
            with block:
                before = copies.copied()["receive"]
                await run(made, fresh(), plain(*[view, b"elsewhere"][::order], block=block))
                assert copies.copied()["receive"] - before == len(b"elsewhere")
            assert last_payload(made) is block

    on_loop(made, test())
    assert sent(made) == [[large, b"elsewhere"][::order]] * 2
    client: Any = made.engine.client
    assert client.payloads == [large + bytes(5) + b"elsewhere"] * 2, "poison is known by its bytes"


def test_nobody_waits_for_room_while_holding_room(tmp_path: Path) -> None:
    made, first, second = services(tmp_path), b"\1" * (3 * MIB // 2), b"\2" * MIB

    async def ask() -> None:
        block, [view] = await received(made, first, beside=64)
        with block:
            await asyncio.sleep(0)
            await run(made, fresh(), plain(view, second, block=block))

    async def test() -> None:
        await asyncio.gather(ask(), ask())

    on_loop(made, test())
    assert sent(made) == [[first, second]] * 2


def test_who_waits_for_a_turn_in_a_sequence_holds_no_room(tmp_path: Path) -> None:
    """The one before it may need the room."""
    made, first, second = services(tmp_path), b"\1" * (3 * MIB), b"\2" * (2 * MIB)

    def step(data: bytes | memoryview, block: InputBlock | None = None) -> TensorRequest:
        given = InputTensor("A", "UINT8", [1, len(data)], data)
        return TensorRequest("flow", None, [given], None, sequence=Sequence(7, True), block=block)

    async def test() -> None:
        block, [view] = await received(made, second)
        with block:
            before = asyncio.ensure_future(run(made, fresh(), step(first)))
            await until(lambda: len(made.tensor_inference._programs.uploads.of("flow@1", 7).line) > 0)
            await asyncio.gather(before, run(made, fresh(), step(view, block)))

    on_loop(made, test())
    assert sent(made) == [[first], [second]]


def sequence_step(
    data: bytes | memoryview, block: InputBlock | None = None, recipe: Repeated | None = None
) -> TensorRequest:
    given = InputTensor("A", "UINT8", [1, -1 if recipe else len(data)], data, None, recipe)
    return TensorRequest("flow", None, [given], None, sequence=Sequence(7, False), block=block)


def test_a_step_that_leaves_its_block_before_it_waits_is_not_overtaken(tmp_path: Path) -> None:
    made, may = services(tmp_path), threading.Event()
    slow = Repeated(1, may, rows=1)

    async def test() -> None:
        block, [view] = await received(made, b"\1" * MIB)
        with block:
            first = asyncio.ensure_future(run(made, fresh(), sequence_step(b"\0", recipe=slow)))
            await until(slow.writing.is_set)
            second = asyncio.ensure_future(run(made, fresh(), sequence_step(view, block)))
            await asyncio.sleep(0)
            third = asyncio.ensure_future(run(made, fresh(), sequence_step(b"\2")))
            await until(
                lambda: (
                    len(made.tensor_inference._programs.uploads.of("flow@1", 7).line) == 3
                    and made.engine.client.inputs.used_nbytes == 0
                )
            )
            may.set()
            await asyncio.gather(first, second, third)

    try:
        on_loop(made, test())
    finally:
        may.set()
    assert [inputs[0][0] for inputs in sent(made)] == [0, 1, 2]


def test_a_step_waits_for_its_turn_until_its_deadline(tmp_path: Path) -> None:
    made, may = services(tmp_path), threading.Event()
    slow = Repeated(1, may, rows=1)

    async def test() -> None:
        first = asyncio.ensure_future(run(made, fresh(), sequence_step(b"\0", recipe=slow)))
        await until(slow.writing.is_set)
        with pytest.raises(DeadlineExceeded, match="same sequence"):
            await run(made, fresh(0.05), sequence_step(b"\1"))
        third = asyncio.ensure_future(run(made, fresh(), sequence_step(b"\2")))
        may.set()
        await asyncio.gather(first, third)

    try:
        on_loop(made, test())
    finally:
        may.set()
    assert [inputs[0][0] for inputs in sent(made)] == [0, 2]


@pytest.mark.parametrize("times", [2, MIB])
def test_recipes_make_inputs_in_a_thread_where_they_are_read(times: int, tmp_path: Path) -> None:
    made, recipe = services(tmp_path), Repeated(times)
    on_loop(made, run(made, fresh(), repeated(recipe)))
    assert sent(made) == [[recipe.made(b"abc")]]
    assert isinstance(last_payload(made), InputBlock) is (times == MIB)
    assert len(recipe.threads) == 2 and all(name.startswith("make") for name in recipe.threads)


def test_a_recipe_waits_for_room_and_leaves_its_own(tmp_path: Path) -> None:
    """What was received into a block is given back first, so that any number can wait at the same time."""
    made, recipes = services(tmp_path), [Repeated(2) for _ in range(3)]

    async def ask(recipe: Repeated) -> None:
        block, [view] = await received(made, b"x" * MIB)
        with block:
            request = repeated(recipe)
            request.inputs[0].data, request.block = view, block
            await until(lambda: made.engine.client.inputs.used_nbytes > 3 * MIB or recipes[0].threads)
            await run(made, fresh(), request)

    async def test() -> None:
        await asyncio.gather(*map(ask, recipes))

    on_loop(made, test())
    assert sent(made) == [[b"x" * (2 * MIB)]] * 3


def test_nothing_is_made_before_there_is_room(tmp_path: Path) -> None:
    made, recipe = services(tmp_path), Repeated(MIB)

    async def test() -> None:
        block = await made.engine.client.inputs.reserve(3 * MIB)
        assert block is not None
        waiting = asyncio.ensure_future(run(made, fresh(), repeated(recipe)))
        await until(lambda: recipe.threads)
        # The threads take what comes in its order: after this one they would have begun with the first.
        await run(made, fresh(), repeated(Repeated(1)))
        assert not recipe.writing.is_set()
        block.release()
        await waiting

    on_loop(made, test())


def test_a_block_that_a_thread_writes_into_is_nobody_elses(tmp_path: Path) -> None:
    made, may_write = services(tmp_path), threading.Event()
    recipe = Repeated(MIB, may_write)

    async def test() -> None:
        try:
            task = asyncio.ensure_future(run(made, fresh(), repeated(recipe)))
            await until(recipe.writing.is_set)
            for _ in range(2):
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done() and made.engine.client.inputs.used_nbytes >= 3 * MIB
            may_write.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert made.engine.client.inputs.used_nbytes == 0
        finally:
            may_write.set()

    on_loop(made, test())
    assert sent(made) == []


def test_without_an_arena_what_recipes_make_counts_as_a_body(tmp_path: Path) -> None:
    limits = {"arena__input_bytes": "0", "limits__max_buffered_bytes": str(3 * MIB)}
    made, recipe, held = services(tmp_path, **limits), Repeated(MIB), []
    client: Any = made.engine.client
    client.answer = lambda request: (
        held.append(made.bodies.held_nbytes) or InferReply.of(O=np.zeros((1, 1), np.int32))
    )

    async def test() -> None:
        await run(made, fresh(), repeated(recipe, b"abc"))
        with pytest.raises(QueueFull):
            await run(made, fresh(), repeated(recipe, b"abcd"))

    on_loop(made, test())
    assert sent(made) == [[recipe.made(b"abc")]] and held == [3 * MIB]


def test_a_request_that_does_not_fit_its_model_costs_no_recipe(tmp_path: Path) -> None:
    made, recipe = services(tmp_path), Repeated(3, rows=3)
    wrong_name = repeated(Repeated(1, rows=1), model="batch")
    wrong_name.inputs[0].name, wrong_name.inputs[0].recipe = "X", recipe
    for request, words in ((repeated(recipe, model="batch"), "batch-size must be <= 2"), (wrong_name, "'X'")):
        with pytest.raises(InvalidInput, match=words):
            on_loop(made, run(made, fresh(), request))
    assert recipe.threads == []


def test_a_sequence_keeps_its_order_although_recipes_take_time(tmp_path: Path) -> None:
    made, may_write = services(tmp_path), threading.Event()

    def step(number: int, may_write: threading.Event | None = None) -> TensorRequest:
        recipe = Repeated(1, may_write, rows=1)
        return repeated(recipe, bytes([number]), "flow", sequence=Sequence(7, not number))

    async def test() -> None:
        slow = step(0, may_write)
        tasks = [asyncio.create_task(run(made, fresh(), one)) for one in (slow, step(1), step(2))]
        recipe: Any = slow.inputs[0].recipe
        await until(recipe.writing.is_set)
        # Whoever passes the first has sent its call when these have had their time in the other thread.
        await run(made, fresh(), repeated(Repeated(1)))
        await run(made, fresh(), repeated(Repeated(1)))
        may_write.set()
        await asyncio.gather(*tasks)

    try:
        on_loop(made, test())
    finally:
        may_write.set()
    assert sent(made) == [[b"abc"]] * 2 + [[b"\0"], [b"\1"], [b"\2"]]
