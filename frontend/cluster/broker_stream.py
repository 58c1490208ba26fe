"""The bytes of one connection to a broker, beneath the client library.

1. `ClosableTransport` connects, by TLS too, and lets the library write. The end of the connection is an error that the
   library understands.
2. `_Reading` cuts what the broker sends into commands, and offers each message to its listener at once. What the
   listener does not take, and every other command, goes on to the library as the broker sent the command. A message of
   impossible form or size ends the connection.

PERF: the library reads through a stream, a task and a buffer from which it removes each command. That costs a turn of
the event loop, and as much processor time as the handling of the message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

CLOSE_S = 0.5
"""How long a connection that is closed may take for what it still has to write."""
MOST_LINE_NBYTES = 1 << 20
"""The first line of a command. Brokers send longer ones to nobody."""
MOST_MESSAGE_NBYTES = 64 << 20
"""Headers and payload of a message: the largest `max_payload` that a broker can have."""
_END = b"\r\n"
_MESSAGES = (b"MSG ", b"HMSG ", b"MSG\t", b"HMSG\t")
Hear = Callable[[int, bytes, bytes, bytes, bytes], bool]
"""Take a message by its subscription, subject, reply, headers and payload; false where the library shall take it."""


def headers_of(block: bytes) -> dict[str, str]:
    """The headers of a message, with `Status`, a number, and `Description` of its first line. Raises ValueError.

    Fields have any bytes: U+FFFD stands for those that are no UTF-8.
    """
    head, _, rest = block.partition(_END)
    version, _, told = head.decode().partition(" ")
    if version != "NATS/1.0":
        raise ValueError(f"headers begin with {version!a:.20}")
    headers = {}
    status, _, description = told.strip().partition(" ")
    if status.isdigit():
        headers["Status"], headers["Description"] = status, description
    for line in rest.decode(errors="replace").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def _measured(fields: Sequence[bytes]) -> tuple[bytes, int, int]:
    """(subject of replies, bytes of headers, bytes of headers and payload) by a message's line. Raises ValueError."""
    words = len(fields)
    head = b"0"
    if fields[0] == b"HMSG":
        words, head = words - 1, fields[-2]
    if words not in (4, 5):
        raise ValueError("number of words")
    # NOTE: `int` reads signs and underscores, too.
    if not (fields[2] + head + fields[-1]).isdigit():
        raise ValueError("numbers")
    head_nbytes, nbytes = int(head), int(fields[-1])
    if not head_nbytes <= nbytes <= MOST_MESSAGE_NBYTES:
        raise ValueError("sizes")
    return fields[3] if words == 5 else b"", head_nbytes, nbytes


class _Reading(asyncio.StreamReaderProtocol):
    """What the broker sends: messages to `hear`, all else to the stream that the library reads."""

    def __init__(self, stream: asyncio.StreamReader, hear: Hear) -> None:
        super().__init__(stream)
        self.stream, self._hear = stream, hear
        self._parts: list[bytes] = []
        self._nbytes = self._needed = 0
        """Bytes of `_parts`, the beginning of a command, and how many are needed to go on."""
        self._is_refused = False

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
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
            is_heard = False
            if data.startswith(_MESSAGES, at):
                fields = data[at:end].split()
                try:
                    reply, head_nbytes, nbytes = _measured(fields)
                except ValueError as error:
                    return self._refuse(data, f"{error} of the message {data[at:end]!a:.80}")
                body, after = after, after + nbytes + 2
                if len(data) < after:
                    self._needed = after - at
                    return at
                payload = body + head_nbytes
                is_heard = self._hear(
                    int(fields[2]), fields[1], reply, data[body:payload], data[payload : after - 2]
                )
            if not is_heard:
                super().data_received(data[at:after])
            at = after
        self._needed = len(data) - at + 1
        if self._needed > MOST_LINE_NBYTES:
            return self._refuse(data, f"a line above {MOST_LINE_NBYTES} bytes")
        return at

    def _refuse(self, data: bytes, what: str) -> int:
        """Drop all that comes from now on, and have the library end the connection."""
        self._is_refused = True
        self.stream.set_exception(ConnectionResetError(f"a broker has sent what no broker sends: {what}"))
        return len(data)


class ClosableTransport(TcpTransport):
    """A connection whose messages `hear` takes first, and whose end is an `OSError` to writers.

    The client library looks for another broker after an `OSError`. uvloop raises `RuntimeError` for a write to a closed
    connection, and the library's loop of reconnects would end with such an error for good.
    """

    def __init__(self, hear: Hear) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hear = hear
        self.is_tls = False

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
        self.is_tls = False
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
        # The loop tells this only to protocols of new connections. The stream could not make the broker wait.
        protocol.connection_made(transport)
        self._use(transport, protocol)
        self.is_tls = True

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
