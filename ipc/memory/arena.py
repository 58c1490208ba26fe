"""The shared-memory file of one process: the owner writes, others map it read-only.

A worker's holds results and is mapped by frontends; a frontend's holds large inputs and is mapped by workers.

Layout (little endian): 4 KiB header, 60 KiB flight record, then blocks. A block starts with a 64-byte stamp
(generation, nbytes); its data follow. The header is written once; the stamp is written by the owner only,
zeroed before a block may be reused, and checked by the reader after every copy.

The flight record names the requests that are on the device or in the hands of a preparing thread. It is written before
they are touched and read by frontends only after the worker died, to tell suspects from bystanders.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import LeaseRevoked, MachineUnfit, ProtocolError
from ipc.memory.blocks import ALIGNMENT

MAGIC = b"PENSTOCK"
LAYOUT_VERSION = 1
HEADER = struct.Struct("<8sIIQQ16s")
STAMP = struct.Struct("<QQ")
STAMP_NBYTES = 64
FLIGHT_OFFSET = ALIGNMENT
FLIGHT_NBYTES = 15 * ALIGNMENT
BLOCKS_OFFSET = FLIGHT_OFFSET + FLIGHT_NBYTES
_FLIGHT_ENTRY = struct.Struct("<QQ")
PREPARING_MAX = 16
_FLIGHT_MAX = FLIGHT_NBYTES // _FLIGHT_ENTRY.size - 1 - PREPARING_MAX
_PREPARING_OFFSET = BLOCKS_OFFSET - PREPARING_MAX * _FLIGHT_ENTRY.size


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
        entries = entries[:_FLIGHT_MAX]
        at = FLIGHT_OFFSET + _FLIGHT_ENTRY.size
        for tag, request in entries:
            _FLIGHT_ENTRY.pack_into(self._map, at, tag, request)
            at += _FLIGHT_ENTRY.size
        _FLIGHT_ENTRY.pack_into(self._map, FLIGHT_OFFSET, len(entries), 0)

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
        """(session tag, request id) pairs that were on the device or being prepared. For use once the owner is dead."""
        count = min(_FLIGHT_ENTRY.unpack_from(self._map, FLIGHT_OFFSET)[0], _FLIGHT_MAX)
        first = FLIGHT_OFFSET + _FLIGHT_ENTRY.size
        raw = self._map[first : first + count * _FLIGHT_ENTRY.size]
        preparing = _FLIGHT_ENTRY.iter_unpack(self._map[_PREPARING_OFFSET:BLOCKS_OFFSET])
        return set(_FLIGHT_ENTRY.iter_unpack(raw)) | {entry for entry in preparing if entry != (0, 0)}


def _read_header(buffer: mmap.mmap) -> ArenaHeader:
    if len(buffer) < BLOCKS_OFFSET:
        raise ProtocolError("arena file is too short")
    magic, version, _, pid, nbytes, epoch = HEADER.unpack_from(buffer, 0)
    if magic != MAGIC or version != LAYOUT_VERSION:
        raise ProtocolError("arena file has another layout")
    return ArenaHeader(epoch.decode("ascii", "replace"), pid, nbytes)
