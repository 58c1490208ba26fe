"""The ways to an MCP server: a program in a sandbox, streamable HTTP, a WebSocket.

| transport | a message is | the connection ends |
|---|---|---|
| `Program` | a line of the program's standard input or output | when the program ends |
| `HttpTransport` | the body of a POST; answers are JSON or events | when the server is gone, or forgets the session |
| `SocketTransport` | a text message | when the WebSocket closes, or does not answer its pings |

Redirects are not followed: the token and the headers of the configuration belong to the server that is named there.
Answers are taken uncompressed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from ipc.mcp_servers import Http, Process, WebSocket
from workers.tools import processes
from workers.tools.cgroups import Group
from workers.tools.files import WorkDir, excess
from workers.tools.layers import Layers
from workers.tools.processes import Broken, unbroken
from workers.tools.rpc import MAX_MESSAGE_NBYTES, RemoteFailed, RemoteGone, Transport, shown
from workers.tools.sandboxes import require_start

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from websockets.asyncio.client import ClientConnection

LISTEN_AGAIN_S = 5.0
"""Pause between two streams of messages that a server sends on its own."""
_PING_EVERY_S = 30.0
"""Pause between two pings of a WebSocket, and the longest wait for the answer."""
_EVENTS, _JSON = "text/event-stream", "application/json"
_SESSION, _REVISION = "Mcp-Session-Id", "MCP-Protocol-Version"
_TOO_LARGE = f"the server sent a message of over {MAX_MESSAGE_NBYTES} bytes"
_CPU_S = float((1 << 31) - 2)
"""Processor time of a program in seconds: a server may live as long as the tool host."""
_STDERR_CHARS = 4096
WATCH_EVERY_S = 5.0
_WATCHING_SHARE = 20.0
"""Shortest pause between two looks at the directory of a program, and how often a pause is longer than a look."""
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
"""Ends of lines in JSON stand between values only, where they mean as much as spaces."""
_LAST_WORDS_S = 1.0
"""Longest wait for the exit code of a program that has closed its output."""


class Program(Transport):
    """A program in a sandbox, with variables of its own only."""

    def __init__(self, source: Process, layers: Layers, root: Path) -> None:
        """Without a work directory in `source` the program has an empty one below `root`, for its life."""
        self._source, self._layers, self._root = source, layers, root
        self._temporary: WorkDir | None = None
        self._watching: asyncio.Task[None] | None = None
        self._process: processes.Process | None = None
        self._group: Group | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Start the program."""
        source, near = self._source, None
        try:
            if self._layers.groups is not None:
                self._group = self._layers.groups.make()
            near, far = socket.socketpair()
            with far:
                more = (source.command, *source.args)
                self._process = processes.Process(
                    *(self._layers, self._directory(), "program", _CPU_S, more, 4 * _STDERR_CHARS),
                    group=self._group,
                    streams=far.fileno(),
                    variables=source.env,
                )
            reader, self._writer = await asyncio.open_unix_connection(sock=near, limit=MAX_MESSAGE_NBYTES)
        except (Broken, OSError) as error:
            if near is not None:
                near.close()
            await self._end_group()
            raise RemoteGone(f"the program cannot be started: {error}") from None
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(reader))
        if self._temporary is not None:
            self._watching = loop.create_task(self._watch(self._temporary))

    def _directory(self) -> Path:
        if self._source.work_dir:
            return Path(self._source.work_dir)
        self._temporary = WorkDir(self._root / f"mcp-{secrets.token_hex(12)}", shared=False)
        return self._temporary.path

    async def _watch(self, directory: WorkDir) -> None:
        """End the connection once the directory of the program takes more than a work directory may."""
        config, pause_s, full = self._layers.config, WATCH_EVERY_S, ""
        while not full:
            await asyncio.sleep(pause_s)
            began = time.perf_counter()
            seen = await unbroken(asyncio.to_thread(directory.look, config.max_workdir_files))
            full = excess(seen, config.max_workdir_bytes)
            pause_s = max(WATCH_EVERY_S, _WATCHING_SHARE * (time.perf_counter() - began))
        self.session.end(f"the program is ended, as its work directory {full}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                if line.strip():
                    self.session.receive(line)
        except ValueError:
            self.session.end(_TOO_LARGE)
            return
        except OSError:
            pass
        self.session.end(await self._last_words())

    async def _last_words(self) -> str:
        """Why the program has ended, as far as the program and its sandbox say so."""
        process = self._process
        assert process is not None
        await asyncio.wait([process.ended], timeout=_LAST_WORDS_S)
        said = process.stderr.take(_STDERR_CHARS).strip()
        try:
            require_start(process, said, "the program")
        except Broken as error:
            return str(error)
        code = f" with {process.ended.result()}" if process.ended.done() else ""
        return f"the program has ended{code}{f': {shown(said.splitlines()[-1])}' if said else ''}"

    async def send(self, message: bytes, id_: int | None) -> None:
        """Write a line, once the program has read most of the lines before."""
        if self._writer is None:
            raise RemoteGone("the program has ended")
        try:
            await self._writer.drain()
            # NOTE: arguments of calls are texts of clients. A second line in them would be a message of its own.
            self._writer.write(message.translate(_ONE_LINE) + b"\n")
            await self._writer.drain()
        except (OSError, RuntimeError):
            raise RemoteGone("the program has ended") from None

    async def close(self) -> None:
        """End the program with all that it has started, and remove its directory."""
        if self._reading is not None:
            self._reading.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await self._process.end()
        await self._end_group()
        if self._temporary is not None:
            await asyncio.to_thread(self._temporary.close)

    async def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.end()


def _headers_of(source: Http | WebSocket, token: str | None) -> dict[str, str]:
    headers = dict(source.headers or {})
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return headers


class HttpTransport(Transport):
    """Streamable HTTP, section "Transports" of the protocol."""

    def __init__(self, source: Http, token: str | None) -> None:
        self._source, self._own = source, _headers_of(source, token)
        self._headers: dict[str, str] = {}
        self._client: ClientSession | None = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connections open with the first message."""
        import aiohttp

        # NOTE: a small answer could unfold to any size, so answers come as they are.
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={**self._own, "Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    def settled(self, revision: str) -> None:
        """Name the revision from now on, and listen for messages that the server sends on its own."""
        self._headers[_REVISION] = revision
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def send(self, message: bytes, id_: int | None) -> None:
        """Post a message, and take the answer."""
        from aiohttp import ClientError

        assert self._client is not None
        headers = {**self._headers, "Accept": f"{_JSON}, {_EVENTS}", "Content-Type": _JSON}
        try:
            async with self._client.post(
                self._source.url, data=message, headers=headers, allow_redirects=False
            ) as answer:
                await self._take(answer, id_)
        except (ClientError, OSError, ValueError) as error:
            raise RemoteGone(f"the server does not answer: {type(error).__name__}") from None

    async def _take(self, answer: ClientResponse, id_: int | None) -> None:
        if answer.status == 404 and _SESSION in self._headers:
            raise RemoteGone("the server has forgotten the session")
        if not 200 <= answer.status < 300:
            raise RemoteFailed(f"the server answered with status {answer.status}")
        if session := answer.headers.get(_SESSION):
            self._headers[_SESSION] = session
        if answer.content_type == _EVENTS:
            async for text in _events(answer):
                self.session.receive(text)
        elif id_ is not None:
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > MAX_MESSAGE_NBYTES:
                    raise RemoteFailed(_TOO_LARGE)
            self.session.receive(bytes(body))
        if id_ is not None:
            raise RemoteFailed("the server's answer has ended without the result")

    async def _listen(self) -> None:
        """Take messages that no request has asked for, where the server sends such messages."""
        from aiohttp import ClientError

        assert self._client is not None
        while True:
            try:
                async with self._client.get(
                    self._source.url, headers={**self._headers, "Accept": _EVENTS}, allow_redirects=False
                ) as answer:
                    if answer.status != 200 or answer.content_type != _EVENTS:
                        return
                    async for text in _events(answer):
                        self.session.receive(text)
            except (ClientError, OSError, ValueError, RemoteFailed):
                # The next request tells whether the server is gone.
                pass
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def close(self) -> None:
        """Close the connections, and let the server forget the session."""
        if self._listening is not None:
            self._listening.cancel()
        if self._client is not None:
            if _SESSION in self._headers:
                await self._forget(self._client)
            await self._client.close()

    async def _forget(self, client: ClientSession) -> None:
        from aiohttp import ClientError

        try:
            async with asyncio.timeout(1.0), client.delete(self._source.url, headers=self._headers):
                return
        except (ClientError, OSError, ValueError, TimeoutError):
            return


class _Events:
    """Collects the data of server-sent events, as the HTML standard reads them."""

    def __init__(self) -> None:
        self._rest, self._data, self._nbytes = bytearray(), list[bytes](), 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of all events that are whole now. Raises `RemoteFailed`."""
        self._rest += piece
        events, lines = [], list[bytes]()
        if b"\n" in piece:
            # PERF: only then, as a server may send an endless line in pieces of one byte.
            *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n")
            self._rest = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._nbytes += len(line)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._nbytes = [], 0
        if self._nbytes + len(self._rest) > MAX_MESSAGE_NBYTES:
            raise RemoteFailed(_TOO_LARGE)
        return events


async def _events(answer: ClientResponse) -> AsyncIterator[bytes]:
    collector = _Events()
    async for piece in answer.content.iter_any():
        for text in collector.feed(piece):
            if text:
                yield text


class SocketTransport(Transport):
    """JSON-RPC in text messages of a WebSocket with the subprotocol `mcp`."""

    def __init__(self, source: WebSocket, token: str | None) -> None:
        self._source, self._headers = source, _headers_of(source, token)
        self._socket: ClientConnection | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException
        from websockets.typing import Subprotocol

        class Direct(connect):
            def process_redirect(self, exc: Exception) -> Exception | str:
                return exc

        try:
            self._socket = await Direct(
                self._source.url,
                subprotocols=[Subprotocol("mcp")],
                additional_headers=self._headers,
                compression=None,
                proxy=None,
                open_timeout=None,
                ping_interval=_PING_EVERY_S,
                ping_timeout=_PING_EVERY_S,
                close_timeout=1.0,
                max_size=MAX_MESSAGE_NBYTES,
            )
        except (WebSocketException, OSError, ValueError) as error:
            raise RemoteGone(f"the server does not answer: {type(error).__name__}") from None
        self._reading = asyncio.get_running_loop().create_task(self._read(self._socket))

    async def _read(self, connection: ClientConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            async for message in connection:
                self.session.receive(message)
        except ConnectionClosed:
            pass
        self.session.end(f"the WebSocket has closed with {connection.close_code}")

    async def send(self, message: bytes, id_: int | None) -> None:
        """Send a text."""
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None
        try:
            await self._socket.send(message, text=True)
        except ConnectionClosed:
            raise RemoteGone("the WebSocket has closed") from None

    async def close(self) -> None:
        """Close the connection."""
        if self._reading is not None:
            self._reading.cancel()
        if self._socket is not None:
            await self._socket.close()
