"""The connections of a frontend's gRPC port: which there are, and an end to idle ones of an address with too many.

gRPC's core accepts connections itself, up to a number that it is given, and tells nothing of them. So they are found
among the descriptors of this process.

1. About once a second a thread counts the connections of each address (`Keeper.look`).
2. The address with most, when those are more than are free, loses some that hold no call (`surplus`).

NOTE: gRPC's core owns these descriptors. Shutting a connection down is safe beside it: the core reads the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from frontend.grpc.peers import Peer, host_of

LOOK_EVERY_S, LOOK_AGAIN_S = 1.0, 0.1
_REST = 50
"""PERF: a look through very many descriptors takes a while; this many times that while is rest."""

log = logging.getLogger(__name__)


def of_port(port: int) -> Iterator[tuple[socket.socket, Peer]]:
    """Connections of this process that were made to its `port`, and who made them."""
    for link in Path("/proc/self/fd").iterdir():
        # What was closed meanwhile, is no connection, or has lost its peer.
        with contextlib.suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if _is_connection(connection) and connection.getsockname()[1] == port:
                    yield connection, Peer.of(*connection.getpeername()[:2])


def _is_connection(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM


class Keeper:
    """Keeps the connections to `port` within `limit`; `busy` are the calls of each connection."""

    def __init__(
        self, port: int, limit: int, busy: Mapping[Peer, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port, self._limit, self._busy, self._clock = port, limit, busy, clock
        self._since: dict[Peer, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began = time.monotonic()
            ended = await asyncio.to_thread(self.look, frozenset(self._busy))
            rest_s = _REST * (time.monotonic() - began)
            await asyncio.sleep(LOOK_AGAIN_S if ended else max(LOOK_EVERY_S, rest_s))

    def look(self, busy: Collection[Peer]) -> int:
        """Count, and end what is too much; how many connections were ended."""
        now = self._clock()
        self._since = {peer: self._since.get(peer, now) for _, peer in of_port(self._port)}
        ending = surplus(self._since, busy, self._limit)
        if ending:
            log.warning("gRPC: %d idle connections are closed, too many of one address", len(ending))
            for connection, peer in of_port(self._port):
                if peer in ending:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
        return len(ending)


def surplus(since: Mapping[Peer, float], busy: Collection[Peer], limit: int) -> set[Peer]:
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
    return set([peer for peer in mine if peer not in busy][: max(len(mine) - most, 0)])
