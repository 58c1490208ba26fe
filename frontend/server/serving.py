"""uvicorn's server with Penstock's end of life: nothing that reached this process is dropped.

On SIGTERM (reload, stop), or when a request count is used up:

1. take in every connection that waits in the accept queue, then close the listeners. The health address stays open when
   the whole server stops, since a failed liveness probe must not kill a draining server;
2. tell the application (`Drain.begin`); from now on answers say `Connection: close`;
3. connections that stay idle for `drain_s` are closed; requests in work go on: in a reload for `stream_drain_s`, when
   the server stops for `answer_until_s`. Then streams end with an error, and requests without an answer get 503;
4. the application shuts down, the process exits with 0.

A further SIGTERM means that the server stops after the reload, or that too many frontends drain: this frontend ends
now.

SIGINT and SIGQUIT cut all connections and exit as soon as the application has shut down.

The `Sweeper` ends connections past a deadline, in a drain and before.

The loop accepts one connection per turn. While turns are long, an accept queue would fill up; the kernel resets clients
that wait about a minute behind a full one. So a frontend takes several per turn from a long queue. A short queue stays
in the loop's hands, so that frontends share the connections of a burst.

`PenstockWorker` is the Gunicorn worker class of frontends: uvloop, httptools, deadlines, bounded buffers, this drain.
Worker is Gunicorn's word for its child, which is a frontend here. `gunicorn.conf.py` sets `worker_class` and `limits`.
Gunicorn's `graceful_timeout` and `timeout` hold; its `keepalive` and `worker_connections` are superseded by `limits`.
Gunicorn's own access log is off unless `accesslog` is set; Penstock's is `log.access` (`frontend.access_log`).

Gunicorn's native class (`worker_class = "asgi"`) serves the same application and is the alternative. The native class
lacks:

- the header deadline for silent and half-header connections, the floor for slow bodies, the connection cap;
- the deadline for clients that do not read their response;
- the drain: a reload under keep-alive load loses requests, because the last answer does not say `Connection: close`;
- `drain` in the state of the scopes, and the JSON form of the server's own errors;
- WebSockets whose clients are cut off when they take nothing, and that say 1001 in a drain.

`ServerLogger` brings Gunicorn's and uvicorn's lines into the one form of all logs, and only those that an operator can
use. Their lines of level info (signals, pids, ASGI's lifespan) become lines of level debug. What an operator needs of
them `frontend.arbiter.hooks` and `frontend.lifespan` log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import math
import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Collection, Generator
from types import FrameType
from typing import Any, ClassVar

from gunicorn.arbiter import Arbiter
from gunicorn.glogging import Logger
from uvicorn.config import Config
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker

from frontend.server import state
from frontend.server.drain import DRAIN, ENDING, SUCCESSION, Drain, end_by_default
from frontend.server.protocol import PenstockProtocol
from frontend.server.state import (
    FrontendState,
    ServerLimits,
    accept_waiting,
    draining,
    parent_holds,
    plain,
    too_slow,
    waiting_count,
)
from frontend.server.websocket import PenstockWebSocket

_BODY_PERIODS = 3
"""The average restarts after this many `body_floor_after_s`, so that a fast start does not pay for an endless stall."""


class Sweeper:
    """Ends connections past a deadline by `ServerLimits`, and beats the process' heart: one coarse timer per process.

    Each sweep looks at every connection once (about a microsecond each):

    1. a client that takes nothing of a waiting response for `write_stall_s` is cut off, also while the connection
       closes;
    2. a request body that arrives below the floor is answered 408;
    3. a head that is not complete after `header_deadline_s` ends the connection;
    4. an idle connection ends after `keepalive_s`, a silent new one after `header_deadline_s`, both after `drain_s` in
       a drain, unless bytes of a request have arrived that the loop has not read yet;
    5. a refused connection that lingers ends after `linger_s`.
    """

    def __init__(self, state: FrontendState, heartbeat: Callable[[], None]) -> None:
        self._state = state
        self._limits: ServerLimits = state.limits
        self._heartbeat = heartbeat
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat and sweep now and every `sweep_interval_s` from now on; needs a running loop."""
        self._timer = asyncio.get_running_loop().call_later(self._limits.sweep_interval_s, self.start)
        self._heartbeat()
        self.sweep()

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sweep(self) -> None:
        """Look at every connection once."""
        now = time.monotonic()
        expired = []
        for connection in list(self._state.connections):
            if isinstance(connection, PenstockProtocol) and self._is_expired(connection, now):
                expired.append(connection)
        if expired:
            _close_unless_readable(expired)
        for lingering in list(self._state.lingering):
            if isinstance(lingering, PenstockProtocol) and self._has_lingered(lingering, now):
                self._end_lingering(lingering, now)

    def _has_lingered(self, connection: PenstockProtocol, now: float) -> bool:
        return now - connection.lingering_since >= self._limits.linger_s

    def _is_expired(self, connection: PenstockProtocol, now: float) -> bool:
        """Apply the deadlines of a busy connection; true for one that has waited long enough for a request."""
        if self._is_stalled(connection, now):
            connection.transport.abort()
        elif connection.transport.is_closing():
            return False
        elif connection.running is not None:
            if connection.running.more_body:
                self._check_body(connection, now)
        elif connection.head_since:
            return now - connection.head_since >= self._limits.header_deadline_s
        else:
            return now >= self._idle_until(connection)
        return False

    def _idle_until(self, connection: PenstockProtocol) -> float:
        allowed = self._limits.header_deadline_s if connection.cycle is None else self._limits.keepalive_s
        until = connection.idle_since + allowed
        drain = self._state.drain
        if drain.draining:
            return min(until, max(connection.idle_since, drain.since) + self._limits.drain_s)
        return until

    def _is_stalled(self, connection: PenstockProtocol, now: float) -> bool:
        unsent = connection.transport.get_write_buffer_size()
        if not unsent:
            connection.stalled_since = 0.0
            return False
        flow = connection.flow
        untaken = unsent + _unacknowledged_nbytes(connection)
        if not connection.stalled_since or untaken < connection.untaken_nbytes or flow.write_resumed:
            connection.stalled_since = now
        flow.write_resumed = False
        connection.untaken_nbytes = untaken
        return now - connection.stalled_since >= self._limits.write_stall_s

    def _check_body(self, connection: PenstockProtocol, now: float) -> None:
        cycle, limits = connection.running, self._limits
        if cycle is None or cycle is not connection.cycle:
            return
        reading_s = connection.flow.reading_s(now)
        if connection.body_mark is None or cycle.waiting_for_100_continue:
            connection.body_mark = (reading_s, connection.body_nbytes)
            return
        since_s, since_nbytes = connection.body_mark
        elapsed_s = reading_s - since_s
        if elapsed_s < limits.body_floor_after_s:
            return
        rate = (connection.body_nbytes - since_nbytes) / elapsed_s
        if rate < limits.body_floor_bytes_per_s:
            connection.refuse(too_slow(rate, limits.body_floor_bytes_per_s))
        elif elapsed_s >= _BODY_PERIODS * limits.body_floor_after_s:
            connection.body_mark = (reading_s, connection.body_nbytes)

    def _end_lingering(self, connection: PenstockProtocol, now: float) -> None:
        unsent = connection.transport.get_write_buffer_size()
        if not unsent:
            connection.transport.close()
        elif self._is_stalled(connection, now):
            connection.transport.abort()


