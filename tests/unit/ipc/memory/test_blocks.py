"""Ranges of the arena: nothing overlaps, nothing is lost, neighbours join again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import ProtocolError
from ipc.memory.arena import ALIGNMENT, BlockList, round_up

BASE = 16 * ALIGNMENT
PAGES = 24


def assert_whole(blocks: BlockList) -> None:
    """Used and free ranges cover everything exactly once; no two holes touch."""
    ranges = sorted(
        [*((at, size, True) for at, size in blocks.used.items()), *((*h, False) for h in blocks.holes)]
    )
    at = BASE
    for index, (offset, nbytes, is_used) in enumerate(ranges):
        assert offset == at
        assert nbytes > 0 and nbytes % ALIGNMENT == 0
        assert is_used or index == 0 or ranges[index - 1][2], "two holes that touch were not joined"
        at += nbytes
    assert at == BASE + blocks.total_nbytes
    assert blocks.free_nbytes == sum(nbytes for _, nbytes in blocks.holes)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6 * ALIGNMENT), st.integers(0, 1000)), max_size=80))
def test_any_sequence_of_allocations_and_frees_keeps_the_arena_whole(
    steps: list[tuple[bool, int, int]],
) -> None:
    blocks = BlockList(BASE, PAGES * ALIGNMENT)
    held: list[int] = []
    for take, nbytes, which in steps:
        if take:
            largest = max((size for _, size in blocks.holes), default=0)
            offset = blocks.allocate(nbytes)
            assert (offset is None) == (round_up(max(nbytes, 1)) > largest)
            if offset is not None:
                assert blocks.used[offset] >= nbytes
                held.append(offset)
        elif held:
            blocks.free(held.pop(which % len(held)))
        assert_whole(blocks)
        assert set(blocks.used) == set(held)
    for offset in held:
        blocks.free(offset)
    assert blocks.holes == [(BASE, PAGES * ALIGNMENT)]
    assert blocks.free_nbytes == blocks.total_nbytes


def test_the_first_hole_that_is_large_enough_is_taken() -> None:
    blocks = BlockList(BASE, 8 * ALIGNMENT)
    first, second, third = (blocks.allocate(2 * ALIGNMENT) for _ in range(3))
    assert first == BASE and second is not None and third is not None
    blocks.free(first)
    blocks.free(third)
    assert blocks.allocate(3 * ALIGNMENT) == third
    assert blocks.allocate(ALIGNMENT) == first


def test_a_range_cannot_be_freed_twice() -> None:
    blocks = BlockList(BASE, 4 * ALIGNMENT)
    offset = blocks.allocate(1)
    assert offset == BASE
    blocks.free(offset)
    with pytest.raises(ProtocolError):
        blocks.free(offset)
    assert_whole(blocks)


def test_an_offset_inside_a_range_cannot_be_freed() -> None:
    blocks = BlockList(BASE, 4 * ALIGNMENT)
    assert blocks.allocate(2 * ALIGNMENT) == BASE
    with pytest.raises(ProtocolError):
        blocks.free(BASE + ALIGNMENT)
    assert_whole(blocks)


@pytest.mark.parametrize(("base", "nbytes"), [(1, ALIGNMENT), (ALIGNMENT, ALIGNMENT + 1)])
def test_unaligned_arenas_are_refused(base: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="aligned"):
        BlockList(base, nbytes)
