"""The socket of the tool host: connections of frontends, their calls, and the end of both.

1. `ToolServer` listens, and tells each frontend what the host offers.
2. Every call and every file is a task. A cancelled call, or the end of its connection, cancels the task.
3. SIGTERM, or the end of the supervisor: take no new call, wait for those under way, end all sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ipc import mcp_servers
from ipc.errors import ConfigError, ProtocolError
from ipc.mcp_servers import McpConfig
from ipc.metrics.registry import ToolsMetrics
from ipc.settings import Agent
from ipc.wire.tools import (
    Call,
    Cancel,
    Done,
    End,
    Failed,
    Link,
    Mount,
    PythonCall,
    Ready,
    RemoteCall,
    Remotes,
    Run,
    ShellCall,
    ToHost,
    to_host,
)
from workers.tools.layers import Layers
from workers.tools.processes import Broken
from workers.tools.remotes import McpServers
from workers.tools.sandboxes import Sandboxes

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 300.0
"""Pause between two looks for sandboxes that were idle for too long."""
_TOOLS = {
    "PythonCall": "python",
    "ShellCall": "shell",
    "SurfaceCall": "surface",
    "ResetCall": "reset",
    "RemoteCall": "mcp",
}


class Connection:
    """One frontend."""

    def __init__(self, server: ToolServer, connection: socket.socket) -> None:
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.link = Link(connection, to_host, self._receive, self._ended)
        self.link.send(server.offer)
        if server.remotes is not None:
            self.link.send(server.remotes.state)

    def _receive(self, message: ToHost, fds: list[int]) -> None:
        if isinstance(message, Run):
            if message.id in self._calls:
                raise ProtocolError(f"call {message.id} runs already")
            self._calls[message.id] = self._start(self._run(message))
        elif isinstance(message, Mount):
            self._start(self._put(message, fds[0]))
        elif isinstance(message, Cancel):
            if (task := self._calls.get(message.id)) is not None:
                _cancel(task)
        else:
            # The end of a sandbox outlives the connection.
            self._server.start(self._end(message))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _owner(self, lasting: bool) -> Connection | None:
        return None if lasting else self

    async def _run(self, message: Run) -> None:
        try:
            answer, fds = await self._server.run(self._owner(message.lasting), message)
        finally:
            self._calls.pop(message.id, None)
        self.link.send(answer, fds)

    async def _put(self, message: Mount, fd: int) -> None:
        try:
            sandbox = await self._server.sandboxes.get(self._owner(message.lasting), message.sandbox)
            async with sandbox.turn():
                await sandbox.put(fd, message.path)
        except Broken as error:
            # The call that needs the file meets the same obstacle, and tells the frontend.
            log.warning("no sandbox for a file: %s", error)
        finally:
            os.close(fd)

    async def _end(self, message: End) -> None:
        for owner in (None, self):
            await self._server.sandboxes.end(owner, message.sandbox)

    def _ended(self, reason: str) -> None:
        log.info("a frontend has gone: %s; calls under way: %d", reason, len(self._calls))
        self._server.connections.discard(self)
        self._server.start(self.close())

    async def close(self) -> None:
        """Cancel all calls, and end the sandboxes of this connection."""
        self.link.close()
        for task in self._tasks:
            _cancel(task)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.sandboxes.end_all(self)

    async def finish(self) -> None:
        """Wait for the calls under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel once: a second time would interrupt the clean-up, and the next call would begin before its end."""
    if not task.cancelling():
        task.cancel()


class ToolServer:
    """The host: everything of one process."""

    def __init__(
        self,
        config: Agent,
        layers: Layers,
        root: Path,
        families: ToolsMetrics,
        remotes: McpConfig | None = None,
    ) -> None:
        """Work directories are made below `root`; `remotes` names MCP servers."""
        self._config, self._metrics = config, families
        self.sandboxes = Sandboxes(config, layers, root)
        self.offer = Ready(layers.states, config.code_execution, config.shell)
        self.remotes = None if remotes is None else McpServers(remotes, layers, root, self._tell)
        self.connections: set[Connection] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None

    def _tell(self, state: Remotes) -> None:
        """Tell every frontend the MCP servers that are connected, and their tools."""
        self._metrics.mcp_servers.set(state.connected)
        self._metrics.mcp_tools.set(len(state.tools))
        for connection in self.connections:
            connection.link.send(state)

    def stop(self) -> None:
        """End `serve`."""
        self._stopping.set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which the end of the host waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def listen(self, path: Path) -> None:
        """Take connections at `path`, which the owner removes after `serve`. Called in the event loop."""
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(64)
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def serve(self) -> None:
        """Run until `stop`."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(work) for work in (self._sweep(), self.sandboxes.guard())]
        if self.remotes is not None:
            self._connecting = loop.create_task(self.remotes.run())
        await self._stopping.wait()
        for each in tasks:
            each.cancel()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self._read_again()
        self.connections.add(Connection(self, connection))

    def _read_again(self) -> None:
        """Read the file of MCP servers again: a frontend that has just begun is a sign of a reload."""
        if self.remotes is None or self._connecting is None:
            return
        try:
            config = mcp_servers.read(self._config.mcp_config)
        except ConfigError as error:
            log.error("the MCP servers stay as they are: %s", error.message)
            return
        if config is not None:
            self.remotes.use(config)

    async def drain(self, drain_s: float) -> None:
        """Take no new connection, wait for calls under way, for `drain_s` at most, and end all sandboxes."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        finishing = [asyncio.ensure_future(each.finish()) for each in self.connections]
        if finishing:
            await asyncio.wait(finishing, timeout=drain_s)
        for each in finishing:
            each.cancel()
        for connection in list(self.connections):
            await connection.close()
        while self._work:
            await asyncio.wait(self._work)
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        await self.sandboxes.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self.sandboxes.end_idle()
            self._metrics.sandboxes.set(len(self.sandboxes))

    async def run(self, owner: Connection | None, message: Run) -> tuple[Done | Failed, list[int]]:
        """Run one call; the descriptors belong to the answer."""
        tool, began = _TOOLS[type(message.call).__name__], time.monotonic()
        status = "cancelled"
        try:
            self._require(message.call)
            if isinstance(message.call, RemoteCall):
                assert self.remotes is not None
                result = await self.remotes.call(message.call)
                status = result.status
                return Done(message.id, result), []
            sandbox = await self.sandboxes.get(owner, message.sandbox)
            self._metrics.sandboxes.set(len(self.sandboxes))
            async with sandbox.turn():
                outcome = await sandbox.run(message.call)
            status = outcome.result.status
            return Done(message.id, outcome.result, outcome.produced, outcome.left), outcome.fds
        except Broken as error:
            status = "failed"
            log.warning("a call of %s failed: %s", tool, error)
            return Failed(message.id, str(error)), []
        except Exception:
            status = "failed"
            log.exception("a call of %s met an unexpected error", tool)
            return Failed(message.id, "the tool host met an unexpected error"), []
        finally:
            self._metrics.calls.labels(tool, status).inc()
            self._metrics.seconds.labels(tool).observe(time.monotonic() - began)

    def _require(self, call: Call) -> None:
        """Raise `Broken` for a tool that the settings do not enable, and for code while the disk is almost full."""
        if isinstance(call, PythonCall | ShellCall):
            self.sandboxes.require_disk()
        if isinstance(call, PythonCall) and not self._config.code_execution:
            raise Broken("agent.code_execution is off")
        if isinstance(call, ShellCall) and not self._config.shell:
            raise Broken("agent.shell is off")
        if isinstance(call, RemoteCall) and self.remotes is None:
            raise Broken("agent.mcp_config names no MCP servers")
