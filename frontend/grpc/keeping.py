"""Ends connections of the gRPC port: those that hold no call for long, and some of an address that has too many.

1. About once a second a thread looks at all of them (`Keeper.look`).
2. One that has held no call for long is asked to leave (`farewell`), and shut down at the next look if it stays.
3. The address with most, when those are more than are free, loses some that hold no call (`surplus`).

gRPC's core has a limit of idle time too, but reports an error to the client, of which client libraries print a line.

NOTE: gRPC's core owns these descriptors. Shutting a connection down is safe beside it: the core reads the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping

from frontend.grpc import farewell
from frontend.grpc.connections import of_port
from frontend.grpc.peers import Peer, host_of

LOOK_EVERY_S, LOOK_AGAIN_S = 1.0, 0.1
UNASKED_S = 10.0
"""How long a connection may be too busy to be asked to leave before it is ended all the same."""
_REST = 50
"""PERF: a look through very many descriptors takes a while; this many times that while is rest."""

log = logging.getLogger(__name__)


class Calls:
    """How many calls each connection holds, and when its last one ended, in seconds of the clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.running: Counter[Peer] = Counter()
        self.ended: dict[Peer, float] = {}

    def begin(self, peer: Peer) -> None:
        """A call begins on the connection of `peer`."""
        self.running[peer] += 1

    def end(self, peer: Peer) -> None:
        """A call ends there."""
        self.ended[peer] = self.clock()
        self.running[peer] -= 1
        if not self.running[peer]:
            del self.running[peer]

    def forget(self, kept: Collection[Peer]) -> None:
        """Keep only what is known of these connections."""
        self.ended = {peer: at for peer, at in self.ended.items() if peer in kept}


class Keeper:
    """Keeps the connections to `port` within `limit`, and none without a call for longer than `idle_s`."""

    def __init__(self, port: int, limit: int, idle_s: float, calls: Calls) -> None:
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
        """End what is too much or idle; how many connections were shut down."""
        now = self._calls.clock()
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
            if peer in closing:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            elif peer in idle and (
                farewell.ask(connection) or now - self._since[peer] >= self._idle_s + UNASKED_S
            ):
                self._asked.add(peer)
        return len(closing)


def surplus(since: Mapping[Peer, float], running: Collection[Peer], limit: int) -> set[Peer]:
    """Idle connections, the oldest first, of the address that has most, when those are more than are free.

    It keeps half of what it could have beside the others, so that there is room again for some time.
    """
    by_host: defaultdict[str, list[Peer]] = defaultdict(list)
    for peer in sorted(since, key=since.__getitem__):
        by_host[host_of(peer)].append(peer)
    mine = max(by_host.values(), key=len, default=[])
    if len(mine) <= limit - len(since):
        return set()
    most = (limit - (len(since) - len(mine))) // 4
    return set([peer for peer in mine if peer not in running][: max(len(mine) - most, 0)])
