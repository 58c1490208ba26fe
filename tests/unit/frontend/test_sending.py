"""Bodies over leased memory: private slices, an early end of the lease, and never another request's bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from frontend.engine.answer import CopyBudget
from frontend.sending import LeasedBody
from ipc.errors import LeaseRevoked
from ipc.settings import Arena
from tests.fakes.lease import FakeLease

SLICE = 1000
DATA = random.Random(5).randbytes(10 * SLICE + 37)
BUDGET = 1 << 20


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run a test on a loop of its own."""
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def body_of(
    lease: FakeLease, parts: list[Any] | None = None, copy_after_s: float = 60, budget: int = BUDGET
) -> Any:
    """A body over the whole lease, and its budget."""
    settings = Arena(slice_bytes=SLICE, lease_copy_after_s=copy_after_s)
    copies = CopyBudget(budget)
    return LeasedBody(parts if parts is not None else [lease.view], lease, settings, copies), copies


def test_the_slices_are_the_body_and_none_is_larger_than_a_slice() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, _ = body_of(lease)
        assert body.nbytes == len(DATA)
        slices = [piece async for piece in body]
        assert b"".join(slices) == DATA
        assert max(map(len, slices)) == SLICE

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_and_views_of_any_sizes_are_joined_in_order(seed: int) -> None:
    async def test() -> None:
        chosen, lease, parts, expected = random.Random(seed), FakeLease(DATA), [], []
        for _ in range(40):
            start = chosen.randrange(len(DATA))
            stop = start + chosen.choice((0, 1, 7, 500, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE))
            view = lease.view[start:stop]
            expected.append(bytes(view))
            parts.append(bytes(view) if chosen.random() < 0.5 else view)
        body, _ = body_of(lease, parts)
        slices = [bytes(piece) async for piece in body]
        assert b"".join(slices) == b"".join(expected)
        assert body.nbytes == sum(map(len, slices))
        assert max(map(len, slices)) <= SLICE

    run(test)


def test_views_of_wider_elements_count_in_bytes() -> None:
    async def test() -> None:
        lease = FakeLease(bytes(range(256)) * 16)
        body, _ = body_of(lease, [lease.view.cast("f")])
        assert body.nbytes == 4096
        assert b"".join([piece async for piece in body]) == bytes(range(256)) * 16

    run(test)


def test_every_slice_is_a_private_copy() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, _ = body_of(lease)
        slices = [piece async for piece in body]
        lease.block[:] = b"\0" * len(DATA)
        assert b"".join(slices) == DATA

    run(test)


def test_every_copy_is_followed_by_a_check() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, _ = body_of(lease)
        assert len([piece async for piece in body]) == lease.checks == 11

    run(test)


def test_the_lease_ends_with_the_last_copy_and_not_with_the_last_byte_sent() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        slices = aiter(body_of(lease)[0])
        for _ in range(10):
            await anext(slices)
        assert lease.releases == 0
        last = await anext(slices)
        assert lease.releases == 1
        assert last == DATA[-37:]

    run(test)


def test_a_revoked_lease_raises_and_shows_nothing_of_the_new_owner() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        slices = aiter(body_of(lease)[0])
        seen = await anext(slices)
        lease.revoke()
        with pytest.raises(LeaseRevoked):
            await anext(slices)
        assert seen == DATA[:SLICE]
        assert lease.releases == 1

    run(test)


def test_a_slow_reader_gets_the_rest_from_a_private_copy() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease, [DATA[:10], lease.view, b"tail"], copy_after_s=0.02)
        slices = aiter(body)
        seen = [await anext(slices)]
        await lease.released.wait()
        assert copies.free_nbytes == BUDGET - (body.nbytes - SLICE)
        seen += [piece async for piece in slices]
        assert b"".join(seen) == DATA[:10] + DATA + b"tail"
        assert lease.releases == 1
        assert copies.free_nbytes == BUDGET, "the copy is paid back"

    run(test)


