"""HTTP/1.1 load over keep-alive connections, light enough to share the machine with the server.

Requests are whole byte strings made beforehand with `post`; a response is read by its Content-Length and thrown away.

- `closed_loop`: each of n clients sends its next request when the last one is answered. Measures throughput.
- `open_loop`: requests start at random instants of a given rate, whatever the server does; latency counts from the
  instant a request was due, so a stalled server cannot hide its queue. Measures latency under a load.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

Address = tuple[str, int]
BROKEN = 0


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that at least `percent` of `values` do not exceed. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


@dataclass(slots=True)
class LoadResult:
    """Outcome of one load: latencies of requests answered 200, and how many had which status (0: connection lost)."""

    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    nbytes: int = 0

    @property
    def failed(self) -> int:
        """Requests that were not answered 200."""
        return self.statuses.total() - self.statuses[200]

    @property
    def rate_per_s(self) -> float:
        """Requests answered 200 a second."""
        return len(self.latencies_s) / self.wall_s

    def latency_ms(self, percent: float) -> float:
        """A latency percentile in milliseconds."""
        return percentile(self.latencies_s, percent) * 1e3


def post(path: str, body: bytes | dict[str, Any], *, accept: str = "application/json") -> bytes:
    """A whole POST request with a JSON body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Accept: {accept}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def parse_head(head: bytes) -> tuple[int, int]:
    """Status and Content-Length of a response head. Raises ValueError without a Content-Length."""
    status = int(head[9:12])
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return status, int(value)
    raise ValueError(f"response without Content-Length: {head[:200]!r}")


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way. Calls `answered(self, status)` for each."""

    def __init__(self, result: LoadResult, answered: Callable[[_Connection], None]) -> None:
        self._result, self._answered = result, answered
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._left = -1
        self._status = BROKEN
        self._since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, since: float) -> None:
        """Write one request; its latency counts from the instant `since` of `time.perf_counter`."""
        assert self._transport is not None
        self._since = since
        self._left = -1
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._result.nbytes += len(data)
        if self._left < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._status, length = parse_head(bytes(self._head[:end]))
            self._left = length - (len(self._head) - end - 4)
            self._head.clear()
        else:
            self._left -= len(data)
        if self._left == 0:
            self._finish(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._since is not None:
            self._finish(BROKEN)

    def _finish(self, status: int) -> None:
        assert self._since is not None
        if status == 200:
            self._result.latencies_s.append(time.perf_counter() - self._since)
        self._result.statuses[status] += 1
        self._since = None
        self._answered(self)

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


async def _connect(
    address: Address, result: LoadResult, answered: Callable[[_Connection], None]
) -> _Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: _Connection(result, answered), *address)
    return connection


async def _client(address: Address, requests: Iterator[bytes], result: LoadResult) -> None:
    """Send requests one after the other until there are none left; reconnect when the server hangs up."""
    done = asyncio.Event()
    connection = None
    for request in requests:
        if connection is None or not connection.usable:
            connection = await _connect(address, result, lambda _: done.set())
        done.clear()
        connection.send(request, time.perf_counter())
        await done.wait()
    if connection is not None:
        connection.close()


async def _closed(address: Address, requests: Sequence[bytes], clients: int, timeout_s: float) -> LoadResult:
    result, shared = LoadResult(), iter(requests)
    started = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(_client(address, shared, result) for _ in range(min(clients, len(requests)))))
    result.wall_s = time.perf_counter() - started
    return result


async def _open(
    address: Address, requests: Sequence[bytes], rate_per_s: float, timeout_s: float, seed: int
) -> LoadResult:
    result, idle, finished = LoadResult(), deque[_Connection](), asyncio.Event()

    def answered(connection: _Connection) -> None:
        idle.append(connection)
        if result.statuses.total() == len(requests):
            finished.set()

    async def start(request: bytes, due: float) -> None:
        while idle and not idle[-1].usable:
            idle.pop()
        connection = idle.pop() if idle else await _connect(address, result, answered)
        connection.send(request, due)

    arrivals, due = random.Random(seed), time.perf_counter()
    started = due
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
        for request in requests:
            due += arrivals.expovariate(rate_per_s)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(start(request, due))
        await finished.wait()
    result.wall_s = time.perf_counter() - started
    for connection in idle:
        connection.close()
    return result


def closed_loop(
    address: Address, requests: Sequence[bytes], clients: int, timeout_s: float = 600
) -> LoadResult:
    """Send each request once from `clients` connections. Raises TimeoutError after `timeout_s`."""
    return uvloop.run(_closed(address, requests, clients, timeout_s))


def open_loop(
    address: Address, requests: Sequence[bytes], rate_per_s: float, timeout_s: float = 600, seed: int = 1
) -> LoadResult:
    """Send each request once at Poisson arrivals of `rate_per_s`. Raises TimeoutError after `timeout_s`."""
    return uvloop.run(_open(address, requests, rate_per_s, timeout_s, seed))
