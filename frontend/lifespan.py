"""The life of one frontend, after the fork, on the event loop.

1. Start: take the lowest free frontend slot, bind metrics and logging to the slot, make the services, start the client
   (which finds the workers) and the watch. Workers that are up already tell their models before the first request.
2. Twice a second the watch writes readiness, joined workers and memory into metrics and to systemd. A frontend without
   a supervisor ends after `SUPERVISOR_GRACE_S`, so that the server ends as a unit. The first frontend that is ready
   prints the start-up block, and so does the first that learns that no model of the start could be loaded.
3. Every ten seconds one frontend adds a point to the history of the last hour (`frontend.status.history`).
4. End: say goodbye to the workers, give the slot back.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from frontend import announce, assembly
from frontend.protocols.registry import grpc_services
from frontend.services import Services
from frontend.status.history import Keeper
from ipc import logs, sweep, version
from ipc.memory import copies
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotLock, lowest_free_slot
from ipc.processes.paths import prepare_run_dir
from ipc.processes.starting import Notifier

if TYPE_CHECKING:
    from frontend.grpc.server import GrpcServer

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
SUPERVISOR_GRACE_S = 5.0
EXIT_UNSUPERVISED = 3
GC_THRESHOLDS = 10_000, 20, 20


class Watch:
    """The watch of one frontend; `run` is a task that ends when it is cancelled."""

    def __init__(self, services: Services, families: metrics.FrontendMetrics) -> None:
        self._services, self._metrics = services, families
        self._notifier = Notifier(os.environ.get("PENSTOCK_NOTIFY_SOCKET", ""))
        self._told = False
        self._announced = set[bool]()
        """Start-up blocks that are out: true for that of a ready server, false for that of a failed start."""
        self._copied = copies.Reported()
        self._unsupervised_s = 0.0

    async def run(self) -> None:
        """Look twice a second. A full disk or a lack of descriptors costs one look, never the watch."""
        supervised = os.environ.get("PENSTOCK_SUPERVISE", "1") != "0"
        while True:
            try:
                await self._look(supervised)
            except OSError as error:
                log.error("watching this frontend failed: %s", error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look(self, supervised: bool) -> None:
        """Report readiness, check the supervisor, and print the block last, since printing may fail."""
        ready, why = self._services.engine.ready()
        self._report(ready)
        self._follow()
        if ready and not self._told:
            self._told = self._notifier.send(ready=1)
        if not self._services.drain.draining:
            self._notifier.send(watchdog=1, status=announce.summary(self._services) if ready else why)
        if supervised:
            await self._check_supervisor()
        if announce.is_over(ready, why) and ready not in self._announced:
            announce.started(self._services, ready=ready)
            self._announced.add(ready)

    def _follow(self) -> None:
        """Follow changes that operators made at other frontends. Unreadable state must not end the watch."""
        try:
            self._services.extensions.apply()
        except OSError as error:
            log.error("changes of other frontends cannot be read: %s", error)

    async def _check_supervisor(self) -> None:
        alive = await self._services.engine.is_kept_alive()
        self._unsupervised_s = 0.0 if alive else self._unsupervised_s + WATCH_EVERY_S
        if self._unsupervised_s > SUPERVISOR_GRACE_S and not self._services.drain.draining:
            log.critical("the supervisor is gone; this server stops")
            logs.flush()
            os._exit(EXIT_UNSUPERVISED)

    def _report(self, ready: bool) -> None:
        self._metrics.ready.set(ready)
        if ready and True not in self._announced:
            # The models of repositories are known now, since a worker has told them.
            self._metrics.touch_models(self._services.catalog)
        name = f"frontend-{self._services.slot}"
        self._metrics.input_shm_used.labels(name).set(self._services.inference.inputs.used_nbytes)
        self._copied.report(self._metrics.copied, name)
        for worker in self._services.directory.workers():
            self._metrics.workers_joined.labels(worker.name).set(worker.responsive)


class Lifespan:
    """Falcon's lifespan hooks of one frontend."""

    def __init__(self, services: Services, behind: Callable[[Services], assembly.Backend]) -> None:
        """`behind` makes the engine of the frontend."""
        self._services, self._behind = services, behind
        self._lock: SlotLock | None = None
        self._leave: Callable[[], Awaitable[None]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper: Keeper | None = None
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
        self._leave = assembly.assemble(services, self._metrics, self._behind)
        await services.extensions.control.begin()
        self._grpc = await _start_grpc(services)
        watch = Watch(services, self._metrics)
        self._keeper = Keeper(settings.paths, services.directory.workers)
        self._tasks = [asyncio.get_running_loop().create_task(run()) for run in (watch.run, self._keeper.run)]
        # PERF: modules and the application are never garbage, and nearly all objects of a request end without the
        # collector. So the collector looks at new objects only, and seldom.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    async def process_shutdown(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        """Give everything back, once the work without requests has ended."""
        log.info("no requests are open; this frontend ends")
        if self._grpc is not None:
            await self._grpc.stop()
        await self._services.background.end(self._services.drain)
        for task in self._tasks:
            task.cancel()
        if self._keeper is not None:
            self._keeper.close()
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
    """The gRPC server, if enabled. A process without a gRPC server does not import its library."""
    if not services.settings.grpc.enabled:
        return None
    from frontend.grpc.server import GrpcServer

    server = GrpcServer(services, grpc_services(services))
    await server.start()
    return server
