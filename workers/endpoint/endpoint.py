"""Worker side of the socket: one thread that owns the ROUTER, the sessions and the leases.

1. Poll the socket, the pidfds of all frontends, a wake-up descriptor, and whatever descriptors the runtime adds.
2. Take in everything that has arrived; hand requests to the handler.
3. Run what other threads posted (results above all), then the periodic tick.

A dead frontend is dropped at once: its requests are cancelled and its leases revoked. A peer that is not registered
gets `Goodbye` and registers again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from ipc.errors import InferenceFailed, PenstockError, ProtocolError
from ipc.memory import input_arena
from ipc.memory.leases import Block, LeaseTable
from ipc.processes.paths import RunPaths
from ipc.wire import codec
from ipc.wire.directions import ToFrontend, ToWorker
from ipc.wire.messages import (
    VERSION,
    BlockRef,
    Cancel,
    Credits,
    Failure,
    Goodbye,
    Hello,
    Inputs,
    Leaving,
    Load,
    Models,
    Ping,
    Pong,
    Release,
    Result,
    Submit,
    Unload,
    Unread,
    Watch,
    Welcome,
)
from ipc.wire.stats import Stats
from ipc.wire.streams import Part, Taken
from workers.endpoint import router
from workers.endpoint.sessions import Session, SessionTable

log = logging.getLogger(__name__)

_BURST = 512


class Handler(Protocol):
    """What the endpoint asks of the runtime."""

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""

    def welcome(self) -> Welcome:
        """Present state, for a new session."""

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in, or raise a `PenstockError` that goes back as its failure.

        `payload` are the raw tensors of an infer call. When they lie in a block of the frontend, `Endpoint.reply` with
        the result or `Endpoint.unread` must be called once nothing reads them any more, however the request ends.
        """

    def cancel(self, session: Session, request: int) -> None:
        """The caller of a request has gone."""

    def taken(self, session: Session, message: Taken) -> None:
        """A frontend has taken parts of a stream."""

    def load(self, message: Load) -> None:
        """A frontend wants a model."""

    def unload(self, model: str) -> None:
        """Somebody wants a model's memory back."""

    def released(self) -> None:
        """A lease ended, so there may be room in the arena."""

    def tick(self) -> None:
        """Called about every `tick_s`."""


