"""One connection to the brokers, for gateways and bridges.

1. `start` connects, and connects again for ever. Nothing waits for a broker: `up` tells whether one is there. The
   client library gives up for good where a broker refuses a connection by a word; a new client takes its place.
2. `send` puts a message into the outbox, which a task writes. Without a broker `send` takes nothing, so that no message
   leaves stale after a minute.
3. `listen` adds a subscription, which lasts over reconnects. The bytes of its queue have no bound in the client, whose
   default drops messages in silence; the windows of our own protocol are the bound.
4. `on_up` is called after every connect, `on_down` at every loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error

from ipc import brokers
from ipc.errors import ProtocolError, QueueUnavailable
from ipc.logs import Seldom
from ipc.settings import Cluster

log = logging.getLogger(__name__)

RECONNECT_WAIT_S = 0.1
CONNECT_TIMEOUT_S = 2
PING_EVERY_S = 1
MISSING_PINGS = 2
LAST_S = 1
TRY_AGAIN_S = 1.0
MOST_TOLD = 32
"""Texts of the client library that are remembered until the next connect, so that none is written twice."""
HEAD_NBYTES = 4096
"""Room for headers beside a payload."""

NO_BROKER = "no broker of the cluster can be reached"
Handler = Callable[[Msg], None]
T = TypeVar("T")


async def lasting(run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop that shall end with the process alone: an error is written, and the loop begins again."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("a task of the cluster failed and begins again")
        await asyncio.sleep(TRY_AGAIN_S)


def readable(read: Callable[[bytes], T], data: bytes, seldom: Seldom, kind: str) -> T | None:
    """What `read` makes of a message; None, and a warning of `kind`, for bytes with which `read` fails."""
    try:
        return read(data)
    except ProtocolError as error:
        seldom.warning(kind, error.message)
        return None


class Broker:
    """A connection under one name."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Raises `ConfigError` for files that cannot be read. `name` is for the brokers' own pages."""
        self._urls, self._name = list(cluster.urls), name
        self._secrets, self._tls = brokers.secrets_of(cluster), brokers.tls_of(cluster)
        self._inline_nbytes = cluster.inline_bytes
        self.client = Client()
        self.up = False
        self.on_up: list[Callable[[], None]] = []
        self.on_down: list[Callable[[], None]] = []
        self._listeners: list[tuple[str, Handler]] = []
        self._outbox: list[tuple[str, bytes, str, dict[str, str] | None]] = []
        self._more, self._closed = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._told: set[str] = set()
        self._seldom = Seldom(log)

    def start(self) -> None:
        """Connect, and write what is sent."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(lasting(run)) for run in (self._keep_connected, self._write)]

    def listen(self, subject: str, handler: Handler) -> None:
        """Call `handler` for every message; call before `start`. An error of the handler ends that message alone."""
        self._listeners.append((subject, handler))

    @property
    def inline_nbytes(self) -> int:
        """Largest payload inside a message: the setting, at most half of what the broker takes beside headers.

        A broker that takes hardly more than headers gets a quarter of what it takes.
        """
        most = self.client.max_payload
        return min(self._inline_nbytes, max(1, most // 4, (most - HEAD_NBYTES) // 2))

    async def _keep_connected(self) -> None:
        while True:
            self.client = Client()
            self._closed.clear()
            await self._connect()
            await self._closed.wait()
            await asyncio.sleep(TRY_AGAIN_S)

    async def _connect(self) -> None:
        await self.client.connect(
            self._urls,
            name=self._name,
            tls=self._tls,
            **self._secrets,  # type: ignore[arg-type]
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # any number
            connect_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_EVERY_S,
            max_outstanding_pings=MISSING_PINGS,
            error_cb=self._failed,
            disconnected_cb=self._lost,
            reconnected_cb=self._connected,
            closed_cb=self._ended,
        )
        for subject, handler in self._listeners:
            await self.client.subscribe(
                subject, cb=_guarded(handler), pending_bytes_limit=0, pending_msgs_limit=0
            )
        if self.client.is_connected:
            await self._connected()

    async def _ended(self) -> None:
        self._closed.set()

    async def _connected(self) -> None:
        self.up = True
        self._told.clear()
        log.info("joined the broker %s", self.client.connected_url and self.client.connected_url.netloc)
        for tell in self.on_up:
            tell()

    async def _lost(self) -> None:
        if self.up:
            log.warning("lost the broker; looking for one")
        self.up = False
        self._outbox.clear()
        for tell in self.on_down:
            tell()

    async def _failed(self, error: Exception) -> None:
        """A word of the client library. Several brokers fail by turns, each with a text of its own."""
        text = str(error) or repr(error)
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            log.warning("brokers: %s", text)

    def send(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send a message at the end of this turn of the loop. Raises `QueueUnavailable` without a broker."""
        if not self.up:
            raise QueueUnavailable(NO_BROKER, retry_after_s=1)
        self._outbox.append((subject, data, reply, headers))
        self._more.set()

    def say(self, subject: str, data: bytes) -> bool:
        """Send what may be lost; returns whether there is a broker."""
        if self.up:
            self.send(subject, data)
        return self.up

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self._flush()

    async def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        for subject, data, reply, headers in messages:
            try:
                await self.client.publish(subject, data, reply, headers)
            except Error as error:
                self._seldom.warning("a message could not be sent", repr(error))

    async def close(self) -> None:
        """Write what is left, and disconnect."""
        if self.up:
            try:
                async with asyncio.timeout(LAST_S):
                    await self._flush()
                    await self.client.flush(LAST_S)
            except (Error, TimeoutError, OSError) as error:
                log.warning("the last messages may be lost: %r", error)
        for task in self._tasks:
            task.cancel()
        self.up = False
        await self.client.close()


def _guarded(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
    async def run(message: Msg) -> None:
        try:
            handler(message)
        except Exception:
            log.exception("a message on %s failed", message.subject)

    return run
