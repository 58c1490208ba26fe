"""A broker that speaks as much of the protocol as a client needs to join, and then what a test wants.

Connections are numbered from 0. `greetings` are the first lines of connections; the last one serves all that follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

GREETING = b'INFO {"server_id": "x", "version": "2.10.0", "max_payload": 1048576, "headers": true}\r\n'


class ScriptedBroker:
    """Answers each ping, unless `is_quiet`. `heard` are the lines of all connections."""

    def __init__(self, *greetings: bytes) -> None:
        self._greetings: Sequence[bytes] = greetings or (GREETING,)
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.heard: list[bytes] = []
        self.is_quiet = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.port = 0

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How often somebody has connected."""
        return len(self._writers)

    async def start(self) -> None:
        """Listen on a port that the kernel chooses."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Listen no more, and end all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def say(self, data: bytes) -> None:
        """Send bytes over the last connection."""
        self._writers[-1].write(data)

    def hang_up(self, last_words: bytes = b"") -> None:
        """End the last connection, behind these bytes."""
        self._writers[-1].write(last_words)
        self._writers[-1].close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = self._greetings[min(self.connections, len(self._greetings) - 1)]
        self._writers.append(writer)
        writer.write(greeting)
        while True:
            await self.reads.wait()
            try:
                line = await reader.readline()
            except (ConnectionError, ValueError):
                return
            if not line:
                writer.close()
                return
            self.heard.append(line)
            if line == b"PING\r\n" and not self.is_quiet:
                writer.write(b"PONG\r\n")
