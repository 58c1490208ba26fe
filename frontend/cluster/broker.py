"""One connection to the brokers, for gateways and bridges.

1. `start` connects, and connects again for ever. Nothing waits for a broker: `up` tells whether one is there. The
   client library gives up for good where a broker refuses a connection by a word, and where an error that it does not
   expect ends its loop. Each `WATCH_S` a look finds such a client, and a new one takes its place.
2. `send` puts a message into the outbox, and all messages of one turn of the event loop leave in one write. Without a
   broker `send` takes nothing, so that no message leaves stale after a minute.
3. `listen` adds a subscription, which lasts over reconnects. A message is handled as soon as the client library has
   read it: no queue of the library lies between, whose bound would drop messages in silence. The windows of our own
   protocol are the bound.
4. `on_up` is called after every connect, `on_down` at every loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.errors import Error

from frontend.cluster.broker_stream import ClosableTransport, headers_of
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
WATCH_S = 1.0
STUCK_S = 15.0
"""A client that has no connection and tries no broker for so long looks for none any more."""
SEARCH_S = 2.0
"""For so long after a loss a request waits for the brokers that were not tried yet."""
LOST_ECHOES = 3
"""Beats: who does not hear its own signs of life for longer hears nobody."""
CANCEL_AGAIN_S = 0.1
MOST_TOLD = 32
"""Texts of the client library that are remembered until the next connect, so that none is written twice."""
HEAD_NBYTES = 4096
"""Room for headers beside a payload."""

MOST_SUBJECTS_NBYTES = 2048
"""Subjects of one message. A broker ends the connection of whoever sends a command above its `max_control_line`."""
_UNSENDABLE = re.compile(r"[\s\0]")
"""What would end the subject of a message in the protocol of the brokers, and so begin another command."""
NO_BROKER = "no broker of the cluster can be reached"
Handler = Callable[[Msg], None]
Message = tuple[str, bytes, str, dict[str, str] | None]
"""Subject, payload, subject of replies, headers."""
T = TypeVar("T")


async def lasting(run: Callable[[], Awaitable[None]]) -> None:
    """Run a loop that shall end with the process alone: an error is written, and the loop begins again."""
    while True:
        try:
            return await run()
        except Exception:
            log.exception("a task of the cluster failed and begins again")
        await asyncio.sleep(TRY_AGAIN_S)


async def ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until all have ended.

    Once is not enough: `asyncio.wait_for`, which the client library uses, loses a cancellation that comes together with
    what it waits for (Python 3.11). A broker that was not joined yet would be joined for ever.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)


def readable(read: Callable[[bytes], T], data: bytes, seldom: Seldom, kind: str) -> T | None:
    """What `read` makes of a message; None, and a warning of `kind`, for bytes with which `read` fails."""
    try:
        return read(data)
    except ProtocolError as error:
        seldom.warning(kind, error.message)
        return None


class _Unsendable(ValueError):
    """A message that no broker would take."""


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


class QuickClient(Client):
    """The client library without its queues on the way of our own messages.

    PERF: the library hands a message to a queue, a task and a coroutine, and takes one through a buffer, a queue and a
    task: two more turns of the event loop each way, and half of the processor time of a message. It reads through a
    task of its own (`broker_stream`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._quick: dict[int, Handler] = {}
        self._active_s = time.monotonic()
        self._seldom = Seldom(log)
        self.in_vain: set[str] = set()
        """Brokers that were tried in vain since the last connection was lost."""

    @property
    def failure(self) -> str:
        """Why this client will never have a connection again; empty while it has one, or looks for one."""
        if self.is_closed:
            return "closed"
        if self.is_connected and not _is_over(self._reading_task):
            self._active_s = time.monotonic()
        elif _is_over(self._reconnection_task):
            return "it looks for no broker"
        elif time.monotonic() - self._active_s > STUCK_S:
            return f"it has tried no broker for {STUCK_S:g} s"
        return ""

    def discard(self) -> None:
        """End all that this client still does, without a word to its owner."""
        self._status = Client.CLOSED
        self._disconnected_cb = self._reconnected_cb = self._closed_cb = None
        for task in (
            self._reconnection_task,
            self._reading_task,
            self._ping_interval_task,
            self._flusher_task,
        ):
            if task is not None:
                task.cancel()
        for subscription in self._subs.values():
            # Each one with a callback, as that of the answers to requests, has a task that waits for messages.
            subscription._stop_processing()
        if isinstance(self._transport, ClosableTransport):
            self._transport.abort()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self._flush_queue is None:
            # The library would fail for a client that never began to connect.
            self.discard()
            return
        # What waits cannot be written to a connection that ends, and the error would keep the library from its end.
        self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    async def _ping_interval(self) -> None:
        try:
            await super()._ping_interval()
        except OSError as error:
            await self._process_op_err(error)

    async def _process_pong(self) -> None:
        # An answer to a ping that nobody waits for any more. The library would fail at it, and stop to read.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _connect_to_server(self, s: Srv) -> None:
        self._active_s = time.monotonic()
        if not self._transport and s.uri.scheme not in ("ws", "wss"):
            self._transport = ClosableTransport(self._heard)
        try:
            await super()._connect_to_server(s)
        except Exception:
            self.in_vain.add(s.uri.netloc)
            raise

    def _connect_command(self) -> bytes:
        # The library would send credentials in the clear to a broker, or to somebody before it, that asks for no TLS.
        transport = self._transport
        if "tls" in self.options and isinstance(transport, ClosableTransport) and not transport.is_tls:
            raise ConnectionRefusedError(
                "the broker asks for no TLS, which the settings of this cluster ask for"
            )
        return super()._connect_command()

    async def listen(self, subject: str, handler: Handler) -> None:
        """Subscribe. An error of the handler ends that message alone."""
        # The first message may arrive before `subscribe` returns.
        self._quick[self._sid + 1] = handler
        await self.subscribe(subject)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        # Over a websocket our own messages come this way, too.
        if self._heard(sid, subject, reply, headers or b"", data):
            return
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (LookupError, TypeError, ValueError) as error:
            self._unreadable(error)

    def _heard(self, sid: int, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> bool:
        """A message has arrived; false for one that the library handles."""
        handler = self._quick.get(sid)
        if handler is None:
            return False
        if not self.is_connected:
            # Bytes before the end of TLS's handshake and of the login, or of a connection that is given up.
            return True
        try:
            message = Msg(
                self, subject.decode(), reply.decode(), data, headers_of(headers) if headers else None
            )
        except ValueError as error:
            self._unreadable(error)
            return True
        try:
            handler(message)
        except Exception:
            log.exception("a message on %s failed", message.subject)
        return True

    def _unreadable(self, error: Exception) -> None:
        # NOTE: brokers carry subjects and headers of any bytes.
        self._seldom.warning("a message that cannot be read was dropped", repr(error))

    def write(self, messages: Sequence[Message], failed: Callable[[str], None]) -> None:
        """Write messages at once; `failed` is told why one was left out. Without a connection all are dropped."""
        if not self.is_connected or self._transport is None:
            return
        for message in messages:
            try:
                self._pending.append(self._command(*message))
            except _Unsendable as error:
                failed(str(error))
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        try:
            self._transport.writelines(pending)
        except ConnectionResetError as error:
            failed(str(error))

    def _command(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> bytes:
        if not subject or _UNSENDABLE.search(subject) or _UNSENDABLE.search(reply):
            raise _Unsendable(f"{subject!a:.80} or {reply!a:.80} is no subject")
        nbytes = len(subject.encode()) + len(reply.encode())
        if nbytes > MOST_SUBJECTS_NBYTES:
            raise _Unsendable(
                f"{subject!a:.80}: {nbytes} bytes of subjects, and {MOST_SUBJECTS_NBYTES} may be sent"
            )
        if len(data) > self.max_payload:
            raise _Unsendable(f"{len(data)} bytes, and this broker takes {self.max_payload}")
        if headers is None:
            return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"NATS/1.0\r\n{lines}\r\n".encode()
        sizes = (subject.encode(), reply.encode(), len(head), len(head) + len(data))
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (*sizes, head, data)


def _tell(listeners: Sequence[Callable[[], None]]) -> None:
    """Call all. An error of one is written alone: the client library would look for no broker any more."""
    for tell in listeners:
        try:
            tell()
        except Exception:
            log.exception("a change of the connection to the brokers failed")


class Broker:
    """A connection under one name."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Raises `ConfigError` for files that cannot be read. `name` is for the brokers' own pages."""
        self._urls, self._name = list(cluster.urls), name
        self._secrets, self._tls = brokers.secrets_of(cluster), brokers.tls_of(cluster)
        self._inline_nbytes = cluster.inline_bytes
        self.client = QuickClient()
        self.up = False
        self.on_up: list[Callable[[], None]] = []
        self.on_down: list[Callable[[], None]] = []
        self._listeners: list[tuple[str, Handler]] = []
        self._outbox: list[Message] = []
        self._closed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._told: set[str] = set()
        self._seldom = Seldom(log)
        self._lost_s, self._moved = -SEARCH_S, asyncio.Event()
        self._subscribing = set[asyncio.Task[None]]()

    def start(self) -> None:
        """Connect."""
        self._tasks = [asyncio.get_running_loop().create_task(lasting(self._keep_connected))]

    def listen(self, subject: str, handler: Handler) -> None:
        """Call `handler` for every message, soon and for ever. An error of the handler ends that message alone."""
        self._listeners.append((subject, handler))
        if self.up:
            task = asyncio.get_running_loop().create_task(self._subscribe(subject, handler))
            self._subscribing.add(task)
            task.add_done_callback(self._subscribing.discard)

    async def _subscribe(self, subject: str, handler: Handler) -> None:
        """Subscribe over the present connection; a connection that ends has the next one subscribe."""
        try:
            await self.client.listen(subject, handler)
        except (Error, OSError) as error:
            self._seldom.warning("a subscription waits for the next connection", repr(error))

    @property
    def inline_nbytes(self) -> int:
        """Largest payload inside a message: the setting, at most half of what the broker takes beside headers.

        A broker that takes hardly more than headers gets a quarter of what it takes.
        """
        most = self.client.max_payload
        return min(self._inline_nbytes, max(1, most // 4, (most - HEAD_NBYTES) // 2))

    @property
    def replicas(self) -> int:
        """Copies of a stream whose messages shall outlive a broker: three where there are three brokers."""
        return 3 if len(self.client.servers) >= 3 else 1

    async def _keep_connected(self) -> None:
        while True:
            self._closed.clear()
            client = self.client = QuickClient()
            try:
                await self._connect()
                # NOTE: a client that said that it has closed may have a connection, by an attempt that went on.
                while not (why := client.failure or ("closed" if self._closed.is_set() else "")):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            await self._closed.wait()
            except Exception as error:
                why = repr(error)
            client.discard()
            if self.up:
                await self._lost()
            self._seldom.warning("a client of the brokers is replaced", why)
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
            await self.client.listen(subject, handler)
        if self.client.is_connected:
            await self._connected()

    async def _ended(self) -> None:
        self._closed.set()

    async def _connected(self) -> None:
        self.up = True
        self._moved.set()
        self._told.clear()
        log.info("joined the broker %s", self.client.connected_url and self.client.connected_url.netloc)
        _tell(self.on_up)

    async def _lost(self) -> None:
        if self.up:
            log.warning("lost the broker; looking for one")
            self._lost_s = time.monotonic()
            self.client.in_vain.clear()
        self.up = False
        self._outbox.clear()
        _tell(self.on_down)

    async def _failed(self, error: Exception) -> None:
        """A word of the client library. Several brokers fail by turns, each with a text of its own."""
        self._moved.set()
        text = str(error) or repr(error)
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            log.warning("brokers: %s", text)

    async def found(self, most_s: float = SEARCH_S) -> None:
        """Wait while a lost connection may come back at once: for `SEARCH_S`, until all brokers were tried in vain.

        Never longer than `most_s`.

        So a request that comes just after the death of one broker of several is not refused.
        """
        until_s = min(self._lost_s + SEARCH_S, time.monotonic() + most_s)
        while not self.up and any(url.netloc not in self.client.in_vain for url in self.client.servers):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._moved.wait()

    def send(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send a message at the end of this turn of the loop. Raises `QueueUnavailable` without a broker."""
        if not self.up:
            raise QueueUnavailable(NO_BROKER, retry_after_s=1)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((subject, data, reply, headers))

    def say(self, subject: str, data: bytes) -> bool:
        """Send what may be lost; returns whether there is a broker."""
        if self.up:
            self.send(subject, data)
        return self.up

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        self.client.write(messages, lambda why: self._seldom.warning("a message could not be sent", why))

    async def close(self) -> None:
        """Write what is left, and disconnect."""
        if self.up:
            try:
                async with asyncio.timeout(LAST_S):
                    self._flush()
                    await self.client.flush(LAST_S)
            except (Error, TimeoutError, OSError) as error:
                log.warning("the last messages may be lost: %r", error)
        await ended(self._tasks)
        self.up = False
        await self.client.close()
