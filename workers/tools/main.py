"""Start and end of the tool host.

1. Settings, logging, slot lock; sweep the work directories of earlier lives.
2. Find the layers of the sandbox, and name each in the log and in metrics. With `agent.sandbox: on` a missing layer
   ends the process with code 5.
3. Serve until SIGTERM or until the life pipe of the supervisor ends. Exit codes as those of a worker.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from ipc import logs, mcp_servers, settings
from ipc.errors import ConfigError, MachineUnfit
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotTaken, kill_sandboxes, take_slot
from ipc.processes.paths import TOOLS, prepare_run_dir, prepare_tools_dir, remove_tree
from ipc.settings import Settings
from workers.tools import layers
from workers.tools.layers import ACTIVE, Layers
from workers.tools.processes import adopt_orphans, kill_orphans
from workers.tools.server import ToolServer

log = logging.getLogger(__name__)

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
