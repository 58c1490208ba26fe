"""One coarse timer per process that ends connections which are past a deadline.

Each sweep looks at every connection once (about a microsecond each):

1. a client that takes nothing of a waiting response for `write_stall_s` is cut off, also while the connection closes;
2. a request body that arrives below the floor is answered 408;
3. a head that is not complete after `header_deadline_s` ends the connection;
4. an idle connection ends after `keepalive_s`, a silent new one after `header_deadline_s`, both after `drain_s` in a
   drain, unless bytes of a request have arrived that the loop has not read yet;
5. a refused connection that lingers ends after `linger_s`.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
import time
from collections.abc import Callable

from frontend.server.protocol import PenstockProtocol
from frontend.server.refusal import too_slow
from frontend.server.state import FrontendState, ServerLimits

_BODY_PERIODS = 3
"""The average restarts after this many `body_floor_after_s`, so that a fast start does not pay for an endless stall."""


class Sweeper:
    """Applies `ServerLimits` to all connections of a process and beats the process' heart."""

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
