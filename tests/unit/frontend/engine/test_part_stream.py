"""The frontend's end of a stream, with a channel that a test plays: order, leases, credits, copies, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.engine.answer import CopyBudget
from frontend.engine.local.outstanding import Streams
from frontend.engine.streams.incoming import Delivery
from frontend.engine.streams.part_stream import TELL_AFTER, PartStream
from ipc.errors import DeadlineExceeded, LeaseRevoked, PenstockError, ShmExhausted, WorkerLost
from ipc.memory.arena import BLOCKS_OFFSET, Arena, ArenaView, Block, LeaseTable
from ipc.wire.codec import ToWorker
from ipc.wire.messages import Result, TensorInfo, TensorRef, Timing
from ipc.wire.streams import WINDOW, PartsConsumed
from workers.endpoint.endpoint import block_ref

EPOCH = "0123456789abcdef"
SESSION = b"frontend-0"
ID = 5


class Worker:
    """Plays a channel and the worker behind it, with a real arena."""

    worker, uuid = "worker-0", "cpu"

    def __init__(self, root: Path) -> None:
        self.arena = Arena(root / "arena", BLOCKS_OFFSET + (1 << 20), EPOCH)
        self.view = ArenaView(self.arena.path, EPOCH)
        self.leases = LeaseTable(self.arena)
        self.streams = Streams(lambda result, inline: None, lambda delivery: None, self._told)  # type: ignore[arg-type]
        self.final: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self.told: list[int] = []
        self.resting = False
        self.cancelled = 0
        self.suspected = 0

    def suspect(self, error: WorkerLost) -> None:
        """The input is under suspicion."""
        self.suspected += 1

    def send(self, number: int, in_block: bool = False) -> Block | None:
        """A part whose one output has the number in all its bytes."""
        data = bytes([number]) * 100
        refs, infos = [TensorRef("O", "uint8", [100], 0)], [TensorInfo("O", "UINT8", [100], 100)]
        block = self.leases.reserve(100) if in_block else None
        if block is not None:
            self.leases.data(block)[:] = data
            self.leases.lease(block, SESSION)
        result = Result(ID, block_ref(block), refs, [], [], [], Timing(), infos=infos)
        self.streams.parts[ID](Delivery(result, self.view if in_block else None, b"" if in_block else data))
        return block

    def end(self) -> None:
        """The final result."""
        self.final.set_result(Delivery(Result(ID, None, [], [16], [], [], Timing(device_ns=7)), None, b""))

    def fail(self, error: PenstockError) -> None:
        """A failure in its place."""
        self.final.set_exception(error)

    def _told(self, message: ToWorker) -> None:
        """Credit."""
        assert isinstance(message, PartsConsumed) and message.id == ID
        self.told.append(message.count)

    def rest(self, request: int) -> None:
        """The client has enough."""
        assert request == ID
        self.resting = True

    def resume(self, request: int) -> None:
        """The client wants more."""
        assert request == ID
        self.resting = False

    def release(self, result: Result, arena: ArenaView) -> None:
        """The end of a lease."""
        assert result.block is not None
        self.leases.release(SESSION, result.block.offset, result.block.generation)

    def cancel(self, request: int) -> None:
        """The end of the work."""
        self.cancelled += 1

    def abandon(self, request: int, final: asyncio.Future[Delivery]) -> None:
        """The same, when the answer may have come."""
        self.cancelled += not final.done()


@asynccontextmanager
async def streaming(
    root: Path, room: int = 1 << 20, copy_after_s: float = 30
) -> AsyncIterator[tuple[Worker, PartStream, CopyBudget]]:
    """A stream of a worker; at the end nothing is leased, kept or registered."""
    worker, budget = Worker(root), CopyBudget(room)
    try:
        channel: Any = worker
        with PartStream(channel, ID, worker.final, WINDOW, budget, copy_after_s, worker.suspect) as stream:
            yield worker, stream, budget
        worker.leases.verify()
        assert worker.leases.used_nbytes == 0 and not worker.streams
        assert budget.free_nbytes == room
    finally:
        worker.arena.close()


def on_loop(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test that is a coroutine."""

    async def run() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(run())


async def next_number(stream: PartStream) -> int:
    """The number of the next part, which must be whole."""
    raw = bytes((await anext(stream)).raw("O"))
    assert raw == raw[:1] * 100
    return raw[0]


