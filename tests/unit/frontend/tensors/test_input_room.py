"""Who waits for room in the input arena gets it when a block is given back, in the order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from frontend.tensors import uploading
from frontend.tensors.uploading import InputRoom
from ipc import deadline
from ipc.errors import ShmExhausted
from ipc.memory.arena import BLOCKS_OFFSET
from ipc.memory.input_arena import InputArena, InputBlock
from ipc.processes.paths import RunPaths

KIB = 1 << 10
ROOM = BLOCKS_OFFSET + (1 << 20)


def with_room(
    tmp_path: Path, act: Callable[[InputRoom, InputArena], Awaitable[None]], patience_s: float = 60.0
) -> None:
    """Run `act` with an arena that has a MiB of blocks."""

    async def run() -> None:
        inputs = InputArena(RunPaths(tmp_path, "room", tmp_path), "frontend-0", ROOM)
        try:
            await act(InputRoom(inputs, patience_s), inputs)
            assert not inputs.used_nbytes
            inputs.verify()
        finally:
            inputs.close()

    asyncio.run(run())


class Slow:
    """A body that arrives for ever."""

    def __init__(self, block: InputBlock) -> None:
        self.began, self.moved = time.monotonic() - 10.0, 0
        self._block: InputBlock | None = block

    def move_out(self) -> None:
        self.moved += 1
        # Fails the test instead of hanging it.
        assert self.moved == 1, "a body that is out was asked again"
        if self._block is not None:
            block, self._block = self._block, None
            block.release()


async def turns(count: int = 20) -> None:
    """Let everything go on that can."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_block_given_back_wakes_the_first_in_line_at_once(tmp_path: Path) -> None:
    async def act(room: InputRoom, inputs: InputArena) -> None:
        full = await room.reserve(900 * KIB, deadline.after(30))
        assert full is not None
        waiting = asyncio.ensure_future(room.reserve(500 * KIB, deadline.after(30)))
        await turns()
        assert not waiting.done()
        full.release()
        # Nothing sleeps here: the release itself must have woken it.
        await turns()
        assert waiting.done()
        block = waiting.result()
        assert block is not None
        block.release()

    with_room(tmp_path, act)


def test_small_inputs_do_not_pass_large_ones(tmp_path: Path) -> None:
    async def act(room: InputRoom, inputs: InputArena) -> None:
        full = await room.reserve(600 * KIB, deadline.after(30))
        assert full is not None
        served: list[int] = []

        async def take(nbytes: int) -> None:
            block = await room.reserve(nbytes, deadline.after(30))
            assert block is not None
            served.append(nbytes)
            block.release()

        large = asyncio.ensure_future(take(700 * KIB))
        await turns()
        small = [asyncio.ensure_future(take(size * KIB)) for size in (8, 4)]
        await turns()
        assert not served, "there would be room for the small ones, but the large one came first"
        full.release()
        await asyncio.gather(large, *small)
        assert served == [700 * KIB, 8 * KIB, 4 * KIB]

    with_room(tmp_path, act)


def test_who_gives_up_holds_nobody_back(tmp_path: Path) -> None:
    async def act(room: InputRoom, inputs: InputArena) -> None:
        full = await room.reserve(600 * KIB, deadline.after(30))
        assert full is not None
        large = asyncio.ensure_future(room.reserve(700 * KIB, deadline.after(30)))
        small = asyncio.ensure_future(room.reserve(8 * KIB, deadline.after(30)))
        await turns()
        assert not small.done()
        large.cancel()
        await turns()
        block = small.result()
        assert block is not None
        for one in (block, full):
            one.release()

    with_room(tmp_path, act)


def test_the_wait_ends_some_time_before_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "BEFORE_DEADLINE_NS", 20_000_000_000)

    async def act(room: InputRoom, inputs: InputArena) -> None:
        full = await room.reserve(900 * KIB, deadline.after(30))
        assert full is not None
        until = deadline.after(20.2)
        with pytest.raises(ShmExhausted, match=r"arena\.input_bytes"):
            await room.reserve(500 * KIB, until)
        assert time.monotonic_ns() < until
        full.release()
        again: InputBlock | None = await room.reserve(500 * KIB, deadline.after(30))
        assert again is not None
        again.release()

    with_room(tmp_path, act)


def test_an_arena_that_closes_lets_those_who_wait_go(tmp_path: Path) -> None:
    async def act(room: InputRoom, inputs: InputArena) -> None:
        full = await room.reserve(900 * KIB, deadline.after(30))
        assert full is not None
        waiting = asyncio.ensure_future(room.reserve(500 * KIB, deadline.after(30)))
        await turns()
        inputs.close()
        await turns()
        assert waiting.done() and waiting.result() is None
        full.release()

    with_room(tmp_path, act)


def test_what_never_fits_waits_for_nobody(tmp_path: Path) -> None:
    async def act(room: InputRoom, inputs: InputArena) -> None:
        assert await room.reserve(2 << 20, deadline.after(30)) is None

    with_room(tmp_path, act)


def test_slow_bodies_are_moved_out_once_each(tmp_path: Path) -> None:
    """Also when that makes no room, because somebody else works with the rest: then the deadline ends the wait."""

    async def act(room: InputRoom, inputs: InputArena) -> None:
        working = await room.reserve(400 * KIB, deadline.after(30))
        assert working is not None
        working_nbytes = inputs.used_nbytes
        slow = []
        for _ in range(2):
            block = await room.reserve(200 * KIB, deadline.after(30))
            assert block is not None
            slow.append(Slow(block))
        room.arriving.update(slow)
        with pytest.raises(ShmExhausted, match=r"arena\.input_bytes"):
            await room.reserve(900 * KIB, deadline.after(0.3))
        assert [body.moved for body in slow] == [1, 1] and not room.arriving
        assert inputs.used_nbytes == working_nbytes
        working.release()

    with_room(tmp_path, act, patience_s=1.0)
