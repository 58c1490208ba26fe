"""A worker's register of frontends: who they are, whether they live, what they have in flight.

Each session holds a pidfd of its frontend; the endpoint polls these descriptors beside its socket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ipc.memory.arena import ArenaView
from ipc.processes.liveness import open_pidfd
from ipc.wire import codec
from ipc.wire.messages import Hello


@dataclass(slots=True)
class Session:
    """One registration of one frontend. `outstanding` maps request id to cost; `watching` asks for `Stats`.

    `inputs` is its arena for large inputs; `reading` are the requests whose block in there may still be read.
    `bundle` holds messages that leave at the end of the endpoint's present turn.
    """

    key: bytes
    tag: int
    slot: str
    pid: int
    pidfd: int
    outstanding: dict[int, int] = field(default_factory=dict)
    watching: bool = False
    inputs: ArenaView | None = None
    reading: set[int] = field(default_factory=set)
    bundle: codec.Bundle = field(default_factory=codec.Bundle)


class SessionTable:
    """Sessions by socket identity and by pidfd."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Session] = {}
        self._by_fd: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_key.values()))

    def get(self, key: bytes) -> Session | None:
        """Session of a socket identity."""
        return self._by_key.get(key)

    def by_fd(self, fd: int) -> Session | None:
        """Session whose process descriptor is `fd`."""
        return self._by_fd.get(fd)

    def add(self, key: bytes, hello: Hello) -> Session:
        """Register a frontend. Raises `ProcessLookupError` when it is dead already."""
        session = Session(key, hello.tag, hello.slot, hello.pid, open_pidfd(hello.pid, hello.start_ticks))
        self._by_key[key] = session
        self._by_fd[session.pidfd] = session
        return session

    def drop(self, session: Session) -> None:
        """Forget a session and close its descriptor."""
        if self._by_key.pop(session.key, None) is not None:
            del self._by_fd[session.pidfd]
            os.close(session.pidfd)
