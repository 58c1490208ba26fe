"""The table of block states as a state machine, and what a late reader sees."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ipc.errors import ConfigError, LeaseRevoked, ProtocolError
from ipc.memory.arena import (
    ALIGNMENT,
    BLOCKS_OFFSET,
    PREPARING_MAX,
    STAMP_NBYTES,
    Arena,
    ArenaView,
    Block,
    LeaseTable,
    round_up,
)

EPOCH = "0123456789abcdef"
BLOCKS_NBYTES = 16 * ALIGNMENT
SESSIONS = (b"frontend-0", b"frontend-1", b"frontend-2")


class LeaseMachine(RuleBasedStateMachine):
    """Reserve, lease, release, revoke in any order; a model of plain sets says what must be true."""

    reserved = Bundle("reserved")
    leased = Bundle("leased")

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        path = Path(self._directory.name) / "arena"
        self.arena = Arena(path, BLOCKS_OFFSET + BLOCKS_NBYTES, EPOCH)
        self.view = ArenaView(path, EPOCH)
        self.table = LeaseTable(self.arena)
        self.open: dict[int, Block] = {}
        self.owner: dict[int, bytes] = {}

    def _readable(self, block: Block) -> bool:
        try:
            return self.view.data(block.offset, block.nbytes, block.generation)[:] == self._content(block)
        except LeaseRevoked:
            return False

    @staticmethod
    def _content(block: Block) -> bytes:
        return (block.generation % 256).to_bytes(1, "big") * block.nbytes

    def _ended(self, blocks: list[Block]) -> None:
        for block in blocks:
            del self.open[block.generation]
            self.owner.pop(block.generation, None)
            assert not self._readable(block)

    @rule(target=reserved, nbytes=st.integers(0, 5 * ALIGNMENT))
    def reserve(self, nbytes: int) -> object:
        block = self.table.reserve(nbytes)
        if block is None:
            return multiple()
        assert block.generation not in self.open
        self.table.data(block)[:] = self._content(block)
        self.open[block.generation] = block
        return block

    @rule(block=consumes(reserved))
    def discard(self, block: Block) -> None:
        self.table.discard(block)
        self._ended([block])

    @rule(target=leased, block=consumes(reserved), session=st.sampled_from(SESSIONS))
    def lease(self, block: Block, session: bytes) -> Block:
        self.table.lease(block, session)
        self.owner[block.generation] = session
        return block

    @rule(block=leased, session=st.sampled_from(SESSIONS), wrong=st.integers(-1, 1))
    def release(self, block: Block, session: bytes, wrong: int) -> None:
        mine = self.owner.get(block.generation) == session and not wrong
        assert self.table.release(session, block.offset, block.generation + wrong) is mine
        if mine:
            self._ended([block])

    @rule(session=st.sampled_from(SESSIONS))
    def session_dies(self, session: bytes) -> None:
        lost = [self.open[generation] for generation, owner in self.owner.items() if owner == session]
        assert self.table.revoke_session(session) == len(lost)
        self._ended(lost)

    @rule()
    def everything_is_too_old(self) -> None:
        lost = [self.open[generation] for generation in self.owner]
        assert self.table.revoke_older(-1.0) == len(lost)
        self._ended(lost)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        self.table.verify()
        used = sum(round_up(block.nbytes + STAMP_NBYTES) for block in self.open.values())
        assert self.table.used_nbytes == used
        assert self.table.leases == len(self.owner)
        ranges = sorted((block.offset, block.nbytes + STAMP_NBYTES) for block in self.open.values())
        for (offset, nbytes), (following, _) in pairwise(ranges):
            assert offset + nbytes <= following

    @invariant()
    def readers_see_their_own_bytes(self) -> None:
        assert all(self._readable(block) for block in self.open.values())

    def teardown(self) -> None:
        for session in SESSIONS:
            self.table.revoke_session(session)
        for block in self.open.values():
            self.table.discard(block)
        self.table.verify()
        assert self.table.used_nbytes == 0 and self.table.leases == 0
        assert self.table.reserve(self.table.capacity_nbytes) is not None
        self._directory.cleanup()


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """An arena of 16 blocks."""
    made = Arena(tmp_path / "arena", BLOCKS_OFFSET + BLOCKS_NBYTES, EPOCH)
    yield made
    made.close()
    assert not made.path.exists()


def test_a_late_reader_of_a_revoked_block_never_gets_the_bytes_of_the_next_one(arena: Arena) -> None:
    table, view = LeaseTable(arena), ArenaView(arena.path, EPOCH)
    first = table.reserve(100)
    assert first is not None
    table.data(first)[:] = b"a" * 100
    table.lease(first, SESSIONS[0])
    held = view.data(first.offset, 100, first.generation)
    assert table.revoke_older(-1.0) == 1
    assert table.revoked == 1
    second = table.reserve(100)
    assert second is not None and second.offset == first.offset
    table.data(second)[:] = b"b" * 100
    assert bytes(held) == b"b" * 100, "the reader's view shows the new bytes, so the check must tell"
    with pytest.raises(LeaseRevoked):
        view.check(first.offset, first.generation)
    with pytest.raises(LeaseRevoked):
        view.data(first.offset, 100, first.generation)
    view.check(second.offset, second.generation)


def test_a_revoked_block_says_so_before_it_is_used_again(arena: Arena) -> None:
    table, view = LeaseTable(arena), ArenaView(arena.path, EPOCH)
    block = table.reserve(10)
    assert block is not None
    table.lease(block, SESSIONS[0])
    table.revoke_session(SESSIONS[0])
    with pytest.raises(LeaseRevoked):
        view.check(block.offset, block.generation)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 10),
        (BLOCKS_OFFSET - ALIGNMENT, 10),
        (BLOCKS_OFFSET + 1, 10),
        (BLOCKS_OFFSET, -1),
        (BLOCKS_OFFSET, BLOCKS_NBYTES - STAMP_NBYTES + 1),
        (BLOCKS_OFFSET + BLOCKS_NBYTES, 0),
        (1 << 62, 10),
    ],
)
def test_a_reference_outside_the_blocks_is_refused(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(ProtocolError):
        ArenaView(arena.path, EPOCH).data(offset, nbytes, 0)


def test_readers_cannot_write(arena: Arena) -> None:
    view = ArenaView(arena.path, EPOCH)
    with pytest.raises(TypeError):
        view.view[0] = 1


def test_the_arena_of_another_life_or_a_foreign_file_is_refused(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        ArenaView(arena.path, "f" * 16)
    for name, content in (("short", b"x" * 100), ("foreign", b"x" * arena.nbytes)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProtocolError):
            ArenaView(tmp_path / name, EPOCH)


def test_a_reader_keeps_its_bytes_after_the_owner_removed_the_name(arena: Arena) -> None:
    table, view = LeaseTable(arena), ArenaView(arena.path, EPOCH)
    block = table.reserve(5)
    assert block is not None
    table.data(block)[:] = b"hello"
    arena.close()
    assert bytes(view.data(block.offset, 5, block.generation)) == b"hello"


def test_the_flight_record_names_what_is_on_the_device(arena: Arena) -> None:
    view = ArenaView(arena.path, EPOCH)
    assert view.flight() == set()
    arena.record_flight([(1 << 61, 7), (2, 8)])
    assert view.flight() == {(1 << 61, 7), (2, 8)}
    arena.record_flight([(n, n) for n in range(100_000)])
    assert (0, 0) in view.flight() and len(view.flight()) <= 100_000
    arena.record_flight([])
    assert view.flight() == set()


def test_an_arena_that_does_not_fit_names_its_size_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=f"arena.bytes {1 << 20}.*No space left"):
        Arena(tmp_path / "arena", 1 << 20, EPOCH)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_never_taken_over(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(b"not ours")
    with pytest.raises(FileExistsError):
        Arena(tmp_path / "arena", 1 << 20, EPOCH)
    assert (tmp_path / "arena").read_bytes() == b"not ours"


def test_the_flight_record_names_what_threads_prepare(arena: Arena) -> None:
    view = ArenaView(arena.path, EPOCH)
    arena.record_preparing(0, 5, 6)
    arena.record_preparing(PREPARING_MAX - 1, 7, 8)
    arena.record_flight([(1, 2)])
    assert view.flight() == {(1, 2), (5, 6), (7, 8)}
    arena.record_preparing(0, 0, 0)
    arena.record_preparing(PREPARING_MAX - 1, 0, 0)
    assert view.flight() == {(1, 2)}


def test_the_flight_record_names_the_batch_on_the_device_and_the_batch_being_formed(arena: Arena) -> None:
    view = ArenaView(arena.path, EPOCH)
    arena.record_flight([(1, 2), (1, 3)])
    arena.record_forming([(1, 4)])
    assert view.flight() == {(1, 2), (1, 3), (1, 4)}
    arena.record_forming([])
    assert view.flight() == {(1, 2), (1, 3)}
    arena.record_forming([(2, number) for number in range(5000)])
    assert {(1, 2), (1, 3), (2, 0)} < view.flight()
