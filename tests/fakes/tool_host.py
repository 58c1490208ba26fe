"""A tool host without sandboxes: answers calls by a function of the test, over the real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ipc.wire.tools import (
    Call,
    Cancel,
    Done,
    End,
    Failed,
    Link,
    Mount,
    Produced,
    Ready,
    Remotes,
    Result,
    Run,
    ToHost,
    to_host,
)
from tests.harness.server import PATIENCE_S

Answer = Callable[[str, Call], Awaitable["Result | tuple[Result, dict[str, bytes]] | str"]]
"""The result of a call in a sandbox, alone or with the bytes of produced files by path; a text fails the call."""

OFFER = Ready({"namespaces": "active"}, python=True, shell=True)


class FakeToolHost:
    """Listens at `path`; `mounted` has (sandbox, path, bytes), `cancelled` the ids, `ended` the sandboxes."""

    def __init__(self, path: Path, answer: Answer, ready: Ready = OFFER) -> None:
        self._path, self._answer, self._ready = path, answer, ready
        self._links: list[Link] = []
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.runs: list[Run] = []
        self.mounted: list[tuple[str, str, bytes]] = []
        self.cancelled: list[int] = []
        self.ended: list[str] = []

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            listener.listen()
            listener.setblocking(False)
            try:
                while True:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                    self._accept(connection)
            finally:
                self.die()
                self._path.unlink(missing_ok=True)

    def die(self) -> None:
        """Close all connections in the midst of whatever is under way."""
        for task in self._calls.values():
            task.cancel()
        for link in self._links:
            link.close()
        self._links.clear()

    def tell(self, remotes: Remotes) -> None:
        """Tell the MCP servers."""
        for link in self._links:
            link.send(remotes)

    def _accept(self, connection: socket.socket) -> None:
        link = Link(
            connection, to_host, lambda message, fds: self._receive(link, message, fds), lambda _: None
        )
        self._links.append(link)
        link.send(self._ready)

    def _receive(self, link: Link, message: ToHost, fds: list[int]) -> None:
        if isinstance(message, Run):
            self.runs.append(message)
            self._calls[message.id] = asyncio.get_running_loop().create_task(self._run(link, message))
        elif isinstance(message, Mount):
            with os.fdopen(fds[0], "rb") as file:
                self.mounted.append((message.sandbox, message.path, file.read()))
        elif isinstance(message, Cancel):
            self.cancelled.append(message.id)
            self._calls[message.id].cancel()
        elif isinstance(message, End):
            self.ended.append(message.sandbox)

    async def _run(self, link: Link, message: Run) -> None:
        answer: Any = await self._answer(message.sandbox, message.call)
        if isinstance(answer, str):
            link.send(Failed(message.id, answer))
            return
        result, files = answer if isinstance(answer, tuple) else (answer, {})
        produced = [Produced(path, len(data)) for path, data in files.items()]
        link.send(Done(message.id, result, produced), [_descriptor(data) for data in files.values()])


def _descriptor(data: bytes) -> int:
    fd = os.memfd_create("produced", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return fd


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait for a condition that other tasks of the loop make true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def tool_host(path: Path, answer: Answer, ready: Ready = OFFER) -> AsyncIterator[FakeToolHost]:
    """A fake host that listens until the block ends."""
    host = FakeToolHost(path, answer, ready)
    serving = asyncio.create_task(host.serve())
    try:
        await until(lambda: path.is_socket() or serving.done())
        yield host
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
