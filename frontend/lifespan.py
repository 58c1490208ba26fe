"""Start and end of one frontend: what must happen after the fork, on the event loop.

1. Take the lowest free frontend slot; bind metrics and logging to it.
2. Start the client, which finds the workers; watch the supervisor; announce readiness.
3. At the end: say goodbye to the workers, give the slot back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from frontend.arbiter import announce
from frontend.engine.answer import CopyBudget
from frontend.engine.catalog_following import CatalogFollower
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.engine.recording import Recorder
from frontend.http.bodies import BodyReader
from frontend.protocols.registry import grpc_services
from frontend.services import Services
from frontend.status.recent import RecentWriter, ring_path
from frontend.tensors import extensions
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from frontend.tensors.uploading import InputMemory
from frontend.tracing import starting
from ipc import logs, version
from ipc.memory import copies
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes import sweep
from ipc.processes.liveness import SlotLock, is_held, lowest_free_slot
from ipc.processes.notify import Notifier
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.store.store import Store

if TYPE_CHECKING:
    from frontend.grpc.server import GrpcServer

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
SUPERVISOR_GRACE_S = 5.0
EXIT_UNSUPERVISED = 3


class Lifespan:
    """Falcon's lifespan hooks of one frontend."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock: SlotLock | None = None
        self._client: Client | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._metrics: metrics.FrontendMetrics | None = None
        self._notifier = Notifier(os.environ.get("PENSTOCK_NOTIFY_SOCKET", ""))
        self._grpc: GrpcServer | None = None
        self._told = self._announced = False
        self._copied = copies.Reported()
        self._unsupervised_s = 0.0

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
        services.recorder = Recorder(self._metrics, services.catalog)
        services.copies = CopyBudget(settings.arena.copy_out_bytes)
        services.store = Store(settings.paths)
        client = Client(
            settings.paths,
            settings,
            name,
            on_retry=services.recorder.retried,
            copies=services.copies,
            store=services.store,
        )
        engine = LocalEngine(settings, services.catalog, client, services.recorder, services.drain)
        self._client = client
        services.engine, services.directory = engine, engine.directory
        services.recent = _open_ring(settings.paths, name)
        services.tracer = starting.start(settings, name, services.recorder.traced)
        services.extensions = extensions.make(services, self._metrics)
        services.models = TensorModels(engine.directory, settings, services.extensions.control.mark)
        services.bodies = BodyReader(settings.limits)
        services.inputs = InputMemory(client.inputs, services.bodies, settings)
        services.inference = TensorInference(
            engine, services.models, services.inputs, services.extensions.regions, settings
        )
        client.start()
        services.started = True
        client.demand.replicas = engine.directory.replicas
        client.demand.known = services.models.version_states.may_be_loaded
        services.follower = CatalogFollower(
            settings, services.catalog, services.store, engine.directory.is_loaded
        )
        await services.follower.catch_up()
        self._grpc = await _start_grpc(services)
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
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
        if self._client is not None:
            await self._client.close()
        if self._services.tracer is not None:
            await asyncio.to_thread(self._services.tracer.close)
        if self._services.recent is not None:
            self._services.recent.close()
            self._services.recent = None
        if self._metrics is not None:
            self._metrics.tally.flush()
            metrics.retire(self._services.settings.paths, f"frontend-{self._services.slot}")
        if self._services.store is not None:
            self._services.store.close()
        if self._lock is not None:
            self._lock.release()
        logs.flush()

    async def _watch(self) -> None:
        """Twice a second: one look; a full disk or a lack of descriptors costs that look and not the watch."""
        supervised = os.environ.get("PENSTOCK_SUPERVISE", "1") != "0"
        while True:
            try:
                await self._look(supervised)
            except OSError as error:
                log.error("watching this frontend failed: %s", error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look(self, supervised: bool) -> None:
        """Readiness into metrics and to systemd; the supervisor's life; last the block, whose writing may fail."""
        ready, why = self._services.engine.ready()
        self._report(ready)
        self._services.extensions.apply()
        if ready and not self._told:
            self._told = self._notifier.send(ready=1)
        self._notifier.send(watchdog=1, status=announce.summary(self._services) if ready else why)
        if supervised:
            await self._check_supervisor()
        if ready and not self._announced:
            announce.started(self._services)
            self._announced = True

    async def _check_supervisor(self) -> None:
        held = await asyncio.to_thread(is_held, self._services.settings.paths.lock("supervisor"))
        self._unsupervised_s = 0.0 if held else self._unsupervised_s + WATCH_EVERY_S
        if self._unsupervised_s > SUPERVISOR_GRACE_S and not self._services.drain.draining:
            log.critical("the supervisor is gone; this server stops")
            logs.flush()
            os._exit(EXIT_UNSUPERVISED)

    def _report(self, ready: bool) -> None:
        assert self._metrics is not None and self._client is not None
        self._metrics.ready.set(ready)
        name = f"frontend-{self._services.slot}"
        self._metrics.input_shm_used.labels(name).set(self._client.inputs.used_nbytes)
        self._copied.report(self._metrics.copied, name)
        for channel in self._client.channels:
            self._metrics.workers_joined.labels(f"worker-{channel.slot}").set(channel.responsive)


async def _start_grpc(services: Services) -> GrpcServer | None:
    """The gRPC server, where there is one. Its library is not imported in processes that do without."""
    if not services.settings.grpc.enabled:
        return None
    from frontend.grpc.server import GrpcServer

    server = GrpcServer(services, grpc_services(services))
    await server.start()
    return server


def _open_ring(paths: RunPaths, name: str) -> RecentWriter | None:
    """The ring of recent requests; without room for it the server serves all the same."""
    try:
        return RecentWriter(ring_path(paths, name))
    except OSError as error:
        log.error("recent requests are not kept: %s", error)
        return None
