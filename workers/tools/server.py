"""The tool host: its start and end, connections of frontends, and their calls.

1. Settings, logging, slot lock; sweep the work directories of earlier lives.
2. Find the layers of the sandbox, and name each in the log and in metrics. With `agent.sandbox: on` a missing layer
   ends the process with code 5.
3. `ToolServer` listens, and tells each frontend what the host offers.
4. Every call and every file is a task. A cancelled call, or the end of its connection, cancels the task.
5. SIGTERM, or the end of the supervisor's life pipe: take no new call, wait for those under way, end all sandboxes.
   Exit codes as those of a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ipc import logs, mcp_servers, settings
from ipc.errors import ConfigError, MachineUnfit, ProtocolError
from ipc.mcp_servers import McpConfig
from ipc.metrics import registry as metrics
from ipc.metrics.registry import ToolsMetrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotTaken, kill_sandboxes, take_slot
from ipc.processes.paths import TOOLS, prepare_run_dir, prepare_tools_dir, remove_tree
from ipc.settings import Agent, Settings
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
from workers.tools import layers
from workers.tools.layers import ACTIVE, Layers
from workers.tools.processes import Broken, adopt_orphans, kill_orphans
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


EXIT_CONFIG = 3
EXIT_UNFIT = 5
EXIT_BUG = 70
BEAT_EVERY_S = 0.5


def main(argv: list[str] | None = None) -> int:
    """Run the host; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.tools", description="The tool host of Penstock.")
    parser.add_argument(
        "--life-fd", type=int, default=-1, help="descriptor that ends when the supervisor dies"
    )
    options = parser.parse_args(argv)
    try:
        config = settings.load()
        logs.configure(config.log, TOOLS)
        processes.title("tool host")
        prepare_run_dir(config.paths)
        with take_slot(config.paths.lock(TOOLS)):
            _serve(config, options.life_fd)
    except (ConfigError, SlotTaken) as error:
        if logging.getLogger().handlers:
            log.critical("%s", error.message)
        else:
            sys.stderr.write(f"tool host: {error.message}\n")
        return EXIT_UNFIT if isinstance(error, MachineUnfit) else EXIT_CONFIG
    except Exception:
        log.exception("the tool host ends on an unexpected error")
        return EXIT_BUG
    finally:
        logs.flush()
    return 0


def _serve(config: Settings, life_fd: int) -> None:
    if not config.agent.has_tools:
        raise ConfigError("no tool is enabled: set agent.code_execution, agent.shell or agent.mcp_config")
    remotes = mcp_servers.read(config.agent.mcp_config)
    root = prepare_tools_dir(config.paths)
    kill_sandboxes(root)
    for left in root.iterdir():
        remove_tree(left)
    metrics.configure(config.paths, TOOLS)
    families = metrics.ToolsMetrics()
    adopt_orphans()
    sandbox_layers = layers.find(config.agent)
    # The starts that were tried leave the first processes of their namespaces.
    kill_orphans()
    sandbox_layers.take_groups()
    tell(config, sandbox_layers)
    families.touch(sandbox_layers.states)
    try:
        asyncio.run(_run(config, ToolServer(config.agent, sandbox_layers, root, families, remotes), life_fd))
    finally:
        config.paths.tools_socket().unlink(missing_ok=True)
        remove_tree(root)
        metrics.retire(config.paths, TOOLS)
    log.info("the tool host has ended")


def tell(config: Settings, found: Layers) -> None:
    """Log what is enabled and each layer of the sandbox."""
    agent = config.agent
    tools = [
        name
        for name, on in (
            ("Python", agent.code_execution),
            ("shell", agent.shell),
            ("MCP servers", agent.mcp_config),
        )
        if on
    ]
    active = [name for name, state in found.states.items() if state == ACTIVE]
    log.info(
        "tools: %s; sandbox %s (%s, network %s); active layers: %s",
        ", ".join(tools),
        agent.sandbox,
        agent.sandbox_profile,
        agent.sandbox_network,
        ", ".join(active) or "none",
    )
    for name, state in found.states.items():
        if state != ACTIVE:
            log.warning("the sandbox lacks the layer %s: %s", name, state)
    if agent.sandbox_network == "full":
        log.warning(
            "agent.sandbox_network = full: tools reach the ports of this machine and metadata services"
        )


async def _run(config: Settings, server: ToolServer, life_fd: int) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if life_fd >= 0:
        os.set_blocking(life_fd, False)
        loop.add_reader(life_fd, _life_ended, life_fd, server)
    server.listen(config.paths.tools_socket())
    notifier = processes.Notifier()
    beating = loop.create_task(_beat(notifier))
    await server.serve()
    notifier.send(stopping=1)
    await server.drain(config.worker.drain_timeout_s)
    beating.cancel()


def _life_ended(life_fd: int, server: ToolServer) -> None:
    asyncio.get_running_loop().remove_reader(life_fd)
    log.warning("the supervisor is gone")
    server.stop()


async def _beat(notifier: processes.Notifier) -> None:
    """Report readiness, then life, to the supervisor or systemd."""
    ready = False
    while True:
        if not ready:
            ready = notifier.send(ready=1, status="tools are ready")
        notifier.send(watchdog=1)
        await asyncio.sleep(BEAT_EVERY_S)
