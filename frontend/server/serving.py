"""uvicorn's server with Penstock's end of life: nothing that reached this process is dropped.

On SIGTERM (reload, stop, or a request count that is used up):

1. take in every connection that waits in the accept queue, then close the listeners; that of the health address stays
   open when the whole server stops: a probe of life must not kill a server that drains;
2. tell the application (`Drain.begin`); from now on answers say `Connection: close`;
3. connections that stay idle for `drain_s` are closed; requests in work may go on until `answer_until_s`, then they
   get 503;
4. the application shuts down, the process exits with 0.

SIGINT and SIGQUIT cut all connections and exit as soon as the application has shut down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType

from uvicorn.config import Config
from uvicorn.server import Server

from frontend.server.drain import Drain
from frontend.server.protocol import PenstockProtocol
from frontend.server.refusal import draining, plain
from frontend.server.state import FrontendState, ServerLimits
from frontend.server.sweep import Sweeper

_log = logging.getLogger("uvicorn.error")

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_POLL_S = 0.05
_NOTICE_S = 0.1
_CANCEL_S = 0.2
_FAST_SHUTDOWN_S = 1.0


class DrainingServer(Server):
    """Serves one application on inherited listening sockets until a signal ends it."""

    def __init__(
        self, config: Config, limits: ServerLimits, drain: Drain, heartbeat: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.server_state: FrontendState = FrontendState(
            limits, drain, getattr(config.app, "render_refusal", plain)
        )
        self._limits = limits
        self._drain = drain
        self._sweeper = Sweeper(self.server_state, heartbeat)
        self._listeners: list[socket.socket] = []
        self._probed: list[socket.socket] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen on copies of `sockets`."""
        self._sweeper.start()
        self.lifespan.state["drain"] = self._drain
        self._listeners = sockets or []
        # NOTE: the loop closes the descriptors it is given; the originals serve to empty the accept queue at the end.
        await super().startup(sockets=[listener.dup() for listener in self._listeners])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the main loop to drain (SIGTERM) or to stop at once (SIGINT, SIGQUIT)."""
        self.should_exit = True
        if sig != signal.SIGTERM:
            self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals on the loop. They are not raised again at the end, so a drained process exits with 0."""
        loop = asyncio.get_running_loop()
        for sig in _SIGNALS:
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        try:
            yield
        finally:
            for sig in _SIGNALS:
                loop.remove_signal_handler(sig)
                signal.signal(sig, signal.SIG_IGN)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, or cut everything off if a fast stop was asked for; then shut the application down."""
        self.should_exit = True
        deadline = time.monotonic() + self._limits.answer_until_s
        await self._stop_accepting()
        self._drain.begin()
        self._close_websockets()
        await self._drain_connections(deadline)
        await self._end_connections()
        reserve_s = self._limits.graceful_timeout_s - self._limits.answer_until_s
        left_s = max(deadline - time.monotonic(), 0.0) + reserve_s
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), _FAST_SHUTDOWN_S if self.force_exit else left_s)
        self._close(self._probed)
        self._sweeper.stop()

    async def _stop_accepting(self) -> None:
        port = self._limits.health_port
        self._probed = [
            one for one in self._listeners if port and one.getsockname()[1] == port and not parent_holds(one)
        ]
        ending = [listener for listener in self._listeners if listener not in self._probed]
        waiting = [connection for listener in ending for connection in accept_waiting(listener)]
        self._close(ending)
        loop = asyncio.get_running_loop()
        adoptions = [
            loop.connect_accepted_socket(self._new_protocol, one, ssl=self.config.ssl) for one in waiting
        ]
        await asyncio.gather(*adoptions, return_exceptions=True)

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

    async def _drain_connections(self, deadline: float) -> None:
        ticks = 0
        while self._is_busy() and not self.force_exit and time.monotonic() < deadline:
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
        """End what the drain left over: unanswered requests with 503, the rest by cutting the connection."""
        if not self._is_busy():
            return
        state = self.server_state
        _log.warning("Ending %d connections and %d requests.", len(state.connections), len(state.tasks))
        for connection in list(state.connections):
            if not isinstance(connection, PenstockProtocol):
                continue
            if connection.running is not None and not self.force_exit:
                connection.refuse(draining())
            else:
                connection.transport.abort()
        await _wait_for(state.tasks, _NOTICE_S)
        for task in list(state.tasks):
            task.cancel()
        await _wait_for(state.tasks, _CANCEL_S)


async def _wait_for(tasks: set[asyncio.Task[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(list(tasks), timeout=timeout_s)


def parent_holds(listener: socket.socket) -> bool:
    """Whether the arbiter listens on the same socket: in a reload others answer on it, in a stop it is closed there.

    True where that cannot be seen.
    """
    wanted = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
    try:
        descriptors = list(Path(f"/proc/{os.getppid()}/fd").iterdir())
    except OSError:
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == wanted:
                return True
    return False


def accept_waiting(listener: socket.socket) -> list[socket.socket]:
    """Take every connection out of a non-blocking listener's accept queue; stop early when descriptors run out."""
    taken: list[socket.socket] = []
    while True:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:
            return taken
        connection.setblocking(False)
        taken.append(connection)
