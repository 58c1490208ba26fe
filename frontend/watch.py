"""What a frontend does twice a second: tell whether it is ready, and see whether its supervisor lives.

1. Readiness, joined workers and memory go into metrics, and to systemd.
2. A frontend without a supervisor ends after `SUPERVISOR_GRACE_S`, so that the server ends as a unit.
3. The start-up block is printed when the frontend is ready for the first time.
"""

from __future__ import annotations

import asyncio
import logging
import os

from frontend.arbiter import announce
from frontend.services import Services
from ipc import logs
from ipc.memory import copies
from ipc.metrics import registry as metrics
from ipc.processes.liveness import is_held
from ipc.processes.notify import Notifier

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.5
SUPERVISOR_GRACE_S = 5.0
EXIT_UNSUPERVISED = 3


class Watch:
    """The watch of one frontend; `run` is a task that ends by being cancelled."""

    def __init__(self, services: Services, families: metrics.FrontendMetrics) -> None:
        self._services, self._metrics = services, families
        self._notifier = Notifier(os.environ.get("PENSTOCK_NOTIFY_SOCKET", ""))
        self._told = self._announced = False
        self._copied = copies.Reported()
        self._unsupervised_s = 0.0

    async def run(self) -> None:
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
        self._follow()
        if ready and not self._told:
            self._told = self._notifier.send(ready=1)
        self._notifier.send(watchdog=1, status=announce.summary(self._services) if ready else why)
        if supervised:
            await self._check_supervisor()
        if ready and not self._announced:
            announce.started(self._services)
            self._announced = True

    def _follow(self) -> None:
        """Follow what operators changed at other frontends. State that cannot be read must not end the watch."""
        try:
            self._services.extensions.apply()
        except OSError as error:
            log.error("what other frontends changed cannot be followed: %s", error)

    async def _check_supervisor(self) -> None:
        held = await asyncio.to_thread(is_held, self._services.settings.paths.lock("supervisor"))
        self._unsupervised_s = 0.0 if held else self._unsupervised_s + WATCH_EVERY_S
        if self._unsupervised_s > SUPERVISOR_GRACE_S and not self._services.drain.draining:
            log.critical("the supervisor is gone; this server stops")
            logs.flush()
            os._exit(EXIT_UNSUPERVISED)

    def _report(self, ready: bool) -> None:
        self._metrics.ready.set(ready)
        name = f"frontend-{self._services.slot}"
        self._metrics.input_shm_used.labels(name).set(self._services.inference.inputs.used_nbytes)
        self._copied.report(self._metrics.copied, name)
        for worker in self._services.directory.workers():
            self._metrics.workers_joined.labels(f"worker-{worker.slot}").set(worker.responsive)
