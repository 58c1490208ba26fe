"""The table of clients' shared memory regions: rows of the server's store (`ipc.store`), seen by all its processes.

1. A name is given once, in one transaction. A row outlives the frontend that wrote it.
2. A request that uses a region holds a shared lock on one byte of a file (`RegionTable.holding`): the place of the byte
   is the generation of the region's row. The kernel drops the locks of a process that dies.
3. Unregistering writes a second row. The region takes no new request from then on, and stays listed while any process
   holds a lock on its byte. The next change of the table deletes both rows.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ipc.errors import InvalidInput, RegionExists, RegionNotFound
from ipc.store.store import Change, Row, Store
from ipc.wire.messages import Region

Kind = Literal["system", "cuda"]
RESERVED_PREFIX = "penstock."
"""Beginning of the names of our own arenas; no client may register them."""
MAX_NAME_BYTES = 256
MAX_KEY_BYTES = 255
HANDLE_NBYTES = 64
MOST_BYTES = 1 << 62
_KIND = "regions"
_KEY, _LEAVING = "region ", "leaving "
"""Keys are these and a name."""
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
    """A descriptor of a client's POSIX object, for reading and writing; `key` is how messages call it.

    Raises `InvalidInput` when there is none, when it may not be used, and when it is no plain file.
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


class RegionTable:
    """The rows of one server."""

    def __init__(self, store: Store, most: int) -> None:
        """`most` is the number of regions that may be registered at a time."""
        self._store, self._most = store, most
        self._rows: Mapping[str, Row] = {}
        self._decoded: dict[int, RegionEntry] = {}
        self._uses = -1
        """Descriptor of the file whose bytes are locked."""
        self._held: dict[int, int] = {}
        """Requests of this process that hold a region, by the generation of its row."""

    async def add(self, entry: RegionEntry) -> None:
        """Register a region.

        Raises `RegionExists`, `InvalidInput` for a bad name or one too many, and as `Store.write` does.
        """
        if not 0 < _nbytes(entry.name) <= MAX_NAME_BYTES:
            raise InvalidInput(f"shared memory region name: expected 1 to {MAX_NAME_BYTES} bytes of UTF-8")

        def insert(change: Change) -> None:
            rows = self._without_leavers(change)
            if _key(entry.name) in rows:
                raise RegionExists(f"shared memory region {_quoted(entry.name)} already in manager")
            if sum(key.startswith(_KEY) for key in rows) >= self._most:
                raise InvalidInput(
                    f"{self._most} shared memory regions are registered (shared_memory.max_regions)"
                )
            change.put(_KIND, _key(entry.name), msgspec.json.encode(entry))

        await self._store.write(insert)

    async def remove(self, chosen: Callable[[RegionEntry], bool]) -> int:
        """Unregister regions, which stay listed until their requests have ended; returns how many there were.

        Raises as `Store.write` does.
        """
        if not self._store.rows(_KIND):
            return 0

        def leave(change: Change) -> int:
            present = [entry for _, entry, leaving in _entries(self._without_leavers(change)) if not leaving]
            names = [entry.name for entry in present if chosen(entry)]
            for name in names:
                change.put(_KIND, _leaving(name), b"")
            return len(names)

        return await self._store.write(leave)

    def find(self, name: str, holding: bool = False) -> RegionEntry:
        """The region of that name, for a new request or for one that is `holding` the region.

        Raises `RegionNotFound`; a region that was unregistered is there for those only that hold it.
        """
        row = self._row(name, holding)
        entry = self._decoded.get(row.generation)
        if entry is None:
            # PERF: until the next change of any region, a region is decoded once.
            entry = self._decoded[row.generation] = _decode(row)
        return entry

    def entries(self) -> list[RegionEntry]:
        """All regions by name, those included that only wait for the end of their requests."""
        found = _entries(self._store.rows(_KIND))
        listed = (entry for row, entry, leaving in found if not leaving or self._is_used(row))
        return sorted(listed, key=lambda entry: entry.name)

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these regions listed while a request uses them. Raises `RegionNotFound`."""
        with ExitStack() as held:
            for name in dict.fromkeys(names):
                row = self._row(name)
                self._hold(row.generation)
                held.callback(self._release, row.generation)
                # Whoever unregisters a region writes first and looks at the locks later: this look must come last.
                if self._row(name).generation != row.generation:
                    raise _not_found(name)
            yield

    def _row(self, name: str, holding: bool = False) -> Row:
        rows = self._store.rows(_KIND)
        if rows is not self._rows:
            self._rows, self._decoded = rows, {}
        row = rows.get(_key(name))
        if row is None or (_leaving(name) in rows and not (holding and row.generation in self._held)):
            raise _not_found(name)
        return row

    def _hold(self, generation: int) -> None:
        if generation not in self._held:
            self._lock(generation, fcntl.F_RDLCK)
        self._held[generation] = self._held.get(generation, 0) + 1

    def _release(self, generation: int) -> None:
        self._held[generation] -= 1
        if not self._held[generation]:
            del self._held[generation]
            self._lock(generation, fcntl.F_UNLCK)

    def _without_leavers(self, change: Change) -> dict[str, Row]:
        """The rows, after unregistered regions that no request uses any more have been deleted."""
        rows = change.rows(_KIND)
        for row, entry, leaving in list(_entries(rows)):
            if leaving and not self._is_used(row):
                for key in (_key(entry.name), _leaving(entry.name)):
                    change.remove(_KIND, key)
                    del rows[key]
        return rows

    def _is_used(self, row: Row) -> bool:
        """Whether a request of this process or of another one holds the region."""
        if row.generation in self._held:
            return True
        found = fcntl.fcntl(self._file(), fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, row.generation))
        kind: int = struct.unpack(_FLOCK, found)[0]
        return kind != fcntl.F_UNLCK

    def _lock(self, generation: int, kind: int) -> None:
        fcntl.fcntl(self._file(), fcntl.F_OFD_SETLK, _flock(kind, generation))

    def _file(self) -> int:
        if self._uses < 0:
            path = self._store.directory / "regions.use"
            self._uses = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._uses

    def close(self) -> None:
        """Close the file of the locks, which ends them."""
        if self._uses >= 0:
            os.close(self._uses)
        self._uses, self._held = -1, {}


def _flock(kind: int, byte: int) -> bytes:
    """A `struct flock` for one byte; the kernel wants the process to be 0."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)


def _key(name: str) -> str:
    """Key of a region's own row."""
    return _KEY + name


def _leaving(name: str) -> str:
    """Key of the row that says of a region that it was unregistered."""
    return _LEAVING + name


def _decode(row: Row) -> RegionEntry:
    return msgspec.json.decode(row.value, type=RegionEntry)


def _entries(rows: Mapping[str, Row]) -> Iterator[tuple[Row, RegionEntry, bool]]:
    """Each region with its row, and whether it was unregistered."""
    for key, row in rows.items():
        if key.startswith(_KEY):
            entry = _decode(row)
            yield row, entry, _leaving(entry.name) in rows


def _not_found(name: str) -> RegionNotFound:
    return RegionNotFound(f"Unable to find shared memory region: {_quoted(name)}")


def part_of(entry: RegionEntry, offset: int, nbytes: int) -> Region:
    """`nbytes` from `offset` of a region, for a worker. Raises `InvalidInput` for what lies outside of it."""
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
    """Length in UTF-8; beyond every limit for what is no Unicode text."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return MOST_BYTES


def _quoted(name: str) -> str:
    return f"'{ascii(name[:200])[1:-1]}'"
