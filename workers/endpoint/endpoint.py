"""The worker's end of the socket to all frontends: one thread that owns the ROUTER, the sessions and the leases.

1. Poll the socket, the pidfds of all frontends, a wake-up descriptor, and whatever descriptors the runtime adds.
2. Take in everything that has arrived; hand requests to the handler (`workers.runtime`).
3. Run the calls that other threads posted (results above all), then the periodic tick.
4. Send each session all messages of this turn in one bundle.

A dead frontend is dropped at once: its requests are cancelled and its leases revoked. A peer that is not registered
gets `Goodbye` and registers again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ipc.errors import PenstockError, ProtocolError
from ipc.memory import input_arena
from ipc.memory.arena import Block, LeaseTable
from ipc.processes.paths import RunPaths
from ipc.wire import codec
from ipc.wire.catalogs import Entries, Heard, Replied, Reread, Spread
from ipc.wire.codec import ToFrontend, ToWorker, receive
from ipc.wire.messages import (
    VERSION,
    BlockRef,
    Cancel,
    Credits,
    Failure,
    Goodbye,
    Hello,
    InputFreed,
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
    Watch,
)
from ipc.wire.stats import Look, Looked, SessionState, Stats
from ipc.wire.streams import Deltas, DeltasTaken, Part, PartsConsumed
from workers import foreign
from workers.endpoint.sessions import Handler, Hearings, Session, SessionTable

log = logging.getLogger(__name__)

_BURST = 512


def bind(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    """A ROUTER that listens at `path`. Raises `zmq.ZMQError`."""
    socket = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 1),
        (zmq.SNDHWM, 10000),
        (zmq.RCVHWM, 10000),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_NBYTES)
    socket.bind(f"ipc://{path}")
    return socket


def send(socket: zmq.Socket[bytes], key: bytes, frames: list[codec.Payload]) -> None:
    """Send one bundle to the frontend `key`. Raises `zmq.ZMQError` when the frontend takes none."""
    # NOTE: only the first part can be refused; the rest of a message that has begun is always taken.
    socket.send(key, codec.MORE)
    codec.send(socket, frames)


class Endpoint:
    """ROUTER socket of one worker slot with its sessions and leases."""

    def __init__(
        self, paths: RunPaths, slot: int, leases: LeaseTable, handler: Handler, tick_s: float = 0.1
    ) -> None:
        self.sessions = SessionTable()
        self.leases = leases
        self._handler, self._tick_s, self._paths = handler, tick_s, paths
        self._context = zmq.Context()
        self._socket = bind(self._context, paths.worker_socket(slot))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # NOTE: not closed by `close`. A thread that ends late would write into the file that has the number then.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._poller.register(self._wake, zmq.POLLIN)
        self._watched: dict[int, Callable[[], None]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self._unsent: dict[bytes, Session] = {}
        self._stopping = False
        self._next_tick = 0.0
        # NOTE: only now, because these make a cycle of references: the context of an endpoint that could not be made
        # must close its socket when the exception goes, and not wait for the garbage collector, which would hang.
        self._hearings = Hearings(self.sessions, self._send)
        self._handlers: dict[type, Callable[[Session, Any, bytes], None]] = {
            Submit: self._submit,
            Release: self._release,
            Cancel: lambda session, message, _: handler.cancel(session, message.id),
            PartsConsumed: lambda session, message, _: handler.taken(session, message.id, message.count),
            DeltasTaken: self._deltas_taken,
            Ping: self._pong,
            Load: lambda _, message, __: handler.want(message),
            Unload: lambda _, message, __: handler.unload(message.model),
            Reread: self._reread,
            Spread: self._spread,
            Heard: lambda session, message, _: self._hearings.heard(session, message),
            Watch: self._watch,
            Inputs: self._map_inputs,
            Goodbye: lambda session, _, __: self.drop(session, "it said goodbye"),
        }

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` in the endpoint's thread whenever `fd` is readable."""
        self._watched[fd] = callback
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`."""
        if self._watched.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def post(self, work: Callable[[], None], wake: bool = True) -> None:
        """Run `work` in the endpoint's thread, soon. Without `wake` the work waits for the next `wake` or tick."""
        self._posted.append(work)
        if wake:
            self.wake()

    def wake(self) -> None:
        """Have the endpoint run what was posted. Safe from any thread."""
        if self._posted and not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    @property
    def has_posted(self) -> bool:
        """Whether calls wait that other threads have posted, such as answers that have not left yet."""
        return bool(self._posted)

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
                # NOTE: what nobody has woken the endpoint for waits no longer than until a tick.
                self.wake()
            self._flush()
            # PERF: last, because the device thread needs the interpreter that this thread lends out when it waits.
            self._handler.turn_ended()

    def _tick_is_due(self) -> bool:
        return time.monotonic() >= self._next_tick

    def close(self) -> None:
        """Close the socket and forget all sessions."""
        for session in self.sessions:
            self.sessions.drop(session)
        self._socket.close(0)
        self._context.term()

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
        # NOTE: before the line is read: a call that is posted from now on wakes the endpoint again.
        self._woken = False
        for _ in range(len(self._posted)):
            self._posted.popleft()()
            if self._posted and self._tick_is_due():
                self._woken = True
                os.eventfd_write(self._wake, 1)
                return

    def _receive(self) -> None:
        for number in range(_BURST):
            if number and self._tick_is_due():
                return
            try:
                received = receive(self._socket)
            except zmq.Again:
                return
            if received is None:
                return
            self._take_in(received[0], received[1:])

    def _take_in(self, key: bytes, frames: list[bytes]) -> None:
        try:
            arrived = codec.unpack(frames)
        except ProtocolError as error:
            log.warning("dropped frames from a frontend: %s", error.message)
            return
        for text, payload in arrived:
            try:
                self._dispatch(key, codec.decode_to_worker(text), payload)
            except ProtocolError as error:
                log.warning("dropped a message from a frontend: %s", error.message)

    def _dispatch(self, key: bytes, message: ToWorker, payload: bytes) -> None:
        session = self.sessions.get(key)
        if isinstance(message, Hello):
            self._register(key, session, message)
        elif isinstance(message, Look):
            self._send_stranger(key, self._looked())
        elif session is None:
            self._send_stranger(key, Goodbye())
        else:
            self._handlers[type(message)](session, message, payload)

    def _pong(self, session: Session, message: Ping, _: bytes) -> None:
        session.pinged = time.monotonic()
        self._send(session, Pong(message.seq))

    def _deltas_taken(self, session: Session, message: DeltasTaken, _: bytes) -> None:
        for request, nbytes in zip(message.ids, message.nbytes, strict=False):
            self._handler.taken(session, request, nbytes)

    def _release(self, session: Session, message: Release, _: bytes) -> None:
        if self.leases.release(session.key, message.offset, message.generation):
            self._handler.released()

    @staticmethod
    def _watch(session: Session, message: Watch, _: bytes) -> None:
        session.watching = message.on

    def _map_inputs(self, session: Session, message: Inputs, _: bytes) -> None:
        if session.inputs is None or session.inputs.header.epoch != message.epoch:
            session.inputs = input_arena.view_of(self._paths, message)

    def _register(self, key: bytes, known: Session | None, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ProtocolError(f"frontend speaks version {hello.version}, this worker {VERSION}")
        session = known
        if session is not None and session.tag != hello.tag:
            self.drop(session, "it registered again")
            session = None
        if session is None:
            try:
                session = self.sessions.add(key, hello)
            except OSError as error:
                # Dead already, or no descriptor is left; a frontend that lives says hello again.
                log.warning("frontend %s (pid %d) could not be registered: %s", hello.slot, hello.pid, error)
                return
            self._poller.register(session.pidfd, zmq.POLLIN)
            log.info("%s (pid %d) has joined", session.slot, session.pid)
        self._send(session, self._handler.welcome())
        self._send(session, self._handler.models.all_entries())
        if self._handler.draining:
            self._send(session, Leaving())

    def _submit(self, session: Session, message: Submit, frame: bytes) -> None:
        session.outstanding[message.id] = message.work.cost
        try:
            self._handler.submit(session, message, self._payload(session, message, frame))
            return
        except PenstockError as error:
            self.fail(session.key, message.id, error)
        except BaseException as raised:
            # NOTE: a model family's own code runs in there; its bugs end one request, not the worker.
            place = f"request {message.work.request_id} could not be taken"
            answer = foreign.answer_of(raised, place, "the model failed on this request")
            self.fail(session.key, message.id, answer)
        self.unread(session.key, message.id)

    @staticmethod
    def _payload(session: Session, message: Submit, frame: bytes) -> memoryview:
        """Raw tensors of a request: the payload of its message, or a block of the frontend."""
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
        self._hearings.drop(session)
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
        self._lend(session, result, block, inline)

    def part(self, key: bytes, part: Part, block: Block | None, inline: bytes | None) -> None:
        """Send a part of an answer that goes on. Endpoint thread only.

        A block is leased to the session, or freed when nobody waits for it.
        """
        session = self.sessions.get(key)
        if session is not None and part.result.id in session.outstanding:
            self._lend(session, part, block, inline)
        elif block is not None:
            self.leases.discard(block)

    def deltas(self, key: bytes, deltas: Deltas) -> None:
        """Send what is new for the streams of a session. Endpoint thread only."""
        session = self.sessions.get(key)
        if session is not None:
            self._send(session, deltas)

    def _lend(
        self, session: Session, message: Result | Part, block: Block | None, inline: bytes | None
    ) -> None:
        if block is not None:
            self.leases.lease(block, session.key)
        self._send(session, message, inline)

    def fail(self, key: bytes, request: int, error: PenstockError) -> None:
        """Send a failure. Endpoint thread only."""
        session = self.sessions.get(key)
        if session is not None and session.outstanding.pop(request, None) is not None:
            self._send(
                session, Failure(request, error.code, error.message, error.retry_after_s, error.detail)
            )

    def unread(self, key: bytes, request: int) -> None:
        """Nothing reads the input block of a failed or cancelled request any more. Idempotent; endpoint thread only."""
        session = self.sessions.get(key)
        if session is not None and request in session.reading:
            session.reading.discard(request)
            self._send(session, InputFreed(request))

    def _reread(self, session: Session, message: Reread, _: bytes) -> None:
        def done(replied: Replied) -> None:
            self.post(lambda: self.answer(session, replied))

        self._handler.models.reread(message, done)

    def _spread(self, session: Session, message: Spread, _: bytes) -> None:
        self._hearings.begin(lambda: self.answer(session, Replied(message.id)))

    def answer(self, session: Session, message: Replied) -> None:
        """Answer `Reread` or `Spread`. Endpoint thread only."""
        if self.sessions.get(session.key) is session:
            self._send(session, message)

    def broadcast(self, message: Models | Entries | Leaving) -> None:
        """Send one message to every session. Endpoint thread only."""
        for session in self.sessions:
            self._send(session, message)

    def tell(self, session: Session, credits: Credits) -> None:
        """Send a session what it may send. Endpoint thread only."""
        self._send(session, credits)

    def show(self, stats: Stats) -> None:
        """Send `stats` to the sessions that watch. Endpoint thread only."""
        for session in self.sessions:
            if session.watching:
                self._send(session, stats)

    def _send(self, session: Session, message: ToFrontend, inline: bytes | None = None) -> None:
        """Send a message at the end of this turn."""
        if session.bundle.full:
            self._send_bundle(session)
        session.bundle.add(message, inline)
        self._unsent[session.key] = session

    def _flush(self) -> None:
        """Send what this turn left for the sessions; called at the end of every turn."""
        while self._unsent:
            self._send_bundle(self._unsent.popitem()[1])

    def _send_bundle(self, session: Session) -> None:
        if self.sessions.get(session.key) is not session:
            return
        try:
            send(self._socket, session.key, session.bundle.take())
        except zmq.ZMQError as error:
            self.drop(session, f"it takes no messages ({error.strerror})")

    def _looked(self) -> Looked:
        now, handler = time.monotonic(), self._handler
        sessions = [
            SessionState(
                session.slot,
                session.pid,
                len(session.outstanding),
                sum(session.outstanding.values()),
                now - session.pinged,
            )
            for session in self.sessions
        ]
        return Looked(handler.present(), handler.statistics.now(), sessions, handler.draining)

    def _send_stranger(self, key: bytes, message: Goodbye | Looked) -> None:
        bundle = codec.Bundle()
        bundle.add(message)
        with contextlib.suppress(zmq.ZMQError):
            send(self._socket, key, bundle.take())


def block_ref(block: Block | None) -> BlockRef | None:
    """Wire form of a block."""
    return None if block is None else BlockRef(block.offset, block.nbytes, block.generation)
