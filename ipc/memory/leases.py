"""Who may read which block: the owner's table of block states.

    free -> reserved -> leased(session, since) -> free

A block is reserved before the device runs and leased when its result is sent. A lease ends by `release`, by the death
of its session, or by age. Before a block becomes free its stamp is zeroed, so a late reader notices. Generations only
grow. The owner's endpoint thread reserves, leases and
releases; the device thread and the preparing threads discard blocks of jobs that ended: hence the lock.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from ipc.memory.arena import BLOCKS_OFFSET, STAMP_NBYTES, Arena
from ipc.memory.blocks import BlockList, round_up


@dataclass(slots=True)
class Block:
    """One allocated range: `offset` into the arena, `nbytes` of data, the `generation` that its reader must see."""

    offset: int
    nbytes: int
    generation: int
    session: bytes | None = None
    since: float = 0.0


class LeaseTable:
    """States of all blocks of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._blocks = BlockList(BLOCKS_OFFSET, arena.nbytes - BLOCKS_OFFSET)
        self._live: dict[int, Block] = {}
        self._generation = 0
        self._lock = threading.Lock()
        self.revoked = 0
        self.reclaimed = 0

    @property
    def capacity_nbytes(self) -> int:
        """Largest result that could ever fit."""
        return self._blocks.total_nbytes - STAMP_NBYTES

    @property
    def used_nbytes(self) -> int:
        """Bytes of reserved and leased blocks, rounded up to whole blocks."""
        return self._blocks.total_nbytes - self._blocks.free_nbytes

    @property
    def leases(self) -> int:
        """Blocks that some session may read now."""
        with self._lock:
            return sum(1 for block in self._live.values() if block.session is not None)

    def reserve(self, nbytes: int) -> Block | None:
        """A block for `nbytes` of data, or None when there is no room now."""
        with self._lock:
            offset = self._blocks.allocate(nbytes + STAMP_NBYTES)
            if offset is None:
                return None
            self._generation += 1
            block = Block(offset, nbytes, self._generation)
            self._live[offset] = block
        self._arena.stamp(offset, block.generation, nbytes)
        return block

    def data(self, block: Block) -> memoryview:
        """Writable bytes of a reserved block."""
        return self._arena.data(block.offset, block.nbytes)

    def lease(self, block: Block, session: bytes) -> None:
        """Hand the right to read `block` to `session`."""
        with self._lock:
            block.session, block.since = session, time.monotonic()

    def discard(self, block: Block) -> None:
        """Free a block that no session was told about."""
        self._free([block])

    def release(self, session: bytes, offset: int, generation: int) -> bool:
        """End one lease. Idempotent: False when the lease is not the session's (any more)."""
        with self._lock:
            block = self._live.get(offset)
            if block is None or block.generation != generation or block.session != session:
                return False
        self._free([block])
        return True

    def revoke_session(self, session: bytes) -> int:
        """End all leases of a dead session; returns how many."""
        with self._lock:
            dead = [block for block in self._live.values() if block.session == session]
        self._free(dead)
        self.reclaimed += len(dead)
        return len(dead)

    def revoke_older(self, max_age_s: float) -> int:
        """End leases older than `max_age_s`; returns how many. Each one is a bug or a stuck frontend."""
        before = time.monotonic() - max_age_s
        with self._lock:
            old = [
                block for block in self._live.values() if block.session is not None and block.since < before
            ]
        self._free(old)
        self.revoked += len(old)
        return len(old)

    def _free(self, blocks: list[Block]) -> None:
        with self._lock:
            for block in blocks:
                if self._live.get(block.offset) is block:
                    self._arena.stamp(block.offset, 0, 0)
                    del self._live[block.offset]
                    self._blocks.free(block.offset)

    def verify(self) -> None:
        """Assert the invariants: live blocks are exactly the allocated ranges, nothing overlaps, nothing is lost."""
        with self._lock:
            used = self._blocks.used
            assert set(used) == set(self._live)
            assert all(used[b.offset] == round_up(b.nbytes + STAMP_NBYTES) for b in self._live.values())
            ranges = sorted([*used.items(), *self._blocks.holes])
            at = BLOCKS_OFFSET
            for offset, nbytes in ranges:
                assert offset == at, "gap or overlap in the arena"
                at += nbytes
            assert at == BLOCKS_OFFSET + self._blocks.total_nbytes
