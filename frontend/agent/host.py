"""The client of the tool host in one frontend.

1. `run_link` keeps one connection to the host, and looks for a host again while there is none.
2. `run` sends a call and waits for its end. A cancelled task cancels its call.
3. When the host dies, every call under way raises `ToolHostLost`, once. No call is sent again.

Everything is of the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ipc.errors import ProtocolError, SandboxFailed, ToolHostLost, ToolsUnavailable
from ipc.wire.tools import (
    Call,
    Cancel,
    Done,
    End,
    Failed,
    Link,
    Mount,
    Ready,
    Remotes,
    RemoteTool,
    Run,
    ToFrontend,
    close_all,
    to_frontend,
)

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
"""Pause between two tries to reach the host."""
_LOST = "the tool host ended while it ran this call; the call is not repeated"


class ProducedFile(NamedTuple):
    """A file that a call left; whoever takes the file closes `fd`. A file with an `error` has no `fd`."""

    path: str
    nbytes: int
    fd: int | None
    error: str


class ToolHost:
    """The host as a frontend sees it; `ready` is what the host offers now, None while no host is there.

    `since` is when the host came or went, in Unix seconds.
    `remotes` are the MCP servers of the host, None where the host has none; `remote_tools` are their tools by name.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the host's socket."""
        self._path = path
        self.ready: Ready | None = None
        self.since = time.time()
        self.remotes: Remotes | None = None
        self.remote_tools: Mapping[str, RemoteTool] = {}
        self._link: Link | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Done, list[int]]]] = {}
        self._next = 0
        self._gone = asyncio.Event()

    async def run_link(self) -> None:
        """Keep a connection until cancelled."""
        try:
            while True:
                if await self._connect():
                    await self._gone.wait()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if self._link is not None:
                self._link.close()
            self._end("this frontend ends")

    async def run(self, sandbox: str, call: Call, *, lasting: bool) -> tuple[Done, list[ProducedFile]]:
        """Run a call in a sandbox, which begins with its first call. The caller owns the descriptors of the files.

        Raises `ToolsUnavailable` while no host is there, `ToolHostLost` when the host dies meanwhile, and
        `SandboxFailed` when the sandbox could not run the call.
        """
        link = self._ready_link()
        self._next = number = self._next + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            link.send(Run(number, sandbox, lasting, call))
            done, fds = await future
        except ProtocolError as error:
            raise SandboxFailed(f"the call is too large for a tool: {error.message}") from error
        except asyncio.CancelledError:
            link.send(Cancel(number))
            if future.done() and not future.cancelled() and future.exception() is None:
                close_all(future.result()[1])
            raise
        finally:
            self._waiting.pop(number, None)
        left = iter(fds)
        files = [
            ProducedFile(p.path, p.nbytes, None if p.error else next(left), p.error) for p in done.produced
        ]
        return done, files

    async def mount(self, sandbox: str, path: str, fd: int, *, lasting: bool) -> None:
        """Copy the file behind `fd`, which stays the caller's, to a relative `path` of the work directory.

        The host reads the file from its beginning. A copy that fails is told by the next call. Raises
        `ToolsUnavailable`.
        """
        self._ready_link().send(Mount(sandbox, lasting, path), [os.dup(fd)])

    async def end(self, sandbox: str) -> None:
        """End a sandbox with its processes and files. Without a host there is nothing to end."""
        if self._link is not None:
            self._link.send(End(sandbox))

    def _ready_link(self) -> Link:
        if self._link is None or self.ready is None:
            raise ToolsUnavailable("no tool host is running now; try again", retry_after_s=1.0)
        return self._link

    async def _connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(self._path))
        except OSError:
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        self._gone.clear()
        self._link = Link(connection, to_frontend, self._receive, self._end)
        return True

    def _receive(self, message: ToFrontend, fds: list[int]) -> None:
        if isinstance(message, Ready):
            self.ready, self.since = message, time.time()
            return
        if isinstance(message, Remotes):
            self.remotes = message
            self.remote_tools = {tool.name: tool for tool in message.tools}
            return
        future = self._waiting.get(message.id)
        if future is None or future.done():
            close_all(fds)
        elif isinstance(message, Failed):
            future.set_exception(SandboxFailed(message.message))
        else:
            future.set_result((message, fds))

    def _end(self, reason: str) -> None:
        if self.ready is not None:
            log.warning("the tool host is gone (%s); calls under way: %d", reason, len(self._waiting))
            self.since = time.time()
        self.ready = self.remotes = self._link = None
        self.remote_tools = {}
        self._gone.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ToolHostLost(_LOST))