def test_parts_come_in_order_with_one_lease_at_a_time_and_credit_for_what_was_taken(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            worker.send(0)
            await stream.begun()
            for number in range(1, 2 * TELL_AFTER):
                worker.send(number)
            assert [await next_number(stream) for _ in range(2 * TELL_AFTER)] == list(range(2 * TELL_AFTER))
            assert worker.told == [TELL_AFTER], "the last part is still in use"
            worker.send(99, in_block=True)
            assert await next_number(stream) == 99
            assert worker.told == [TELL_AFTER] * 2 and worker.leases.leases == 1
            worker.send(100)
            assert await next_number(stream) == 100
            assert worker.told[2:] == [1], "a block is told of at once"
            assert worker.leases.leases == 0
            worker.end()
            assert [part async for part in stream] == []
            assert stream.result is not None and stream.result.timing.device_ns == 7
            assert [part async for part in stream] == []
        assert not worker.cancelled

    on_loop(work)


@pytest.mark.parametrize("in_block", [True, False])
def test_a_stream_rests_while_its_reader_has_enough(tmp_path: Path, in_block: bool) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            count = 1 if in_block else WINDOW
            for number in range(count):
                assert not worker.resting
                worker.send(number, in_block)
            assert worker.resting
            for _ in range(count):
                await next_number(stream)
            worker.send(count)
            assert await next_number(stream) == count and not worker.resting

    on_loop(work)


def test_a_part_that_comes_while_one_waits_for_it_wakes(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            asyncio.get_running_loop().call_later(0.01, worker.send, 3)
            assert await next_number(stream) == 3
            asyncio.get_running_loop().call_later(0.01, worker.end)
            assert [part async for part in stream] == []

    on_loop(work)


def test_parts_that_had_arrived_come_before_the_error_which_comes_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            worker.send(0)
            worker.send(1, in_block=True)
            worker.fail(WorkerLost("gone", suspect=True))
            await stream.begun()
            assert [await next_number(stream), await next_number(stream)] == [0, 1]
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                await anext(stream)
            assert [part async for part in stream] == []
            await asyncio.sleep(0)
            assert worker.suspected == 1

    on_loop(work)


@pytest.mark.parametrize("suspect", [True, False])
def test_what_killed_its_worker_is_under_suspicion_though_its_client_reads_no_more(
    tmp_path: Path, suspect: bool
) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            worker.send(0)
            await stream.begun()
            worker.fail(WorkerLost("gone", suspect=suspect))
            await asyncio.sleep(0)
        assert worker.suspected == suspect

    on_loop(work)


@pytest.mark.parametrize("error", [WorkerLost("gone", suspect=True), DeadlineExceeded("late")])
def test_what_fails_before_the_first_part_is_told_as_it_is_so_that_it_can_be_tried_again(
    tmp_path: Path, error: PenstockError
) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            worker.fail(error)
            with pytest.raises(type(error)) as found:
                await stream.begun()
            assert found.value is error and not worker.suspected

    on_loop(work)


def test_leaving_early_ends_the_work_and_gives_back_what_waits(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path) as (worker, stream, _):
            worker.send(0)
            assert await next_number(stream) == 0
            worker.send(1, in_block=True)
        assert worker.cancelled == 1

    on_loop(work)


def test_a_block_that_nobody_asks_for_becomes_a_private_copy(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path, room=100, copy_after_s=0.01) as (worker, stream, budget):
            worker.send(7, in_block=True)
            await until(lambda: budget.free_nbytes == 0)
            assert worker.leases.used_nbytes == 0
            other = worker.leases.reserve(100)
            assert other is not None
            worker.leases.data(other)[:] = b"x" * 100
            assert await next_number(stream) == 7
            assert worker.told == []
            worker.leases.discard(other)
            worker.send(8)
            assert await next_number(stream) == 8
            assert worker.told == [1] and budget.free_nbytes == 100

    on_loop(work)


def test_a_block_for_which_no_copy_can_be_kept_ends_the_stream(tmp_path: Path) -> None:
    async def work() -> None:
        async with streaming(tmp_path, room=99, copy_after_s=0.01) as (worker, stream, _):
            worker.send(6)
            worker.send(7, in_block=True)
            await until(lambda: worker.cancelled == 1)
            assert worker.leases.used_nbytes == 0
            with pytest.raises(ShmExhausted, match=r"too slow .* \(arena.copy_out_bytes\)"):
                await anext(stream)
            assert [part async for part in stream] == []

    on_loop(work)


@pytest.mark.parametrize("copied", [True, False])
def test_a_block_that_was_taken_back_is_an_error_and_never_other_bytes(tmp_path: Path, copied: bool) -> None:
    async def work() -> None:
        async with streaming(tmp_path, copy_after_s=0.01 if copied else 30) as (worker, stream, _):
            worker.send(7, in_block=True)
            assert worker.leases.revoke_session(SESSION) == 1
            if copied:
                await until(lambda: worker.cancelled == 1)
            with pytest.raises(LeaseRevoked):
                await anext(stream)
            assert [part async for part in stream] == []

    on_loop(work)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; `on_loop` has the deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
