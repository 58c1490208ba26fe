"""When requests are sent.

1. Closed loop: each of `connections` callers sends the next request when the answer before has come.
2. Open loop: requests are due at a fixed rate. The latency of a request that has to wait counts the wait.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator

MAX_OPEN = 1024
"""Requests at a time in an open loop."""
_PAUSE_S = 0.1
"""After a failed request of a closed loop, so that a server that refuses at once is not flooded."""

Send = Callable[[float], Awaitable[bool]]
"""Sends a request that is due at a time; false when the request failed."""


class Clock:
    """The time of a run."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)


class Load:
    """The requests of one run: `rate` a second, or as many at a time as `connections`."""

    def __init__(
        self, rate: float | None, connections: int, requests: int | None, duration_s: float | None
    ) -> None:
        self._rate, self._requests, self._duration_s = rate, requests, duration_s
        self.connections = MAX_OPEN if rate else connections

    async def run(self, send: Send, clock: Clock) -> None:
        """Send all requests and wait for the answers."""
        await (self._open(send, clock, self._rate) if self._rate else self._closed(send, clock))

    def due(self, rate: float) -> Iterator[float]:
        """Seconds from the beginning at which requests are due."""
        for number in itertools.count():
            at = number / rate
            if number == self._requests or (self._duration_s is not None and at >= self._duration_s):
                return
            yield at

    async def _open(self, send: Send, clock: Clock, rate: float) -> None:
        slots, began = asyncio.Semaphore(MAX_OPEN), clock.now()

        async def one(due: float) -> None:
            try:
                await send(due)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for at in self.due(rate):
                if (wait_s := began + at - clock.now()) > 0:
                    await clock.sleep(wait_s)
                await slots.acquire()
                group.create_task(one(began + at))

    async def _closed(self, send: Send, clock: Clock) -> None:
        numbers, began = itertools.count(), clock.now()

        async def caller() -> None:
            while self._duration_s is None or clock.now() - began < self._duration_s:
                if self._requests is not None and next(numbers) >= self._requests:
                    return
                if not await send(clock.now()):
                    await clock.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.connections):
                group.create_task(caller())
