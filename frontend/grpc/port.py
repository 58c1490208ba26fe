"""The gRPC port: kept by the arbiter for the frontends of this server, and handed over in a reload.

1. Frontends share the port by SO_REUSEPORT, by which a second server of the same user could share the port as well,
   without a word. So the arbiter first binds without that option, which fails where anybody listens. Then the arbiter
   holds a socket on the port that never listens, so that the next server's try fails in turn (`reserve`).
2. HTTP's listening sockets are the arbiter's and outlive every frontend; those of gRPC are each frontend's own. New
   frontends take seconds to boot while the old ones are told to drain at once, so an old frontend goes on listening
   until a new one listens. Both learn of each other through memory that the arbiter maps before it forks: the arbiter
   notes the instant of each reload, each frontend, in a place of its own, the instant at which it began to listen.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import socket
import time
from collections.abc import Callable

import numpy as np

from ipc import addresses
from ipc.errors import ConfigError
from ipc.settings import Grpc

_SETTING = "grpc.bind"


def validate_address(grpc: Grpc) -> None:
    """Raise `ConfigError` when the settings cannot be served."""
    if grpc.enabled:
        addresses.parse(grpc.bind, _SETTING)


def reserve(grpc: Grpc) -> socket.socket:
    """A socket that keeps the address for processes of this server. Raises `ConfigError` when somebody else has it."""
    host, port = addresses.parse(grpc.bind, _SETTING)
    addresses.ensure_free(grpc.bind, _SETTING)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        kept = socket.socket(family, kind, protocol)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(address)
    except OSError as error:
        raise ConfigError(f"{_SETTING}: {grpc.bind} cannot be had: {error.strerror or error}") from None
    return kept


ROWS = 64
"""Frontends with a place of their own. More frontends share places; the last instant written to a place counts."""
LOOK_EVERY_S = 0.05


class Succession:
    """Instants in CLOCK_MONOTONIC nanoseconds, 0: never."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        memory = np.frombuffer(mmap.mmap(-1, (1 + ROWS) * 8), np.int64)
        self._reloaded, self._listening = memory[:1], memory[1:]
        self._clock = clock

    def reloading(self) -> None:
        """A reload begins: all frontends of now will be replaced. For the arbiter."""
        self._reloaded[0] = self._clock()

    def listens(self, slot: int) -> None:
        """The frontend of that slot has begun to listen."""
        self._listening[slot % ROWS] = self._clock()

    def is_replaced(self, since_ns: int) -> bool:
        """Whether a frontend of since then is being replaced by a reload."""
        return bool(since_ns < self._reloaded[0])

    def is_missed(self, since_ns: int) -> bool:
        """Whether a frontend that listens since then is being replaced and nobody listens in its place yet."""
        return self.is_replaced(since_ns) and bool(self._reloaded[0] > self._listening.max())

    async def replaced(self, since_ns: int, timeout_s: float) -> bool:
        """Wait while a frontend that listens since then is missed, at most so long; whether another has its place."""
        for _ in range(math.ceil(timeout_s / LOOK_EVERY_S)):
            if not self.is_missed(since_ns):
                return self.is_replaced(since_ns)
            await asyncio.sleep(LOOK_EVERY_S)
        return False


SUCCESSION = Succession()
"""The instants of this server. The arbiter imports this module before it forks, so its processes share the memory."""
