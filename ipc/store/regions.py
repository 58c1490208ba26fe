"""The table of clients' shared memory regions: rows of the server's store (`ipc.store`), seen by all its processes.

1. A name is given once, in one transaction. A row outlives the frontend that wrote it.
2. A request that uses a region holds a shared lock on one byte of a file (`RegionTable.holding`): the place of the byte
   is the region's number. The kernel drops the locks of a process that dies.
3. An unregistered region takes no new request, and stays listed while any process holds a lock on its byte. The next
   change of the table deletes its row.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ipc.errors import InvalidInput, RegionExists, RegionNotFound
from ipc.store.store import Store, Table
from ipc.wire.messages import Region

Kind = Literal["system", "cuda"]
RESERVED_PREFIX = "penstock."
"""Beginning of the names of our own arenas; no client may register them."""
MAX_NAME_BYTES = 256
MAX_KEY_BYTES = 255
HANDLE_NBYTES = 64
MOST_BYTES = 1 << 62
_FLOCK = "hhqqi"
"""`struct flock`: type, whence, start, length, process."""
_HINT = (
    "; client and server need a common IPC namespace, and the server permission to read and write the object"
)


class RegionEntry(msgspec.Struct, frozen=True, gc=False):
    """One registered region; `key` as the client wrote it, for CUDA the handle in hexadecimal."""

    name: str
    kind: Kind
    key: str
    offset: int
    nbytes: int
    device: int = 0


def object_name(key: str, prefix: str) -> str:
    """File name of the POSIX object that a key means, in the sense of shm_open.

    Raises `InvalidInput` for a key that is none, is ours, leads elsewhere, or lacks the prefix of the settings.
    """
    name = key.lstrip("/")
    if not name:
        raise InvalidInput("shared memory key must not be empty")
    if "/" in name or "\0" in name or name in (".", "..") or _nbytes(name) > MAX_KEY_BYTES:
        raise InvalidInput(
            f"shared memory key {key[:300]!a}: expected a name without slashes of at most {MAX_KEY_BYTES} bytes"
        )
    if name.startswith(RESERVED_PREFIX):
        raise InvalidInput(
            f"shared memory key {key!a}: names that begin with {RESERVED_PREFIX!a} are reserved"
        )
    if not name.startswith(prefix):
        raise InvalidInput(
            f"shared memory key {key!a}: this server accepts keys that begin with {prefix!a} only"
        )
    return name


def open_object(directory: Path, name: str, key: str) -> int:
    """A descriptor of a client's POSIX object, for reading and writing; messages call the object `key`.

    Raises `InvalidInput` for an object that is missing, that may not be used, or that is no plain file.
    """
    try:
        fd = os.open(directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        raise InvalidInput(f"Unable to open shared memory region: {_quoted(key)}{_HINT}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidInput(f"Unable to open shared memory region: {_quoted(key)}{_HINT}")
    return fd


def check_size(fd: int, offset: int, nbytes: int, key: str) -> None:
    """Raise `InvalidInput` unless the object has all these bytes."""
    size = os.fstat(fd).st_size
    if offset + nbytes > size:
        raise InvalidInput(
            f"Invalid shared memory region: {_quoted(key)}: bytes {offset} to {offset + nbytes} of {size}"
        )


class _Row(RegionEntry, frozen=True):
    """A region with the place of its byte, which no two regions of a server share, and whether it was unregistered."""

    number: int = 0
    leaving: bool = False


class RegionTable:
    """The regions of one server."""

    def __init__(self, store: Store, most: int) -> None:
        """`most` is the number of regions that may be registered at a time."""
        self._table, self._most = Table(store, "regions", _Row), most
        self._path = store.directory / "regions.use"
        self._locks = -1
        """Descriptor of the file whose bytes are locked."""
        self._held: dict[int, int] = {}
        """Requests of this process that hold a region, by its number."""

    async def add(self, entry: RegionEntry) -> None:
        """Register a region.

        Raises `RegionExists`, `InvalidInput` for a bad name or one too many, and as `Table.change` does.
        """
        if not 0 < _nbytes(entry.name) <= MAX_NAME_BYTES:
            raise InvalidInput(f"shared memory region name: expected 1 to {MAX_NAME_BYTES} bytes of UTF-8")

        def insert(rows: dict[str, _Row]) -> None:
            self._let_go(rows)
            if entry.name in rows:
                raise RegionExists(f"shared memory region {_quoted(entry.name)} already in manager")
            if len(rows) >= self._most:
                raise InvalidInput(
                    f"{self._most} shared memory regions are registered (shared_memory.max_regions)"
                )
            number = max(time.time_ns(), *(row.number + 1 for row in rows.values()), 0)
            rows[entry.name] = _Row(**msgspec.structs.asdict(entry), number=number)

        await self._table.change(insert)

    async def remove(self, chosen: Callable[[RegionEntry], bool]) -> int:
        """Unregister regions, which stay listed until their requests have ended; returns how many there were.

        Raises as `Table.change` does.
        """
        if not self._table.rows():
            return 0

        def leave(rows: dict[str, _Row]) -> int:
            self._let_go(rows)
            ending = [row for row in rows.values() if not row.leaving and chosen(row)]
            rows.update({row.name: msgspec.structs.replace(row, leaving=True) for row in ending})
            return len(ending)

        return await self._table.change(leave)

    def find(self, name: str, holding: bool = False) -> RegionEntry:
        """The region of that name, for a new request or for one that is `holding` the region.

        Raises `RegionNotFound`. Only requests that hold an unregistered region still find the region.
        """
        return self._find(name, holding)

    def entries(self) -> list[RegionEntry]:
        """All regions by name, also unregistered regions that wait for the end of their requests."""
        listed = (row for row in self._table.rows().values() if not row.leaving or self._is_used(row))
        return sorted(listed, key=lambda row: row.name)

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these regions listed while a request uses them. Raises `RegionNotFound`."""
        with ExitStack() as held:
            for name in dict.fromkeys(names):
                number = self._find(name).number
                self._hold(number)
                held.callback(self._release, number)
                # Whoever unregisters a region writes first and looks at the locks later: this look must come last.
                if self._find(name).number != number:
                    raise _not_found(name)
            yield

    def _find(self, name: str, holding: bool = False) -> _Row:
        row = self._table.rows().get(name)
        if row is None or (row.leaving and not (holding and row.number in self._held)):
            raise _not_found(name)
        return row

    def _hold(self, number: int) -> None:
        if number not in self._held:
            self._lock(number, fcntl.F_RDLCK)
        self._held[number] = self._held.get(number, 0) + 1

    def _release(self, number: int) -> None:
        self._held[number] -= 1
        if not self._held[number]:
            del self._held[number]
            self._lock(number, fcntl.F_UNLCK)

    def _let_go(self, rows: dict[str, _Row]) -> None:
        """Delete unregistered regions that no request uses any more."""
        for row in list(rows.values()):
            if row.leaving and not self._is_used(row):
                del rows[row.name]

    def _is_used(self, row: _Row) -> bool:
        """Whether a request of this process or of another one holds the region."""
        if row.number in self._held:
            return True
        holder = fcntl.fcntl(self._file(), fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, row.number))
        kind: int = struct.unpack(_FLOCK, holder)[0]
        return kind != fcntl.F_UNLCK

    def _lock(self, number: int, kind: int) -> None:
        fcntl.fcntl(self._file(), fcntl.F_OFD_SETLK, _flock(kind, number))

    def _file(self) -> int:
        if self._locks < 0:
            self._locks = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._locks


