"""Where stored objects lie: in a directory that all frontends of a server share, or at the brokers of a cluster.

1. A store has rows in tables (`Rows`), and may have contents beside them (`frontend.state.content`).
2. Rows that wait for a process name the process. `Lives` tells whether the process still runs.
3. A `Place` makes all three. `OnDisk` is a directory; `frontend.cluster.place` is the place of a gateway.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

from frontend.state.content import Contents
from ipc.processes.liveness import identity_of, is_running, own_identity
from ipc.store.bell import Bell
from ipc.store.store import How, LastingStore

R = TypeVar("R")
Tables = Mapping[str, tuple[str, ...]]
"""Columns that tell a row from all others, by table. Tables whose rows follow from other rows are left out."""


class Rows(Protocol):
    """The tables of one store. All methods raise `StoreUnreadable`."""

    def version(self) -> int:
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
    """Wakes processes that wait for a change; see `ipc.store.bell.Bell`."""

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
