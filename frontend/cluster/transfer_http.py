"""Large bytes by HTTP/1.1 straight from host to host, where `cluster.transfer_bind` is set.

1. `Listener` answers `GET /SECRET` with the bytes of an offer, once for each peer, and any other request with 404.
2. `Getter` keeps connections. The kernel writes into the memory where the bytes stay. An address that cannot be reached
   is left alone for `SHUN_S`; the bytes come in chunks through the brokers then (`transfers`).
3. `Leaves` makes the digest, in threads while the bytes arrive: BLAKE2b-256 over the SHA-256 of each `LEAF_NBYTES`. One
   BLAKE2b over all bytes took 17 ms for 8 MiB on either side, one after the other.

A client has to take at least `FLOOR_NBYTES` a second, and sends its head within `HEAD_S`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable
from typing import cast

from ipc import brokers
from ipc.addresses import BACKLOG
from ipc.settings import Cluster
from ipc.wire.cluster import Offer
from ipc.wire.cluster_names import is_id

log = logging.getLogger(__name__)

HEAD_S = 5.0
IDLE_S = 60.0
SHUN_S = 5.0
CONNECT_S = 0.5
FLOOR_NBYTES = 1 << 20
SLICE_NBYTES = 1 << 20
LEAF_NBYTES = 1 << 20
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


class Leaves:
    """The digest of bytes that are there, or still arrive, in the order of their places."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._begun = data, 0
        self._leaves: list[asyncio.Future[bytes] | bytes] = []

    def grown(self, nbytes: int) -> None:
        """The first `nbytes` are there."""
        while self._begun + LEAF_NBYTES <= nbytes or (self._begun < nbytes == len(self._data)):
            leaf = self._data[self._begun : self._begun + LEAF_NBYTES]
            self._begun += len(leaf)
            if len(self._data) <= LEAF_NBYTES:
                self._leaves.append(_leaf(leaf))
            else:
                self._leaves.append(asyncio.get_running_loop().run_in_executor(None, _leaf, leaf))

    async def digest(self) -> bytes:
        """The digest of all bytes, which are there now."""
        self.grown(len(self._data))
        root = hashlib.blake2b(digest_size=32)
        for leaf in self._leaves:
            root.update(leaf if isinstance(leaf, bytes) else await leaf)
        return root.digest()


def _leaf(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


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
                self._serve, bind[0], bind[1], ssl=self._tls, limit=MOST_HEAD_NBYTES, backlog=BACKLOG
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
        writer.transport.set_write_buffer_limits(high=2 * SLICE_NBYTES)
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


class _Connection(asyncio.BufferedProtocol):
    """A connection to a listener, which answers one request after another.

    `_head` takes the head of an answer, and what a listener says without being asked; `_body` the bytes of an offer.
    """

    def __init__(self) -> None:
        self.since, self.ended = 0.0, False
        self._transport: asyncio.Transport | None = None
        self._head, self._head_nbytes = bytearray(MOST_HEAD_NBYTES), 0
        self._body, self._body_nbytes = memoryview(b""), 0
        self._grown: Callable[[int], None] = lambda nbytes: None
        self._answer: asyncio.Future[bool] | None = None
        self._in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the other host ended the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._in_body:
            return self._body[self._body_nbytes :]
        return memoryview(self._head)[self._head_nbytes :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._in_body:
            self._take(nbytes)
            return
        self._head_nbytes += nbytes
        end = self._head.find(b"\r\n\r\n", 0, self._head_nbytes) + 4
        if self._answer is None or self._answer.done() or (end < 4 and self._head_nbytes == MOST_HEAD_NBYTES):
            self.close()
        elif end >= 4:
            self._begin(end)

    def _begin(self, end: int) -> None:
        """The head of the answer is there, and maybe bytes behind."""
        match = _OK.fullmatch(self._head[:end])
        rest = self._head_nbytes - end
        if match is None or int(match[1]) != len(self._body) or rest > len(self._body):
            self._end(success=False)
            return
        self._body[:rest] = self._head[end : self._head_nbytes]
        self._in_body = True
        self._take(rest)

    def _take(self, nbytes: int) -> None:
        self._body_nbytes += nbytes
        self._grown(self._body_nbytes)
        if self._body_nbytes == len(self._body):
            self._end(success=True)

    def _end(self, *, success: bool) -> None:
        self._in_body, self._head_nbytes = False, 0
        assert self._answer is not None
        if not self._answer.done():
            self._answer.set_result(success)

    async def ask(self, request: bytes, body: memoryview, grown: Callable[[int], None]) -> bool:
        """Have the answer to a request fill `body`; false for an answer of another status or length.

        `grown` is told how many bytes are there. Raises `OSError` for a connection that ends.
        """
        if self.ended or self._transport is None:
            raise ConnectionResetError("the other host ended the connection")
        self._body, self._body_nbytes, self._grown = body, 0, grown
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._body = memoryview(b"")

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class Getter:
    """Gets offers of other hosts."""

    def __init__(self, cluster: Cluster, me: str) -> None:
        """`me` is the id by which others know this process."""
        assert is_id(me)
        self._tls, self._me = brokers.tls_of(cluster), me
        self._idle: dict[str, list[_Connection]] = {}
        self._shunned: dict[str, float] = {}

    @property
    def kept(self) -> int:
        """Connections that wait for the next transfer."""
        return sum(map(len, self._idle.values()))

    async def get(self, offer: Offer, data: memoryview) -> bool:
        """Fill `data` with the bytes of an offer; whether HTTP has brought bytes of that length and digest."""
        where = host_and_port(offer.address)
        if where is None or self._shunned.get(offer.address, 0.0) > time.monotonic():
            return False
        try:
            async with asyncio.timeout(time_for(offer.nbytes)):
                return await self._get(offer, data, where)
        except (TimeoutError, OSError) as error:
            log.warning("large bytes do not come from %s: %r", offer.address, error)
            self._shunned[offer.address] = time.monotonic() + SHUN_S
            return False

    async def _get(self, offer: Offer, data: memoryview, where: tuple[str, int]) -> bool:
        self._end_old()
        idle = self._idle.setdefault(offer.address, [])
        connection = idle.pop() if idle else await self._connected(where)
        request = (
            f"GET /{offer.secret} HTTP/1.1\r\nHost: {offer.address}\r\nPenstock-Peer: {self._me}\r\n\r\n"
        )
        leaves, kept = Leaves(data), False
        try:
            kept = await connection.ask(request.encode(), data, leaves.grown)
        finally:
            if not kept:
                connection.close()
        if not kept:
            return False
        connection.since = time.monotonic()
        self._idle.setdefault(offer.address, []).append(connection)
        return await leaves.digest() == offer.digest

    async def _connected(self, where: tuple[str, int]) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            _, connection = await loop.create_connection(_Connection, *where, ssl=self._tls)
        return connection

    def _end_old(self) -> None:
        """End connections that the other host has ended or soon will, and forget addresses without any."""
        now = time.monotonic()
        for address, idle in list(self._idle.items()):
            for kept in [*idle]:
                if kept.ended or now - kept.since > IDLE_S / 2:
                    idle.remove(kept)
                    kept.close()
            if not idle:
                del self._idle[address]
        self._shunned = {address: until for address, until in self._shunned.items() if until > now}

    def close(self) -> None:
        """End all kept connections."""
        for idle in self._idle.values():
            for kept in idle:
                kept.close()
        self._idle.clear()