def _flock(kind: int, byte: int) -> bytes:
    """A `struct flock` for one byte; the kernel wants the process to be 0."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def _not_found(name: str) -> RegionNotFound:
    return RegionNotFound(f"Unable to find shared memory region: {_quoted(name)}")


def part_of(entry: RegionEntry, offset: int, nbytes: int) -> Region:
    """`nbytes` from `offset` of a region, for a worker. Raises `InvalidInput` for bytes outside of the region."""
    where = f"shared memory region {_quoted(entry.name)}"
    if not 0 <= offset < entry.nbytes:
        raise InvalidInput(f"Invalid offset for {where}: {offset} of {entry.nbytes} bytes")
    if not 0 <= nbytes <= entry.nbytes - offset:
        raise InvalidInput(
            f"Invalid offset + byte size for {where}: {offset} + {nbytes}, it has {entry.nbytes} bytes"
        )
    key = entry.key.lstrip("/") if entry.kind == "system" else entry.key
    return Region(entry.kind, key, entry.offset + offset, nbytes, entry.device)


def _nbytes(text: str) -> int:
    """Length in UTF-8; beyond every limit for a text that is no Unicode."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return MOST_BYTES


def _quoted(name: str) -> str:
    return f"'{ascii(name[:200])[1:-1]}'"