class Endpoint:
    """ROUTER socket of one worker slot with its sessions and leases."""

    def __init__(
        self, paths: RunPaths, slot: int, leases: LeaseTable, handler: Handler, tick_s: float = 0.1
    ) -> None:
        self.sessions = SessionTable()
        self.leases = leases
        self._handler, self._tick_s, self._paths = handler, tick_s, paths
        self._context = zmq.Context()
        self._socket = router.bind(self._context, paths.worker_socket(slot))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake, zmq.POLLIN)
        self._watched: dict[int, Callable[[], None]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._next_tick = 0.0

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` in the endpoint's thread whenever `fd` is readable."""
        self._watched[fd] = callback
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        if self._watched.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` in the endpoint's thread, soon. Safe from any thread."""
        self._posted.append(work)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Make `run` return after the present turn. Safe from any thread."""
        self.post(self._stop)

    def _stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        """The loop; returns after `stop`."""
        self._next_tick = time.monotonic()
        while not self._stopping:
            wait_s = max(0.0, self._next_tick - time.monotonic())
            for fd, _ in self._poller.poll(int(wait_s * 1000) + 1 if wait_s else 0):
                self._ready(fd)
            if self._tick_is_due():
                self._next_tick = time.monotonic() + self._tick_s
                self._handler.tick()

    def _tick_is_due(self) -> bool:
        return time.monotonic() >= self._next_tick

    def close(self) -> None:
        """Close the socket and forget all sessions."""
        for session in self.sessions:
            self.sessions.drop(session)
        self._socket.close(0)
        self._context.term()
        os.close(self._wake)

    def _ready(self, fd: object) -> None:
        if fd is self._socket:
            self._receive()
        elif fd == self._wake:
            self._run_posted()
        elif isinstance(fd, int) and fd in self._watched:
            self._watched[fd]()
        elif isinstance(fd, int) and (session := self.sessions.by_fd(fd)) is not None:
            self.drop(session, "its process died")

    def _run_posted(self) -> None:
        """Run what other threads have posted. The tick, which tells that this process lives, comes in between."""
        os.eventfd_read(self._wake)
        for _ in range(len(self._posted)):
            self._posted.popleft()()
            if self._posted and self._tick_is_due():
                os.eventfd_write(self._wake, 1)
                return

    def _receive(self) -> None:
        for number in range(_BURST):
            if number and self._tick_is_due():
                return
            received = router.receive(self._socket)
            if received is None:
                return
            key, *frames = received
            try:
                payload = frames[1] if len(frames) > 1 else b""
                self._dispatch(key, codec.decode_to_worker(frames), payload)
            except ProtocolError as error:
                log.warning("dropped a frame from a frontend: %s", error.message)

    def _dispatch(self, key: bytes, message: ToWorker, frame: bytes) -> None:
        session = self.sessions.get(key)
        if isinstance(message, Hello):
            self._register(key, session, message)
        elif session is None:
            self._send(key, Goodbye())
        elif isinstance(message, Submit):
            self._submit(session, message, frame)
        elif isinstance(message, Release):
            if self.leases.release(key, message.offset, message.generation):
                self._handler.released()
        elif isinstance(message, Cancel):
            self._handler.cancel(session, message.id)
        elif isinstance(message, Taken):
            self._handler.taken(session, message)
        elif isinstance(message, Ping):
            self._send(key, Pong(message.seq))
        elif isinstance(message, Load):
            self._handler.load(message)
        elif isinstance(message, Unload):
            self._handler.unload(message.model)
        elif isinstance(message, Watch):
            session.watching = message.on
        elif isinstance(message, Inputs):
            if session.inputs is None or session.inputs.header.epoch != message.epoch:
                session.inputs = input_arena.view_of(self._paths, message)
        elif isinstance(message, Goodbye):
            self.drop(session, "it said goodbye")

    def _register(self, key: bytes, known: Session | None, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ProtocolError(f"frontend speaks version {hello.version}, this worker {VERSION}")
        if known is not None and known.tag != hello.tag:
            self.drop(known, "it registered again")
            known = None
        if known is None:
            try:
                session = self.sessions.add(key, hello)
            except OSError as error:
                # Dead already, or no descriptor is left; a frontend that lives says hello again.
                log.warning("frontend %s (pid %d) could not be registered: %s", hello.slot, hello.pid, error)
                return
            self._poller.register(session.pidfd, zmq.POLLIN)
            log.info("%s (pid %d) has joined", session.slot, session.pid)
        self._send(key, self._handler.welcome())
        if self._handler.draining:
            self._send(key, Leaving())

    def _submit(self, session: Session, message: Submit, frame: bytes) -> None:
        session.outstanding[message.id] = message.work.cost
        try:
            self._handler.submit(session, message, self._payload(session, message, frame))
            return
        except PenstockError as error:
            self.fail(session.key, message.id, error)
        except Exception:
            # NOTE: a model family's own code runs in there; its bugs end one request, not the worker.
            log.exception("request %s could not be taken", message.work.request_id)
            self.fail(session.key, message.id, InferenceFailed("the model failed on this request"))
        self.unread(session.key, message.id)

    @staticmethod
    def _payload(session: Session, message: Submit, frame: bytes) -> memoryview:
        """Raw tensors of a request: the frame after it, or a block of the frontend."""
        block = message.block
        if block is None:
            return memoryview(frame)
        session.reading.add(message.id)
        if session.inputs is None:
            raise ProtocolError("a block of inputs was named before the arena it lies in")
        return session.inputs.data(block.offset, block.nbytes, block.generation)

    def drop(self, session: Session, why: str) -> None:
        """End a session: cancel its requests, revoke its leases."""
        if self.sessions.get(session.key) is not session:
            return
        self._poller.unregister(session.pidfd)
        self.sessions.drop(session)
        for request in list(session.outstanding):
            self._handler.cancel(session, request)
        revoked = self.leases.revoke_session(session.key)
        log.info("%s has left: %s; %d leases reclaimed", session.slot, why, revoked)

    def reply(self, key: bytes, result: Result, block: Block | None, inline: bytes | None) -> None:
        """Send a result, which says too that the inputs were read. Endpoint thread only.

        A block is leased to the session, or freed when nobody waits for it.
        """
        session = self.sessions.get(key)
        if session is None or session.outstanding.pop(result.id, None) is None:
            if block is not None:
                self.leases.discard(block)
            self.unread(key, result.id)
            return
        session.reading.discard(result.id)
        self._lend(key, result, block, inline)

    def part(self, key: bytes, part: Part, block: Block | None, inline: bytes | None) -> None:
        """Send a part of an answer that goes on. Endpoint thread only.

        A block is leased to the session, or freed when nobody waits for it.
        """
        session = self.sessions.get(key)
        if session is not None and part.result.id in session.outstanding:
            self._lend(key, part, block, inline)
        elif block is not None:
            self.leases.discard(block)

    def _lend(self, key: bytes, message: Result | Part, block: Block | None, inline: bytes | None) -> None:
        if block is not None:
            self.leases.lease(block, key)
        if not self._send(key, message, inline) and block is not None:
            self.leases.release(key, block.offset, block.generation)

    def fail(self, key: bytes, request: int, error: PenstockError) -> None:
        """Send a failure. Endpoint thread only."""
        session = self.sessions.get(key)
        if session is not None and session.outstanding.pop(request, None) is not None:
            self._send(key, Failure(request, error.code, error.message, error.retry_after_s, error.detail))

    def unread(self, key: bytes, request: int) -> None:
        """Nothing reads the input block of a failed or cancelled request any more. Idempotent; endpoint thread only."""
        session = self.sessions.get(key)
        if session is not None and request in session.reading:
            session.reading.discard(request)
            self._send(key, Unread(request))

    def broadcast(self, message: Credits | Models | Leaving) -> None:
        """Send one message to every session. Endpoint thread only."""
        for session in self.sessions:
            self._send(session.key, message)

    def show(self, stats: Stats) -> None:
        """Send `stats` to the sessions that watch. Endpoint thread only."""
        for session in self.sessions:
            if session.watching:
                self._send(session.key, stats)

    def _send(self, key: bytes, message: ToFrontend, inline: bytes | None = None) -> bool:
        try:
            router.send(self._socket, key, codec.encode(message), inline)
        except zmq.ZMQError as error:
            session = self.sessions.get(key)
            if session is not None:
                self.drop(session, f"it takes no messages ({error.strerror})")
            return False
        return True


def block_ref(block: Block | None) -> BlockRef | None:
    """Wire form of a block."""
    return None if block is None else BlockRef(block.offset, block.nbytes, block.generation)
