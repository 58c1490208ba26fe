"""Asks clients to connect anew: of a frontend that is being replaced, before its server is shut down, and idle ones.

gRPC's own shutdown says GOAWAY as well, but cancels every rpc that is on its way at that moment, and it has no call for
the one without the other. So each connection is sent that frame here first (RFC 9113, section 6.8: no error, all
streams up to the last number are answered). A client that reads it finishes what it has begun and begins no more here.

NOTE: this writes to sockets that gRPC's core writes to, which is safe between two of its frames only. So the frame goes
to connections whose first bytes have been acknowledged and of which the kernel holds nothing unsent or unacknowledged:
while it takes no more, and a frame is half written, there is. A connection that is busier is asked at a later look.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

from frontend.grpc.connections import of_port
from frontend.grpc.peers import Peer

LOOK_EVERY_S = 0.05
SETTLED_LOOKS = 4
"""Looks without a new connection, after which requests that were on their way have come."""
_LAST_STREAM, _NO_ERROR = (1 << 31) - 1, 0
GOAWAY = struct.pack(">I", 8 << 8 | 7) + struct.pack(">BIII", 0, 0, _LAST_STREAM, _NO_ERROR)
"""Length 8, type 7, no flags, the connection itself."""
_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""


async def say(port: int, timeout_s: float) -> None:
    """Ask all clients that are connected to `port` of this process, and those that come meanwhile, at most so long."""
    asked: set[Peer] = set()
    settled = 0
    for _ in range(round(timeout_s / LOOK_EVERY_S)):
        fresh = await asyncio.to_thread(_ask, port, asked)
        settled = 0 if fresh else settled + 1
        if settled >= SETTLED_LOOKS:
            return
        await asyncio.sleep(LOOK_EVERY_S)


def _ask(port: int, asked: set[Peer]) -> bool:
    """Ask every client that was not asked yet; whether there was one."""
    fresh = False
    for connection, peer in of_port(port):
        if peer not in asked:
            fresh = True
            if ask(connection):
                asked.add(peer)
    return fresh


def ask(connection: socket.socket) -> bool:
    """Ask the client of one connection to leave; False when it is too busy to be asked now."""
    if not _is_between_frames(connection):
        return False
    with contextlib.suppress(OSError):
        connection.send(GOAWAY, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    return True


def _is_between_frames(connection: socket.socket) -> bool:
    """Whether the peer has acknowledged the beginning of the conversation and all that was said since."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    if len(info) < _BYTES_ACKED + 8 or struct.unpack_from("=Q", info, _BYTES_ACKED)[0] <= 1:
        return False
    unsent = fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4)
    return unsent == b"\0" * 4