def _unacknowledged_nbytes(connection: PenstockProtocol) -> int:
    """Bytes in the kernel that the client has not acknowledged (SIOCOUTQ, tcp(7)).

    The kernel takes more from us only when much of its buffer of megabytes is free, so without this figure a slow
    reader would look like one that takes nothing.
    """
    fd = connection.transport.get_extra_info("socket").fileno()
    return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _close_unless_readable(connections: list[PenstockProtocol]) -> None:
    """Close connections that wait for a request, except those with bytes in the kernel: a request may have come."""
    poll = select.poll()
    by_fd = {}
    for connection in connections:
        fd = connection.transport.get_extra_info("socket").fileno()
        by_fd[fd] = connection
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(0):
        if by_fd[fd].idle_since:
            del by_fd[fd]
    for connection in by_fd.values():
        connection.transport.close()


_log = logging.getLogger("uvicorn.error")

_POLL_S = 0.05
_CANCEL_S = 0.2
_FAST_SHUTDOWN_S = 1.0
_LONG_QUEUE, _ACCEPTED_AT_ONCE = 128, 64
"""Waiting connections above which a frontend takes in several per turn of its loop, and how many."""


class DrainingServer(Server):
    """Serves one application on inherited listening sockets until a signal ends it."""

    def __init__(
        self, config: Config, limits: ServerLimits, drain: Drain, heartbeat: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.server_state: FrontendState = FrontendState(
            limits, drain, getattr(config.app, "render_refusal", plain), self._note_accepted
        )
        self._limits = limits
        self._drain = drain
        self._sweeper = Sweeper(self.server_state, heartbeat)
        self._since_ns = time.monotonic_ns()
        self._listeners: list[socket.socket] = []
        self._probed: list[socket.socket] = []
        self._adopting: set[asyncio.Future[Any]] = set()
        self._looks_soon = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen on copies of `sockets`."""
        self._sweeper.start()
        self.lifespan.state["drain"] = self._drain
        self._listeners = sockets or []
        # NOTE: the loop closes the descriptors it is given; the originals serve to empty the accept queue at the end.
        await super().startup(sockets=[listener.dup() for listener in self._listeners])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the main loop to drain (SIGTERM) or to stop at once (SIGINT, SIGQUIT)."""
        if sig != signal.SIGTERM:
            self.should_exit = self.force_exit = True
            return
        stops = SUCCESSION.is_stopping or not SUCCESSION.is_replaced(self._since_ns)
        if stops:
            self.end_soon()
        else:
            limits = self._limits
            patience_s = max(limits.stream_drain_s, limits.answer_until_s)
            self._drain.shorten(time.monotonic() + (0.0 if self.should_exit else patience_s))
            self.should_exit = True

    def end_soon(self) -> None:
        """Drain, within the time of a stop."""
        self._drain.shorten(time.monotonic() + self._limits.answer_until_s)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals on the loop. They are not raised again at the end, so a drained process exits with 0."""
        loop = asyncio.get_running_loop()
        for sig in ENDING:
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        try:
            yield
        finally:
            for sig in ENDING:
                loop.remove_signal_handler(sig)
                signal.signal(sig, signal.SIG_IGN)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, or cut everything off if a fast stop was asked for; then shut the application down."""
        if self._drain.until == math.inf:
            self.end_soon()
        await self._stop_accepting()
        self._drain.begin()
        self._close_websockets()
        await self._drain_connections()
        await self._end_connections()
        await self._shut_down_application()
        self._close(self._probed)
        self._sweeper.stop()

    async def _shut_down_application(self) -> None:
        """Let the application end, which may take as long as the drain: responses in the background go on."""
        ending = asyncio.ensure_future(self.lifespan.shutdown())
        forced_until = math.inf
        while not ending.done():
            now = time.monotonic()
            if self.force_exit:
                forced_until = min(forced_until, now + _FAST_SHUTDOWN_S)
            if self._is_over:
                self._drain.end()
            if now >= min(forced_until, self._drain.until + self._limits.reserve_s):
                ending.cancel()
            await asyncio.wait([ending], timeout=_POLL_S)

    @property
    def _is_over(self) -> bool:
        return self.force_exit or time.monotonic() >= self._drain.until

    async def _stop_accepting(self) -> None:
        port = self._limits.health_port
        self._probed = [
            one for one in self._listeners if port and one.getsockname()[1] == port and not parent_holds(one)
        ]
        ending = [listener for listener in self._listeners if listener not in self._probed]
        waiting = [connection for listener in ending for connection in accept_waiting(listener)]
        self._close(ending)
        self._adopt(waiting)
        await _wait_for(self._adopting, self._limits.drain_s)

    def _note_accepted(self) -> None:
        """Look at the accept queues in the next turn of the loop."""
        if not self._looks_soon:
            self._looks_soon = True
            asyncio.get_running_loop().call_soon(self._shorten_queues)

    def _shorten_queues(self) -> None:
        self._looks_soon = False
        for listener in self._listeners:
            if waiting_count(listener) > _LONG_QUEUE:
                self._adopt(accept_waiting(listener, _ACCEPTED_AT_ONCE))

    def _adopt(self, accepted: list[socket.socket]) -> None:
        """Serve connections that the loop has not accepted itself."""
        loop = asyncio.get_running_loop()
        adoptions = [
            loop.connect_accepted_socket(self._new_protocol, one, ssl=self.config.ssl) for one in accepted
        ]
        if adoptions:
            adopting = asyncio.gather(*adoptions, return_exceptions=True)
            self._adopting.add(adopting)
            adopting.add_done_callback(self._adopting.discard)

    def _close(self, listeners: list[socket.socket]) -> None:
        for listener, server in zip(self._listeners, self.servers, strict=True):
            if listener in listeners:
                server.close()
                listener.close()

    def _new_protocol(self) -> PenstockProtocol:
        return PenstockProtocol(self.config, self.server_state, self.lifespan.state)

    def _close_websockets(self) -> None:
        for connection in list(self.server_state.connections):
            if not isinstance(connection, PenstockProtocol):
                connection.shutdown()

    async def _drain_connections(self) -> None:
        ticks = 0
        while self._is_busy() and not self._is_over:
            self._sweeper.sweep()
            await self.on_tick(ticks)
            ticks += 1
            await asyncio.sleep(_POLL_S)

    def _is_busy(self) -> bool:
        state = self.server_state
        return bool(state.lingering or state.tasks or any(map(self._counts, state.connections)))

    def _counts(self, connection: object) -> bool:
        """Whether the drain waits for a connection; probes come for ever while their address is open."""
        address = getattr(connection, "server", None)
        return not (self._probed and address and address[1] == self._limits.health_port)

    async def _end_connections(self) -> None:
        """End the connections that the drain left: requests without an answer with 503, streams by their last events.

        Others are cut, and so is a stream whose client does not take its last events.
        """
        if not self._is_busy():
            return
        state = self.server_state
        _log.warning("Ending %d connections and %d requests.", len(state.connections), len(state.tasks))
        self._drain.end()
        for connection in self._http_connections():
            if self.force_exit:
                connection.transport.abort()
            elif connection.running is None:
                connection.transport.close()
            elif not connection.running.response_started:
                connection.refuse(draining())
        await _wait_for(state.tasks, self._limits.reserve_s / 2)
        for connection in self._http_connections():
            if connection.running is None:
                connection.transport.close()
            else:
                connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await _wait_for(state.tasks, _CANCEL_S)

    def _http_connections(self) -> list[PenstockProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, PenstockProtocol)]


