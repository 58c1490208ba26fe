"""The connections of a frontend's gRPC port: who made them, and how they are ended.

gRPC's core accepts connections itself and tells nothing of them. This module finds the connections among the
descriptors of this process.

1. `ConnectionLimiter` looks at all connections about once a second, in a thread. gRPC's core has a limit of idle time
   too, but reports an error to the client, and client libraries print a line for the error.
2. A connection without a call for long is asked to leave, and shut down at the next look if it stays. The address with
   most connections, if those are more than are free, loses some of its idle connections (`surplus`).
3. Before a replaced frontend shuts down, all its clients are asked to leave (`ask_all_to_leave`).

To ask a client to leave is to send it a GOAWAY frame (RFC 9113, section 6.8: no error, all streams up to the last
number are answered). The client finishes its calls and begins no more here. gRPC's own shutdown says GOAWAY as well,
but cancels every rpc that is on its way at that moment.

NOTE: GOAWAY is written to sockets to which gRPC's core writes, which is safe between two of the core's frames only. So
the frame goes to connections whose first bytes have been acknowledged and of which the kernel holds nothing unsent or
unacknowledged: while the kernel holds a half written frame, some bytes are. A busier connection is asked at a later
look. The core owns the descriptors. Shutting a connection down is safe beside the core: the core reads the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import termios
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

log = logging.getLogger(__name__)

_V6_NETWORK_BITS = 64
"""The network of one IPv6 host: its addresses count as one caller."""


class Peer(NamedTuple):
    """The other end of a TCP connection, its address in the usual form; ("", 0) for a Unix socket."""

    address: str
    port: int

    @classmethod
    def of(cls, address: str, port: int) -> Peer:
        """The peer at the address of a socket; IPv4 within IPv6 becomes IPv4."""
        try:
            host = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return cls(address, port)
        mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
        return cls(str(mapped or host), port)

    @classmethod
    def named(cls, name: str) -> Peer:
        """The peer that gRPC names `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
        return _named(name)


# PERF: every rpc asks several times for the peer of its connection; to read an address costs 5 us.
@lru_cache(maxsize=4096)
def _named(name: str) -> Peer:
    kind, _, rest = unquote(name).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return Peer("", 0)
    address, _, port = rest.rpartition(":")
    return Peer.of(address.strip("[]"), int(port))


@lru_cache(maxsize=4096)
def host_of(peer: Peer) -> str:
    """The caller that a connection counts for: its address, for IPv6 the network of one host."""
    if ":" not in peer.address:
        return peer.address
    return str(ipaddress.ip_network((peer.address, _V6_NETWORK_BITS), strict=False))


def of_port(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Connections of this process that were made to its `port`, with their peers."""
    for link in Path("/proc/self/fd").iterdir():
        # Suppressed: a descriptor that was closed meanwhile, is no connection, or has lost its peer.
        with contextlib.suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if _is_connection(connection) and connection.getsockname()[1] == port:
                    yield connection, Peer.of(*connection.getpeername()[:2])


def _is_connection(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


ASK_EVERY_S = 0.05
SETTLED_LOOKS = 4
"""After so many looks without a new connection all requests that were on their way have come."""
_LAST_STREAM, _NO_ERROR = (1 << 31) - 1, 0
GOAWAY = struct.pack(">I", 8 << 8 | 7) + struct.pack(">BIII", 0, 0, _LAST_STREAM, _NO_ERROR)
"""A GOAWAY frame: length 8, type 7, no flags, stream 0, which is the connection itself."""
_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""


async def ask_all_to_leave(port: int, timeout_s: float) -> None:
    """Ask all clients of `port` of this process to leave, for at most `timeout_s`; clients that come meanwhile too."""
    asked: set[Peer] = set()
    settled = 0
    for _ in range(round(timeout_s / ASK_EVERY_S)):
        fresh = await asyncio.to_thread(_ask_new_peers, port, asked)
        settled = 0 if fresh else settled + 1
        if settled >= SETTLED_LOOKS:
            return
        await asyncio.sleep(ASK_EVERY_S)


def _ask_new_peers(port: int, asked: set[Peer]) -> bool:
    """Ask every client that was not asked yet; True if there was any."""
    fresh = False
    for connection, peer in of_port(port):
        if peer not in asked:
            fresh = True
            if ask_to_leave(connection):
                asked.add(peer)
    return fresh


def ask_to_leave(connection: socket.socket) -> bool:
    """Ask the client of a connection to leave; False if the connection is too busy now."""
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


LOOK_EVERY_S, LOOK_AGAIN_S = 1.0, 0.1
UNASKED_S = 10.0
"""Seconds for which a connection may be too busy to be asked to leave. Afterwards the connection is shut down."""
_REST = 50
"""PERF: a look through very many descriptors takes time. The thread rests for so many times as long."""


class CallsByConnection:
    """The number of calls on each connection, and the end of its last call in seconds of the clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.running: Counter[Peer] = Counter()
        self.ended: dict[Peer, float] = {}

    def begin(self, peer: Peer) -> None:
        """A call begins on the connection of `peer`."""
        self.running[peer] += 1

    def end(self, peer: Peer) -> None:
        """A call on the connection of `peer` ends."""
        self.ended[peer] = self.clock()
        self.running[peer] -= 1
        if not self.running[peer]:
            del self.running[peer]

    def forget(self, kept: Collection[Peer]) -> None:
        """Forget all connections but these."""
        self.ended = {peer: at for peer, at in self.ended.items() if peer in kept}


class ConnectionLimiter:
    """Keeps the connections to `port` within `limit`, and none without a call for longer than `idle_s`."""

    def __init__(self, port: int, limit: int, idle_s: float, calls: CallsByConnection) -> None:
        self._port, self._limit, self._idle_s, self._calls = port, limit, idle_s, calls
        self._since: dict[Peer, float] = {}
        """Since when each connection holds no call, or is there."""
        self._asked: set[Peer] = set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began, calls, ended = time.monotonic(), self._calls, 0
            # A lack of descriptors costs a look.
            with contextlib.suppress(OSError):
                ended = await asyncio.to_thread(self.look, frozenset(calls.running), dict(calls.ended))
                calls.forget(self._since.keys() | calls.running.keys())
            pause_s = min(LOOK_EVERY_S, max(self._idle_s / 4, LOOK_AGAIN_S))
            await asyncio.sleep(LOOK_AGAIN_S if ended else max(pause_s, _REST * (time.monotonic() - began)))

    def look(self, running: Collection[Peer], ended: Mapping[Peer, float]) -> int:
        """End idle and surplus connections; returns how many were shut down."""
        now, ended_count = self._calls.clock(), 0
        self._since = {
            peer: max(self._since.get(peer, now), ended.get(peer, 0.0)) for _, peer in of_port(self._port)
        }
        idle = {peer for peer, at in self._since.items() if peer not in running and now - at >= self._idle_s}
        self._asked &= idle
        surplus_of = surplus(self._since, running, self._limit)
        if surplus_of:
            log.warning("gRPC: %d idle connections are closed, too many of one address", len(surplus_of))
        closing = surplus_of | self._asked
        for connection, peer in of_port(self._port) if idle or closing else ():
            if peer in self._calls.running:
                # NOTE: a call has begun while this thread looked.
                continue
            if peer in closing:
                ended_count += 1
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            elif peer in idle and (
                ask_to_leave(connection) or now - self._since[peer] >= self._idle_s + UNASKED_S
            ):
                self._asked.add(peer)
        return ended_count


def surplus(since: Mapping[Peer, float], running: Collection[Peer], limit: int) -> set[Peer]:
    """Idle connections to end, the oldest first: of the address with most connections, if those are more than are free.

    The address keeps half of its possible share beside the others, so that there is room again for some time.
    """
    by_host: defaultdict[str, list[Peer]] = defaultdict(list)
    for peer in sorted(since, key=since.__getitem__):
        by_host[host_of(peer)].append(peer)
    mine = max(by_host.values(), key=len, default=[])
    if len(mine) <= limit - len(since):
        return set()
    most = (limit - (len(since) - len(mine))) // 4
    return set([peer for peer in mine if peer not in running][: max(len(mine) - most, 0)])
