"""The bytes of one connection to a broker, beneath the client library.

1. `ClosableTransport` connects, by TLS too, and lets the library write. The end of the connection is an error that the
   library understands.
2. `_Reading` cuts what the broker sends into commands, and offers each message to its listener at once. What the
   listener does not take, and every other command, goes on to the library as the broker sent the command.

PERF: the library reads through a stream, a task and a buffer from which it removes each command. That costs a turn of
the event loop, and as much processor time as the handling of the message.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

log = logging.getLogger(__name__)

CLOSE_S = 0.5
"""How long a connection that is closed may take for what it still has to write."""
MOST_LINE_NBYTES = 1 << 20
"""The first line of a command. Brokers send longer ones to nobody."""
_END = b"\r\n"
Hear = Callable[[int, bytes, bytes, bytes, bytes], bool]
"""Take a message by its subscription, subject, reply, headers and payload; false where the library shall take it."""


def headers_of(block: bytes) -> dict[str, str]:
    """The headers of a message, with `Status` and `Description` of its first line. Raises ValueError."""
    first, *lines = block.decode().split("\r\n")
    version, _, told = first.partition(" ")
    if version != "NATS/1.0":
        raise ValueError(f"headers begin with {version!a:.20}")
    headers = {}
    if told:
        headers["Status"], _, headers["Description"] = told.strip().partition(" ")
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


class _Reading(asyncio.StreamReaderProtocol):
    """What the broker sends: messages to `hear`, all else to the stream that the library reads."""

    def __init__(self, stream: asyncio.StreamReader, hear: Hear) -> None:
        super().__init__(stream)
        self.stream, self._hear = stream, hear
        self._parts: list[bytes] = []
        self._nbytes = self._needed = 0
        """Bytes of `_parts`, the beginning of a command, and how many are needed to go on."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # NOTE: the transports of uvloop are of no class of asyncio.
        self._connection = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._nbytes += len(data)
            if self._nbytes < self._needed:
                return
            data = b"".join(self._parts)
            self._parts = []
        at = self._taken(data)
        if at < len(data):
            self._parts, self._nbytes = [data[at:] if at else data], len(data) - at

    def _taken(self, data: bytes) -> int:
        """Take all whole commands; returns their bytes. `_needed` is set for the command behind."""
        at = 0
        while (end := data.find(_END, at)) >= 0:
            after = end + 2
            is_message = data.startswith((b"MSG ", b"HMSG "), at)
            if is_message:
                fields = data[at:end].split()
                try:
                    after += int(fields[-1]) + 2
                    if len(data) < after:
                        self._needed = after - at
                        return at
                    is_message = self._is_heard(fields, data[end + 2 : after - 2])
                except (IndexError, ValueError):
                    # The library ends the connection for a command that cannot be read.
                    is_message = False
            if not is_message:
                super().data_received(data[at:after])
            at = after
        self._needed = len(data) - at + 1
        if self._needed > MOST_LINE_NBYTES:
            log.warning("a broker sent a line above %d bytes; its connection ends", MOST_LINE_NBYTES)
            self._connection.abort()
        return at

    def _is_heard(self, fields: Sequence[bytes], body: bytes) -> bool:
        """Offer a message. Raises IndexError or ValueError for a command that is none."""
        if fields[0] == b"MSG":
            return self._hear(int(fields[2]), fields[1], fields[3] if len(fields) > 4 else b"", b"", body)
        nbytes = int(fields[-2])
        reply = fields[3] if len(fields) > 5 else b""
        return self._hear(int(fields[2]), fields[1], reply, body[:nbytes], body[nbytes:])


class ClosableTransport(TcpTransport):
    """A connection whose messages `hear` takes first, and whose end is an `OSError` to writers.

    The client library looks for another broker after an `OSError`. uvloop raises `RuntimeError` for a write to a closed
    connection, and the library's loop of reconnects would end with such an error for good.
    """

    def __init__(self, hear: Hear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hear = hear

    def __bool__(self) -> bool:
        # The client library would put a transport of its own in the place of a false one.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        """Connect. Raises `OSError`, also after `connect_timeout` seconds."""
        assert uri.hostname is not None and uri.port is not None
        protocol = self._reading(buffer_size)
        async with asyncio.timeout(connect_timeout):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: protocol, uri.hostname, uri.port
            )
        self._use(transport, protocol)
        # NOTE: the first transport has to live as long as the TLS above it.
        self._bare_io_reader, self._bare_io_writer = self._io_reader, self._io_writer

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        """Speak TLS from now on. Raises `OSError`, also after `connect_timeout` seconds."""
        assert self._io_writer is not None
        protocol = self._reading(buffer_size)
        async with asyncio.timeout(connect_timeout):
            transport = await asyncio.get_running_loop().start_tls(
                self._io_writer.transport,
                protocol,
                ssl_context,
                server_hostname=uri if isinstance(uri, str) else uri.hostname,
            )
        assert transport is not None
        self._use(transport, protocol)

    def _reading(self, buffer_size: int) -> _Reading:
        return _Reading(asyncio.StreamReader(buffer_size), self._hear)

    def _use(self, transport: asyncio.Transport, protocol: _Reading) -> None:
        loop, self._io_reader = asyncio.get_running_loop(), protocol.stream
        self._io_writer = asyncio.StreamWriter(transport, protocol, protocol.stream, loop)

    def write(self, payload: bytes) -> None:
        """Raises `ConnectionResetError` for a connection that the broker has closed."""
        self.writelines([payload])

    def writelines(self, payload: Sequence[bytes]) -> None:
        """Raises `ConnectionResetError` for a connection that the broker has closed."""
        try:
            super().writelines(payload)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error

    async def wait_closed(self) -> None:
        """A broker that stands still takes nothing: what it has not taken within `CLOSE_S` is thrown away."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await super().wait_closed()  # type: ignore[no-untyped-call]
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """End the connection at once."""
        if self._io_writer is not None:
            self._io_writer.transport.abort()
