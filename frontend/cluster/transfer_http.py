"""Large bytes by HTTP/1.1 straight from host to host, where `cluster.transfer_bind` is set.

1. `Listener` answers `GET /SECRET` with the bytes of an offer, once for each peer, and any other request with 404.
2. `Getter` keeps connections. An address that cannot be reached is left alone for `SHUN_S`; the bytes come in chunks
   through the brokers then (`transfers`).

A client has to take at least `FLOOR_NBYTES` a second, and sends its head within `HEAD_S`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress

from ipc import brokers
from ipc.settings import Cluster
from ipc.wire.cluster import Offer
from ipc.wire.cluster_names import is_id

log = logging.getLogger(__name__)

HEAD_S = 5.0
IDLE_S = 60.0
SHUN_S = 5.0
CONNECT_S = 0.5
FLOOR_NBYTES = 1 << 20
SLICE_NBYTES = 256 << 10
MOST_HEAD_NBYTES = 4096
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_REQUEST = re.compile(
    rb"GET /([0-9a-f]{64}) HTTP/1\.1\r\n(?:[^\r\n]*\r\n)*?Penstock-Peer: ([A-Za-z0-9_-]{1,64})\r\n"
)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255}):([0-9]{1,5})")
_OK = re.compile(rb"HTTP/1\.1 200 OK\r\nContent-Length: ([0-9]{1,13})\r\n\r\n")


def time_for(nbytes: int) -> float:
    """Seconds in which so many bytes have to be on the other side."""
    return HEAD_S + nbytes / FLOOR_NBYTES


def host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None for anything else."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        return None
    return match[1].strip("[]"), int(match[2])


class Listener:
    """Serves the offers of this process."""

    def __init__(self, cluster: Cluster, find: Callable[[str, str], memoryview | None]) -> None:
        """`find` gives the bytes for (secret, peer), once. Raises `ConfigError` for unusable certificates."""
        self._cluster, self._find = cluster, find
        self._tls = brokers.tls_of(cluster, serves=True) if cluster.transfer_bind else None
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.address = ""
        """HOST:PORT for other hosts, empty without a listener."""

    async def start(self) -> None:
        """Listen, if the settings name an address. If another program has the address, brokers carry the bytes."""
        bind = host_and_port(self._cluster.transfer_bind)
        if bind is None:
            return
        try:
            self._server = await asyncio.start_server(
                self._serve, bind[0], bind[1], ssl=self._tls, limit=MOST_HEAD_NBYTES
            )
        except OSError as error:
            log.error(
                "cluster.transfer_bind: %s cannot be listened on: %s", self._cluster.transfer_bind, error
            )
            return
        port = self._server.sockets[0].getsockname()[1]
        host, _, stated = (self._cluster.transfer_advertise or self._cluster.transfer_bind).rpartition(":")
        self.address = f"{host}:{int(stated) or port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._cluster.max_transfers:
            writer.close()
            return
        self._open.add(writer)
        wait_s = HEAD_S
        try:
            while True:
                async with asyncio.timeout(wait_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                if not await self._answer(head, writer):
                    return
                wait_s = IDLE_S
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            # The client has gone, is too slow, or speaks no HTTP: drop the bytes that it has not taken.
            writer.transport.abort()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Send the bytes of one request; returns whether the connection goes on."""
        match = _REQUEST.match(head)
        data = None if match is None else self._find(match[1].decode(), match[2].decode())
        if data is None:
            writer.write(_NOT_FOUND)
            await writer.drain()
            return False
        async with asyncio.timeout(time_for(len(data))):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data))
            for at in range(0, len(data), SLICE_NBYTES):
                writer.write(data[at : at + SLICE_NBYTES])
                await writer.drain()
        return True

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()


class Getter:
    """Gets offers of other hosts."""

    def __init__(self, cluster: Cluster, me: str) -> None:
        """`me` is the id by which others know this process."""
        assert is_id(me)
        self._tls, self._me = brokers.tls_of(cluster), me
        self._idle: dict[str, list[tuple[asyncio.StreamReader, asyncio.StreamWriter, float]]] = {}
        self._shunned: dict[str, float] = {}

    @property
    def kept(self) -> int:
        """Connections that wait for the next transfer."""
        return sum(map(len, self._idle.values()))

    async def get(self, offer: Offer) -> bytes | None:
        """The bytes of an offer, without a check of the digest; None if HTTP does not bring the bytes."""
        where = host_and_port(offer.address)
        if where is None or self._shunned.get(offer.address, 0.0) > time.monotonic():
            return None
        try:
            async with asyncio.timeout(time_for(offer.nbytes)):
                return await self._get(offer, where)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError) as error:
            log.warning("large bytes do not come from %s: %r", offer.address, error)
            self._shunned[offer.address] = time.monotonic() + SHUN_S
            return None

    async def _get(self, offer: Offer, where: tuple[str, int]) -> bytes | None:
        self._end_old()
        idle = self._idle.setdefault(offer.address, [])
        if idle:
            reader, writer, _ = idle.pop()
        else:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    *where, ssl=self._tls, limit=MOST_HEAD_NBYTES * 64
                )
        kept = False
        try:
            request = (
                f"GET /{offer.secret} HTTP/1.1\r\nHost: {offer.address}\r\nPenstock-Peer: {self._me}\r\n\r\n"
            )
            writer.write(request.encode())
            await writer.drain()
            match = _OK.fullmatch(await reader.readuntil(b"\r\n\r\n"))
            if match is None or int(match[1]) != offer.nbytes:
                return None
            data = await reader.readexactly(offer.nbytes)
            self._idle.setdefault(offer.address, []).append((reader, writer, time.monotonic()))
            kept = True
            return data
        finally:
            if not kept:
                writer.close()

    def _end_old(self) -> None:
        """End connections that the other host has ended or soon will, and forget addresses without any."""
        now = time.monotonic()
        for address, idle in list(self._idle.items()):
            for kept in [*idle]:
                reader, writer, since = kept
                if reader.at_eof() or now - since > IDLE_S / 2:
                    idle.remove(kept)
                    writer.close()
            if not idle:
                del self._idle[address]
        self._shunned = {address: until for address, until in self._shunned.items() if until > now}

    async def close(self) -> None:
        """End all kept connections."""
        for idle in self._idle.values():
            for _, writer, _ in idle:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        self._idle.clear()
