"""Start and end of the bridge of a box.

1. Settings, logging, slot lock; sweep the arena of an earlier life.
2. Join the workers of this host as a frontend does, under a name of its own, and the brokers.
3. Serve until SIGTERM or SIGINT, then drain. Exit codes as those of a worker.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

import uvloop

from frontend.bridge.bridge import Bridge
from frontend.bridge.meter import Meter
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.server.drain import Drain
from ipc import brokers, logs, settings, sweep
from ipc.catalog.reading import read_served
from ipc.errors import ConfigError
from ipc.logs import Seldom
from ipc.metrics import registry as metrics
from ipc.metrics.cluster import BridgeMetrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotTaken, take_slot
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Settings
from ipc.store.store import Store
from ipc.store.wishes import Wishes

log = logging.getLogger(__name__)

NAME = "bridge-0"
EXIT_CONFIG = 3
EXIT_BUG = 70
BEAT_EVERY_S = 0.5


def main() -> int:
    """Run the bridge; returns the exit code."""
    try:
        config = settings.load()
        logs.configure(config.log, NAME)
        processes.title("bridge")
        if not config.cluster.on:
            raise ConfigError("cluster.urls: expected the brokers that the bridge shall join, got none")
        brokers.check(config)
        prepare_run_dir(config.paths)
        with take_slot(config.paths.lock(NAME)):
            sweep.sweep_inputs(config.paths, NAME)
            metrics.configure(config.paths, NAME)
            try:
                uvloop.run(_serve(config))
            finally:
                metrics.retire(config.paths, NAME)
    except (ConfigError, SlotTaken) as error:
        if logging.getLogger().handlers:
            log.critical("%s", error.message)
        else:
            sys.stderr.write(f"bridge: {error.message}\n")
        return EXIT_CONFIG
    except Exception:
        log.exception("the bridge ends on an unexpected error")
        return EXIT_BUG
    finally:
        logs.flush()
    return 0


def _readable(wishes: Wishes) -> Callable[[str], bool | None]:
    """`Wishes.loaded`; nothing is wished while the rows cannot be read."""
    seldom = Seldom(log)

    def loaded(model: str) -> bool | None:
        try:
            return wishes.loaded(model)
        except OSError as error:
            seldom.warning("which models were loaded by name cannot be read", str(error.strerror))
            return None

    return loaded


async def _serve(config: Settings) -> None:
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    catalog = read_served(config.catalog, config.repository, added=config.configured_dirs)
    store = Store(config.paths)
    client = Client(config.paths, config, NAME, store)
    engine = LocalEngine(config, catalog, client, Drain())
    families = BridgeMetrics()
    families.touch(catalog)
    families.tally.follow(loop)
    bridge = Bridge(
        config, engine, engine.directory, Meter(families, engine.directory.catalog), client.poison
    )
    client.start()
    client.demand.replicas = engine.directory.replicas
    if config.repository.control != "none":
        bridge.versions.wished = _readable(Wishes(config.paths, store))
    client.demand.known = bridge.versions.may_be_loaded
    client.workers.follow = engine.directory.follow
    bridge.on_refusal = stopping.set
    bridge.begin()
    log.info("box %s begins, life %s", bridge.box, bridge.life)
    notifier = processes.Notifier()
    notifier.send(ready=1)
    processes.collect_seldom()
    while not stopping.is_set():
        status = "joined a broker" if bridge.broker.up else "no broker can be reached"
        has = f"{bridge.items} items, {bridge.intake.kept} answers kept"
        notifier.send(watchdog=1, status=f"{status}, {has}")
        try:
            async with asyncio.timeout(BEAT_EVERY_S):
                await stopping.wait()
        except TimeoutError:
            continue
    notifier.send(stopping=1)
    await bridge.drain()
    await client.close()
    store.close()
    if bridge.refusal:
        raise ConfigError(bridge.refusal)