async def _wait_for(tasks: Collection[asyncio.Future[Any]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(list(tasks), timeout=timeout_s)


ERRORS_TO_STDERR = "-"


class ServerLogger(Logger):  # type: ignore[misc]
    """Gunicorn's logger, whose errors go where all of this process's lines go, unless `errorlog` names a file."""

    def setup(self, cfg: Any) -> None:
        """Called at the start and on each reload."""
        super().setup(cfg)
        if cfg.errorlog == ERRORS_TO_STDERR:
            self.error_log.handlers.clear()
            self.error_log.propagate = True
        if self.loglevel > logging.DEBUG:
            self.error_log.setLevel(max(self.loglevel, logging.WARNING))


class PenstockWorker(UvicornWorker):  # type: ignore[misc]
    """One frontend process under Gunicorn."""

    limits: ClassVar[ServerLimits] = ServerLimits()

    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {
        "loop": "uvloop",
        "http": PenstockProtocol,
        "ws": PenstockWebSocket,
        "ws_max_size": 64 * 1024,
        "ws_per_message_deflate": False,
        "lifespan": "on",
        "server_header": False,
        "proxy_headers": False,
        "callback_notify": None,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_alone = False
        # uvicorn's lines go the way of Gunicorn's.
        logging.getLogger("uvicorn.error").propagate = self.log.error_log.propagate

    def init_process(self) -> None:
        """Make room for the connections that the limits allow, then boot and serve."""
        limits = self.limits
        connections = (limits.max_connections, limits.max_grpc_connections)
        state.raise_file_limit(state.files_for(connections))
        allowed, _ = state.connection_shares(connections, state.hard_limit())
        if allowed < limits.max_connections:
            self.log.warning("server.max_connections: the limit of open files leaves room for %d", allowed)
            type(self).limits = dataclasses.replace(limits, max_connections=allowed)
        super().init_process()

    def init_signals(self) -> None:
        """See `end_by_default`; other signals as Gunicorn has them."""
        super().init_signals()
        end_by_default()

    async def _serve(self) -> None:
        self.config.app = self.wsgi
        limits = dataclasses.replace(self.limits, graceful_timeout_s=float(self.cfg.graceful_timeout))
        server = DrainingServer(self.config, limits, DRAIN, heartbeat=lambda: self._beat(server))
        await server.serve(sockets=[listener.sock for listener in self.sockets])
        if not server.started:
            sys.exit(Arbiter.WORKER_BOOT_ERROR)

    def _beat(self, server: DrainingServer) -> None:
        """Tell the arbiter that this process turns over; drain if the arbiter is gone."""
        self.notify()
        if os.getppid() != self.ppid and not self._is_alone:
            self._is_alone = True
            self.log.critical("The arbiter is gone; this frontend drains.")
            server.end_soon()
