"""The table of client shared memory regions: one small file per region in the run directory.

A file is put in place by a link, which fails when the name is taken, so two frontends never register one name twice.
All processes of the server see a row the moment it is there; it outlives the frontend that wrote it.

Requests that use a region hold a shared lock on its file (`RegionTable.holding`). A region that is unregistered
meanwhile is marked by a second file: it takes no new request and stays listed until the last of its requests has ended.
The kernel drops the locks of a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ipc.errors import InvalidInput, RegionExists, RegionNotFound
from ipc.processes.paths import RunPaths
from ipc.wire.messages import Region

Kind = Literal["system", "cuda"]
RESERVED_PREFIX = "penstock."
"""Beginning of the names of our own arenas; no client may register them."""
MAX_NAME_BYTES = 256
MAX_KEY_BYTES = 255
HANDLE_NBYTES = 64
MOST_BYTES = 1 << 62
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

    def __init__(self, paths: RunPaths, most: int) -> None:
        """`most` is the number of regions that may be registered at a time."""
        self._directory, self._most = paths.regions(), most
        self._seen: dict[str, tuple[tuple[int, int], RegionEntry]] = {}
        self._held: dict[Path, tuple[int, int]] = {}
        """Descriptor with the lock, and requests that share it."""

    def add(self, entry: RegionEntry) -> None:
        """Register a region. Raises `RegionExists`, and `InvalidInput` for a bad name or one too many."""
        if not 0 < _nbytes(entry.name) <= MAX_NAME_BYTES:
            raise InvalidInput(f"shared memory region name: expected 1 to {MAX_NAME_BYTES} bytes of UTF-8")
        self._let_go(self._path(entry.name))
        if sum(1 for _ in self._directory.glob("[!.]*")) >= self._most:
            raise InvalidInput(
                f"{self._most} shared memory regions are registered (shared_memory.max_regions)"
            )
        draft = self._directory / f".{secrets.token_hex(8)}"
        try:
            draft.write_bytes(msgspec.json.encode(entry))
            os.link(draft, self._path(entry.name))
        except FileExistsError:
            raise RegionExists(f"shared memory region {_quoted(entry.name)} already in manager") from None
        finally:
            draft.unlink(missing_ok=True)

    def find(self, name: str, holding: bool = False) -> RegionEntry:
        """The region of that name, for a new request or for one that is `holding` the region.

        Raises `RegionNotFound`; a region that was unregistered is there for those only that hold it.
        """
        try:
            path = self._path(name)
            if _mark(path).exists() and not (holding and path in self._held):
                raise FileNotFoundError
            facts = path.stat()
            # PERF: a row is never changed, so a file that is still the same one needs not be read again.
            stamp = facts.st_ino, facts.st_mtime_ns
            known = self._seen.get(name)
            if known is None or known[0] != stamp:
                known = stamp, msgspec.json.decode(path.read_bytes(), type=RegionEntry)
                self._remember(name, known)
            return known[1]
        except (FileNotFoundError, UnicodeEncodeError):
            self._seen.pop(name, None)
            raise RegionNotFound(f"Unable to find shared memory region: {_quoted(name)}") from None

    def entries(self) -> list[RegionEntry]:
        """All regions by name, those included that only wait for the end of their requests."""
        found = []
        for path in self._directory.glob("[!.]*"):
            self._let_go(path)
            with contextlib.suppress(FileNotFoundError):
                found.append(msgspec.json.decode(path.read_bytes(), type=RegionEntry))
        return sorted(found, key=lambda entry: entry.name)

    @contextmanager
    def holding(self, names: Iterable[str]) -> Iterator[None]:
        """Keep these regions listed while a request uses them. Raises `RegionNotFound`."""
        with ExitStack() as held:
            for name in dict.fromkeys(names):
                self.find(name)
                held.callback(self._release, self._hold(name))
            yield

    def _hold(self, name: str) -> Path:
        path = self._path(name)
        descriptor, count = self._held.get(path, (-1, 0))
        if not count:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise RegionNotFound(f"Unable to find shared memory region: {_quoted(name)}") from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise RegionNotFound(f"Unable to find shared memory region: {_quoted(name)}") from None
        self._held[path] = descriptor, count + 1
        return path

    def _release(self, path: Path) -> None:
        descriptor, count = self._held.pop(path)
        if count > 1:
            self._held[path] = descriptor, count - 1
            return
        os.close(descriptor)
        self._let_go(path)

    def remove(self, name: str) -> bool:
        """Forget a region, at once or when its requests have ended; whether there was one."""
        try:
            path = self._path(name)
            self.find(name)
        except (RegionNotFound, UnicodeEncodeError):
            return False
        _mark(path).touch()
        self._let_go(path)
        return True

    def _let_go(self, path: Path) -> None:
        """Delete a marked row that no request holds."""
        mark = _mark(path)
        if not mark.exists():
            return
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            mark.unlink(missing_ok=True)
            return
        try:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # NOTE: where another process was first, the row may be that of a new region with the same name.
                if mark.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    path.unlink()
                    mark.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def clear(self) -> None:
        """Forget all regions, when the server starts."""
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)

    def _remember(self, name: str, known: tuple[tuple[int, int], RegionEntry]) -> None:
        if len(self._seen) >= 2 * self._most:
            self._seen.clear()
        self._seen[name] = known

    def _path(self, name: str) -> Path:
        return self._directory / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _mark(path: Path) -> Path:
    """The file that says of a row that its region was unregistered."""
    return path.with_name(f".{path.name}.going")


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
