"""One blocking keep-alive connection: the least that a client can cost, for latencies and for large bodies."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import Address, LoadResult, parse_head

_BUFFER_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """One response whose body was read and dropped: instants are seconds since the request was sent."""

    status: int
    nbytes: int
    first_byte_s: float
    last_byte_s: float


class Connection:
    """A TCP connection that sends whole requests and reads whole responses. Raises OSError when it is lost."""

    def __init__(self, address: Address, timeout_s: float = 120.0) -> None:
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *failure: object) -> None:
        self._socket.close()

    def _head(self) -> tuple[int, int, bytes]:
        """Status, Content-Length and the part of the body that came along."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = self._socket.recv(65536)
            if not more:
                raise ConnectionError(f"connection closed after {data[:100]!r}")
            data += more
        head, _, rest = data.partition(b"\r\n\r\n")
        return *parse_head(head), rest

    def fetch(self, *request: bytes) -> tuple[int, bytes]:
        """Status and body of a request, each part of which is sent on its own."""
        for part in request:
            self._socket.sendall(part)
        status, length, rest = self._head()
        body = bytearray(rest)
        while len(body) < length:
            count = self._socket.recv_into(self._buffer)
            if not count:
                raise ConnectionError("connection closed within a body")
            body += self._buffer[:count]
        return status, bytes(body)

    def drain(self, request: bytes) -> Received:
        """Read a body into one small reused buffer, so that the reader does nothing but receive."""
        started = time.perf_counter()
        self._socket.sendall(request)
        status, length, rest = self._head()
        first = time.perf_counter() - started
        left = length - len(rest)
        while left > 0:
            count = self._socket.recv_into(self._buffer)
            if not count:
                raise ConnectionError("connection closed within a body")
            left -= count
        return Received(status, length, first, time.perf_counter() - started)


def one_by_one(address: Address, requests: Sequence[bytes]) -> LoadResult:
    """A lone client: each request waits for the answer to the one before. Nothing else runs in this process."""
    result = LoadResult()
    started = time.perf_counter()
    with Connection(address) as connection:
        for request in requests:
            since = time.perf_counter()
            status, body = connection.fetch(request)
            if status == 200:
                result.latencies_s.append(time.perf_counter() - since)
            result.statuses[status] += 1
            result.nbytes += len(body)
    result.wall_s = time.perf_counter() - started
    return result
