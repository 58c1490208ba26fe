"""Start and end of one frontend: what must happen after the fork, on the event loop.

1. Take the lowest free frontend slot; bind metrics and logging to it.
2. Make the services; start the client, which finds the workers, the watch, and following of the catalog.
3. At the end: say goodbye to the workers, give the slot back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from frontend import assembly
from frontend.protocols.registry import grpc_services
from frontend.services import Services
from frontend.watch import Watch
from ipc import logs, version
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes import sweep
from ipc.processes.liveness import SlotLock, lowest_free_slot
from ipc.processes.paths import prepare_run_dir

if TYPE_CHECKING:
    from frontend.grpc.server import GrpcServer

log = logging.getLogger(__name__)


class Lifespan:
    """Falcon's lifespan hooks of one frontend."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock: SlotLock | None = None
        self._leave: Callable[[], Awaitable[None]] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._metrics: metrics.FrontendMetrics | None = None
        self._grpc: GrpcServer | None = None

    async def process_startup(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        """Fill in the services."""
        services, settings = self._services, self._services.settings
        prepare_run_dir(settings.paths)
        services.slot, self._lock = lowest_free_slot(settings.paths.root, "frontend")
        sweep.sweep_frontend(settings.paths, services.slot)
        name = f"frontend-{services.slot}"
        logs.configure(settings.log, name)
        processes.title(f"frontend {services.slot}")
        metrics.configure(settings.paths, name)
        self._metrics = metrics.FrontendMetrics()
        self._metrics.touch(services.catalog, settings.worker_count, version.VERSION)
        self._metrics.touch_keys(entry.name for entry in services.access.entries)
        services.access.meter.use_row(services.slot)
        self._metrics.tally.follow(asyncio.get_running_loop())
        self._leave = assembly.assemble(services, self._metrics)
        await services.follower.catch_up()
        self._grpc = await _start_grpc(services)
        watch = Watch(services, self._metrics)
        self._watcher = asyncio.get_running_loop().create_task(watch.run())
        if settings.catalog.watch:
            self._follower = asyncio.get_running_loop().create_task(services.follower.run())

    async def process_shutdown(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        """Give everything back."""
        log.info("no requests are open; this frontend ends")
        if self._grpc is not None:
            await self._grpc.stop()
        for task in (self._watcher, self._follower):
            if task is not None:
                task.cancel()
        if self._leave is not None:
            await self._leave()
        await asyncio.to_thread(self._services.finisher.close)
        if self._metrics is not None:
            self._metrics.tally.flush()
            metrics.retire(self._services.settings.paths, f"frontend-{self._services.slot}")
        if self._services.store is not None:
            self._services.store.close()
        if self._lock is not None:
            self._lock.release()
        logs.flush()


async def _start_grpc(services: Services) -> GrpcServer | None:
    """The gRPC server, where there is one. Its library is not imported in processes that do without."""
    if not services.settings.grpc.enabled:
        return None
    from frontend.grpc.server import GrpcServer

    server = GrpcServer(services, grpc_services(services))
    await server.start()
    return server