def test_a_reader_that_never_comes_does_not_hold_the_lease() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease, copy_after_s=0.02)
        await lease.released.wait()
        assert b"".join([piece async for piece in body]) == DATA
        assert copies.free_nbytes == BUDGET

    run(test)


def test_a_fast_reader_costs_no_copy() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease)
        assert b"".join([piece async for piece in body]) == DATA
        assert copies.free_nbytes == BUDGET and lease.releases == 1

    run(test)


def test_a_copy_of_a_revoked_block_is_not_sent() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease, copy_after_s=0.02)
        slices = aiter(body)
        await anext(slices)
        lease.revoke()
        await lease.released.wait()
        with pytest.raises(ConnectionAbortedError):
            await anext(slices)
        assert copies.free_nbytes == BUDGET

    run(test)


def test_a_slow_reader_without_room_for_a_copy_is_cut_off() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease, copy_after_s=0.02, budget=100)
        slices = aiter(body)
        await anext(slices)
        await lease.released.wait()
        with pytest.raises(ConnectionAbortedError):
            await anext(slices)
        assert copies.free_nbytes == 100

    run(test)


class AskedBudget(CopyBudget):
    """A budget that notes when it was asked for room."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.asked = asyncio.Event()

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` if they are free."""
        self.asked.set()
        return super().take(nbytes)


def private_body(copy_after_s: float, budget: int = BUDGET) -> Any:
    """A body of two parts that are private from the start, its lease and its budget."""
    lease, copies = FakeLease(b""), AskedBudget(budget)
    lease.leased = False
    settings = Arena(slice_bytes=SLICE, lease_copy_after_s=copy_after_s)
    return LeasedBody([DATA[:2500], DATA[2500:]], lease, settings, copies), lease, copies


def test_a_body_without_a_lease_is_not_copied_but_counted_when_its_reader_is_slow() -> None:
    async def test() -> None:
        body, lease, copies = private_body(copy_after_s=0.02)
        slices = aiter(body)
        seen = [await anext(slices)]
        await copies.asked.wait()
        assert copies.free_nbytes == BUDGET - (body.nbytes - SLICE)
        seen += [piece async for piece in slices]
        assert b"".join(seen) == DATA
        assert (lease.checks, lease.releases, copies.free_nbytes) == (0, 0, BUDGET)

    run(test)


def test_a_fast_reader_of_a_body_without_a_lease_needs_no_room() -> None:
    async def test() -> None:
        body, lease, copies = private_body(copy_after_s=60, budget=1)
        assert b"".join([piece async for piece in body]) == DATA
        assert (lease.checks, lease.releases, copies.asked.is_set()) == (0, 0, False)

    run(test)


def test_a_private_body_without_room_is_cut_off_when_its_reader_is_slow() -> None:
    async def test() -> None:
        body, _, copies = private_body(copy_after_s=0, budget=100)
        slices = aiter(body)
        await anext(slices)
        await copies.asked.wait()
        with pytest.raises(ConnectionAbortedError):
            await anext(slices)
        assert copies.free_nbytes == 100

    run(test)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_ends_the_lease_whatever_was_sent(taken: int) -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease)
        slices = aiter(body)
        for _ in range(taken):
            await anext(slices)
        await body.close()
        await body.close()
        assert lease.releases == 1
        assert copies.free_nbytes == BUDGET

    run(test)


def test_closing_after_a_private_copy_pays_it_back() -> None:
    async def test() -> None:
        lease = FakeLease(DATA)
        body, copies = body_of(lease, copy_after_s=0.02)
        slices = aiter(body)
        await anext(slices)
        await lease.released.wait()
        await body.close()
        assert copies.free_nbytes == BUDGET and lease.releases == 1

    run(test)


def test_the_budget_gives_what_is_free_and_takes_it_back() -> None:
    budget = CopyBudget(100)
    assert budget.take(60) and not budget.take(41) and budget.take(40) and not budget.take(1)
    budget.give(40)
    assert budget.take(40)
