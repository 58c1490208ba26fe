"""The shared-memory file of one process: the owner writes, others map it read-only.

A worker's holds results and is mapped by frontends; a frontend's holds large inputs and is mapped by workers.

Layout (little endian): 4 KiB header, 60 KiB flight record, then blocks. A block starts with a 64-byte stamp
(generation, nbytes); its data follow. The header is written once; the stamp is written by the owner only,
zeroed before a block may be reused, and checked by the reader after every copy.

The flight record names the requests that are on the device, in a batch that is being formed, or in the hands of a
preparing thread. It is written before they are touched and read by frontends only after the worker died, to tell
suspects from bystanders.

`BlockList` is the owner's list of free ranges. `LeaseTable` is the owner's table of block states:

    free -> reserved -> leased(session, since) -> free

A block is reserved before the device runs and leased when its result is sent. A lease ends by `release`, by the death
of its session, or by age. Before a block becomes free its stamp is zeroed, so a late reader notices. Generations only
grow. The owner's endpoint thread reserves, leases and releases; the device thread and the preparing threads discard
blocks of jobs that ended: hence the lock.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import LeaseRevoked, MachineUnfit, ProtocolError

ALIGNMENT = 4096
MAGIC = b"PENSTOCK"
LAYOUT_VERSION = 2
HEADER = struct.Struct("<8sIIQQ16s")
STAMP = struct.Struct("<QQ")
STAMP_NBYTES = 64
FLIGHT_OFFSET = ALIGNMENT
FLIGHT_NBYTES = 15 * ALIGNMENT
BLOCKS_OFFSET = FLIGHT_OFFSET + FLIGHT_NBYTES
_FLIGHT_ENTRY = struct.Struct("<QQ")
PREPARING_MAX = 16
_PREPARING_OFFSET = BLOCKS_OFFSET - PREPARING_MAX * _FLIGHT_ENTRY.size
_LIST_NBYTES = (_PREPARING_OFFSET - FLIGHT_OFFSET) // 2
"""Of each of the two lists of the flight record: requests on the device, then requests of the batch being formed."""
_LIST_MAX = _LIST_NBYTES // _FLIGHT_ENTRY.size - 1


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks of `ALIGNMENT` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BlockList:
    """Allocator over `nbytes` bytes that start at `base`. All sizes are multiples of `ALIGNMENT`."""

    def __init__(self, base: int, nbytes: int) -> None:
        if base % ALIGNMENT or nbytes % ALIGNMENT:
            raise ValueError("base and size must be aligned")
        self._starts = [base]
        self._sizes = [nbytes]
        self._used: dict[int, int] = {}
        self.total_nbytes = nbytes
        self.free_nbytes = nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of at least `nbytes` bytes, or None when no hole is large enough."""
        need = round_up(max(nbytes, 1))
        for index, size in enumerate(self._sizes):
            if size >= need:
                offset = self._starts[index]
                if size == need:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += need
                    self._sizes[index] -= need
                self._used[offset] = need
                self.free_nbytes -= need
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give a range back. Raises `ProtocolError` for an offset that is not allocated."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ProtocolError(f"offset {offset} is not allocated")
        self.free_nbytes += size
        index = bisect.bisect(self._starts, offset)
        if index < len(self._starts) and offset + size == self._starts[index]:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, offset)
            self._sizes.insert(index, size)

    @property
    def used(self) -> dict[int, int]:
        """Copy of the allocated ranges: offset -> nbytes."""
        return dict(self._used)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Free ranges as (offset, nbytes), sorted."""
        return list(zip(self._starts, self._sizes, strict=True))


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """What the first page says: epoch (16 hex digits), owner pid, size in bytes."""

    epoch: str
    pid: int
    nbytes: int


class Arena:
    """Owner's side: creates, faults in, stamps and unlinks the file."""

    def __init__(self, path: Path, nbytes: int, epoch: str, setting: str = "arena.bytes") -> None:
        """Create `path` exclusively with `nbytes` preallocated and touched; `setting` gave the size.

        Raises `MachineUnfit` that names the size needed when the file system cannot hold it.
        """
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.path, self.nbytes, self.epoch = path, nbytes, epoch
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # NOTE: the map keeps a duplicate of the descriptor, and so the lock by which a sweep sees a live owner.
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, nbytes)
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise MachineUnfit(
                f"{setting} {nbytes} does not fit on {path.parent}: {os.strerror(error.errno or 0)}"
            ) from error
        finally:
            os.close(fd)
        HEADER.pack_into(self._map, 0, MAGIC, LAYOUT_VERSION, 0, os.getpid(), nbytes, epoch.encode())
        self.view = memoryview(self._map)

    def data(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of the block at `offset`."""
        start = offset + STAMP_NBYTES
        return self.view[start : start + nbytes]

    def stamp(self, offset: int, generation: int, nbytes: int) -> None:
        """Mark the block at `offset` as holding `nbytes` of `generation` (0 = nobody may read it)."""
        STAMP.pack_into(self._map, offset, generation, nbytes)

    def record_flight(self, entries: list[tuple[int, int]]) -> None:
        """Name the (session tag, request id) pairs on the device; an empty list clears the record."""
        self._record(FLIGHT_OFFSET, entries)

    def record_forming(self, entries: list[tuple[int, int]]) -> None:
        """Name the pairs of the batch that is being formed; an empty list clears this part of the record."""
        self._record(FLIGHT_OFFSET + _LIST_NBYTES, entries)

    def _record(self, start: int, entries: list[tuple[int, int]]) -> None:
        entries = entries[:_LIST_MAX]
        at = start + _FLIGHT_ENTRY.size
        for tag, request in entries:
            _FLIGHT_ENTRY.pack_into(self._map, at, tag, request)
            at += _FLIGHT_ENTRY.size
        _FLIGHT_ENTRY.pack_into(self._map, start, len(entries), 0)

    def record_preparing(self, place: int, tag: int, request: int) -> None:
        """Name the request that thread `place` (below `PREPARING_MAX`) prepares now; zeros when the thread is done."""
        _FLIGHT_ENTRY.pack_into(self._map, _PREPARING_OFFSET + place * _FLIGHT_ENTRY.size, tag, request)

    def close(self) -> None:
        """Unlink the name. The mapping ends with the last view of its bytes, in any process."""
        self.path.unlink(missing_ok=True)


class ArenaView:
    """Reader's side: a read-only, populated mapping, valid even after the owner died and the name is gone."""

    def __init__(self, path: Path, epoch: str) -> None:
        """Map `path`. Raises `ProtocolError` when the file is not the arena of this epoch."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.nbytes = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.header = _read_header(self._map)
        if self.header.epoch != epoch or self.header.nbytes != self.nbytes:
            raise ProtocolError(f"{path.name} is not the arena of epoch {epoch}")
        self.view = memoryview(self._map)

    def data(self, offset: int, nbytes: int, generation: int) -> memoryview:
        """Read-only bytes of a block. Raises `LeaseRevoked` when the stamp has another generation."""
        start = offset + STAMP_NBYTES
        if offset % ALIGNMENT or offset < BLOCKS_OFFSET or nbytes < 0 or start + nbytes > self.nbytes:
            raise ProtocolError(f"block {offset}+{nbytes} lies outside the arena")
        self.check(offset, generation)
        return self.view[start : start + nbytes]

    def check(self, offset: int, generation: int) -> None:
        """Raise `LeaseRevoked` when the block no longer holds `generation`. Call after every copy."""
        if STAMP.unpack_from(self._map, offset)[0] != generation:
            raise LeaseRevoked("the result was taken back before it could be sent", retry_after_s=1)

    def flight(self) -> set[tuple[int, int]]:
        """The (session tag, request id) pairs that the flight record names. For use once the owner is dead."""
        preparing = _FLIGHT_ENTRY.iter_unpack(self._map[_PREPARING_OFFSET:BLOCKS_OFFSET])
        named = {entry for entry in preparing if entry != (0, 0)}
        for start in (FLIGHT_OFFSET, FLIGHT_OFFSET + _LIST_NBYTES):
            count = min(_FLIGHT_ENTRY.unpack_from(self._map, start)[0], _LIST_MAX)
            first = start + _FLIGHT_ENTRY.size
            named.update(_FLIGHT_ENTRY.iter_unpack(self._map[first : first + count * _FLIGHT_ENTRY.size]))
        return named


def _read_header(buffer: mmap.mmap) -> ArenaHeader:
    if len(buffer) < BLOCKS_OFFSET:
        raise ProtocolError("arena file is too short")
    magic, version, _, pid, nbytes, epoch = HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != LAYOUT_VERSION:
        raise ProtocolError("arena file has another layout")
    return ArenaHeader(epoch.decode("ascii", "replace"), pid, nbytes)


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
