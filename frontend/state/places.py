"""Where stored objects lie: in a directory that all frontends of a server share, or at the brokers of a cluster; bells.

1. A store has rows in tables (`Rows`), and may have contents beside them (`frontend.state.content`).
2. Rows that wait for a process name the process. `Lives` tells whether the process still runs.
3. A `Place` makes all three. `OnDisk` is a directory; `frontend.cluster.place` is the place of a gateway.

A `Bell` wakes processes that wait for a change of a store, at once and without looks at intervals:

1. A bell is a file. A process rings after its commit, by a new time of the file.
2. A process that waits listens: the kernel (inotify) makes a descriptor readable at each ring. The event loop calls a
   function then.
3. A ring may be lost: the ringing process dies between commit and ring, the file is removed while processes listen, or
   the kernel has no watch left for this user (`fs.inotify.max_user_instances`). So listeners also look at their store
   at intervals, short ones without a watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

from frontend.state.content import Contents
from ipc.processes.liveness import identity_of, is_running, own_identity
from ipc.store.lasting import LastingStore
from ipc.store.store import How

_IN_ATTRIB = 0x4
"""Times, mode or number of links have changed (inotify(7))."""
_EVENTS_NBYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


class Bell:
    """The file `path`, which the first listener makes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ring(self) -> None:
        """Wake all listeners. Without a file nobody listens."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    @contextmanager
    def listening(self, heard: Callable[[], None]) -> Iterator[bool]:
        """Within the context the running event loop calls `heard` after rings; False where the kernel has no watch."""
        descriptor = self._watch()
        if descriptor < 0:
            yield False
            return

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, _EVENTS_NBYTES)
            heard()

        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, read)
        try:
            yield True
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def _watch(self) -> int:
        """A descriptor that is readable after a ring; negative where there is none."""
        try:
            self._path.touch(mode=0o600)
        except OSError:
            return -1
        descriptor: int = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor >= 0 and _LIBC.inotify_add_watch(descriptor, os.fsencode(self._path), _IN_ATTRIB) < 0:
            os.close(descriptor)
            return -1
        return descriptor


R = TypeVar("R")
Tables = Mapping[str, tuple[str, ...]]
"""Columns that tell a row from all others, by table. Tables whose rows follow from other rows are left out."""


class Rows(Protocol):
    """The tables of one store. All methods raise `StoreUnreadable`."""

    async def version(self) -> int:
        """A number that is another one after a commit of any process."""

    def exists(self) -> bool:
        """Whether there may be rows that can be read now."""

    async def read(self, how: How[R]) -> R:
        """The result of `how`, which reads from one snapshot."""

    async def find(self, how: How[R]) -> R:
        """The result of `how`, one statement that reads a few rows."""

    async def write(self, how: How[R], committed: Callable[[], None] | None = None) -> R:
        """The result of `how`, whose changes are committed, also if the caller is cancelled.

        `how` may be called again where another process was quicker. `committed` is called after the commit.
        """


class Ringing(Protocol):
    """Wakes processes that wait for a change; see `Bell`."""

    def ring(self) -> None:
        """Wake all listeners."""

    def listening(self, heard: Callable[[], None]) -> AbstractContextManager[bool]:
        """Within the context `heard` is called after rings; False where none can be heard."""


class Lives(Protocol):
    """Processes that rows may name."""

    def own(self) -> str:
        """This process."""

    def server(self) -> str:
        """All processes that can go on with the work of one another, this one among them."""

    def is_running(self, identity: str) -> bool:
        """Whether a process, or any process of a server, still runs."""


class Place(Protocol):
    """Where the stores of a process lie."""

    @property
    def lives(self) -> Lives:
        """Processes that may name each other in rows of this place."""

    def rows(self, file: str, schema: str, tables: Tables) -> Rows:
        """The tables of a store, which `schema` makes. Opens nothing yet.

        Rows of `tables` may reach other processes one by one, in the order of `tables`.
        """

    def contents(self, name: str) -> Contents:
        """The contents of a store."""

    def bell(self, name: str) -> Ringing:
        """What tells of changes of a store."""

    def lacks_room(self, nbytes: int) -> bool:
        """Whether so many bytes more would find no room; False where nobody can tell. May take its time."""


class Processes:
    """Processes of this host. A server is an arbiter."""

    own = staticmethod(own_identity)
    is_running = staticmethod(is_running)

    def server(self) -> str:
        """The server of this process: the arbiter that has forked the process, for ever."""
        return _server()


@lru_cache(maxsize=1)
def _server() -> str:
    return identity_of(os.getppid())


class OnDisk:
    """The directory `root`."""

    def __init__(self, root: Path) -> None:
        self._root, self.lives = root, Processes()

    def rows(self, file: str, schema: str, tables: Tables) -> LastingStore:
        """A file of SQLite."""
        return LastingStore(self._root / file, schema)

    def contents(self, name: str) -> Contents:
        """A directory of files."""
        return Contents(self._root / name)

    def bell(self, name: str) -> Bell:
        """A file that the kernel watches."""
        return Bell(self._root / name)

    def lacks_room(self, nbytes: int) -> bool:
        """Whether the file system has fewer free bytes; False where it does not tell."""
        try:
            place = next(path for path in (self._root, *self._root.parents) if path.exists())
            found = os.statvfs(place)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < nbytes
