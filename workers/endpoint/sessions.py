"""A worker's register of frontends: who they are, whether they live, what they have in flight.

Each session holds a pidfd of its frontend; the endpoint polls these descriptors beside its socket. `Hearings` waits
until all frontends have taken in what the worker told them. `Handler` is what the endpoint asks of the runtime for
them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ipc.memory.arena import ArenaView
from ipc.processes.liveness import open_pidfd
from ipc.wire import codec
from ipc.wire.catalogs import Entries, Heard, Replied, Reread, Told
from ipc.wire.messages import Hello, Load, Submit, Welcome
from ipc.wire.stats import Stats


@dataclass(slots=True)
class Session:
    """One registration of one frontend. `outstanding` maps request id to cost; `watching` asks for `Stats`.

    `inputs` is its arena for large inputs; `reading` are the requests whose block in there may still be read.
    `credits` is what it was told last of the queue. `pinged` is the time of the last `Ping`. `bundle` holds messages
    that leave at the end of the endpoint's present turn.
    """

    key: bytes
    tag: int
    slot: str
    pid: int
    pidfd: int
    outstanding: dict[int, int] = field(default_factory=dict)
    watching: bool = False
    credits: tuple[object, ...] = ()
    pinged: float = field(default_factory=time.monotonic)
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


class Hearings:
    """Which sessions have still to say that they have heard; a session that ends is waited for no longer."""

    def __init__(self, sessions: SessionTable, send: Callable[[Session, Told], None]) -> None:
        self._sessions, self._send = sessions, send
        self._open: dict[int, tuple[set[bytes], Callable[[], None]]] = {}
        self._numbers = itertools.count(1)

    def begin(self, then: Callable[[], None]) -> None:
        """Call `then` once all present sessions have taken in what was sent to them before."""
        number, sessions = next(self._numbers), list(self._sessions)
        self._open[number] = {session.key for session in sessions}, then
        for session in sessions:
            self._send(session, Told(number))

    def heard(self, session: Session, message: Heard) -> None:
        """A session has taken in what came before a `Told`."""
        self._strike(message.id, session.key)

    def drop(self, session: Session) -> None:
        """A session has ended."""
        for number in list(self._open):
            self._strike(number, session.key)

    def _strike(self, number: int, key: bytes) -> None:
        waiting, then = self._open.get(number, (set[bytes](), None))
        waiting.discard(key)
        if then is not None and not waiting:
            del self._open[number]
            then()


class CatalogOwner(Protocol):
    """The part of the runtime that reads the files of the catalog."""

    def all_entries(self) -> Entries:
        """All that frontends have been told of the catalog."""

    def reread(self, message: Reread, done: Callable[[Replied], None]) -> None:
        """Look at the files in another thread, which calls `done` once what has changed is posted."""


class Figures(Protocol):
    """The part of the runtime that has the figures of the worker."""

    def now(self) -> Stats:
        """Present figures."""


class Handler(Protocol):
    """The part of the runtime that the endpoint calls."""

    @property
    def draining(self) -> bool:
        """Whether the worker drains and refuses new requests."""

    @property
    def models(self) -> CatalogOwner:
        """The catalog."""

    def welcome(self) -> Welcome:
        """Present state, for a new session."""

    @property
    def statistics(self) -> Figures:
        """Figures of the whole worker."""

    def present(self) -> Welcome:
        """Present state, for somebody without a session. Changes nothing."""

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in, or raise a `PenstockError` that goes back as its failure.

        `payload` are the raw tensors of an infer call. When they lie in a block of the frontend, `Endpoint.reply` with
        the result or `Endpoint.unread` must be called once nothing reads them any more, however the request ends.
        """

    def cancel(self, session: Session, request: int) -> None:
        """Cancel a request whose caller has gone."""

    def taken(self, session: Session, request: int, count: int) -> None:
        """A frontend has taken so many parts of a stream, or bytes of generated text."""

    def want(self, message: Load) -> None:
        """Load a model, as a frontend asks."""

    def unload(self, model: str) -> None:
        """Unload a model, as a frontend asks."""

    def released(self) -> None:
        """Note the end of a lease: the arena may have room for jobs that wait."""

    def tick(self) -> None:
        """Called about every `tick_s`."""

    def turn_ended(self) -> None:
        """Everything that had arrived was handed over; called before the endpoint waits again."""
