"""Puts a worker together and answers the endpoint: requests in, states out, the periodic tick, the drain.

`Pipeline` has everything that a request passes between the endpoint and the device, `Runtime` the rest of the worker.
Parts are made in the order in which they need one another: endpoint, context, models, pipeline, reports.

The endpoint's thread calls everything here except `_models_changed`, which the loading thread calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from functools import partial

from ipc import logs
from ipc.catalog.entries import Catalog
from ipc.errors import Draining
from ipc.memory.arena import Arena, LeaseTable
from ipc.metrics.registry import WorkerMetrics
from ipc.processes.liveness import lasting_thread, start_ticks
from ipc.processes.starting import Notifier
from ipc.settings import Settings
from ipc.wire.messages import VERSION, Credits, Leaving, Load, Models, Submit, Welcome
from workers.device import devices
from workers.endpoint.endpoint import Endpoint
from workers.endpoint.sessions import Session
from workers.inputs import ClientMemory
from workers.lifecycle.models import ModelTable
from workers.reports import Reporter, Statistics
from workers.scheduling.context import Context
from workers.scheduling.executor import Executor
from workers.scheduling.intake import Intake, Rooms
from workers.scheduling.preparing import Preparer
from workers.strategies import Kinds

log = logging.getLogger(__name__)

EXIT_HUNG = 70
_STRANGER = b""
"""Stands for a session that has none yet."""


class Pipeline:
    """Intake, preparing, queue, device, and what waits beside the queue."""

    def __init__(self, context: Context, models: ModelTable, device: devices.Device) -> None:
        self.context = context
        self.executor = Executor(context, models.touch)
        self.kinds = Kinds(context, models.unload_idle)
        self.memory = ClientMemory(
            context.settings, device.torch, on_room=partial(context.endpoint.post, self.released)
        )
        self.rooms = Rooms(context)
        preparer = Preparer(context, self.rooms.find_room)
        self.intake = Intake(context, self.rooms, preparer, models, self.memory, self.kinds.of, self._is_idle)

    def _is_idle(self) -> bool:
        return self.executor.idle

    @property
    def idle(self) -> bool:
        """Whether no job is open and the device has nothing to do."""
        return not len(self.context.jobs) and self.executor.idle

    def close(self) -> None:
        """Take nothing more, and close what models have begun."""
        self.kinds.streams.cancel_all()
        self.context.queue.close()
        self.intake.preparer.close()
        self.executor.join()

    def cancel(self, session: bytes, request: int) -> None:
        """Cancel a request whose caller has gone. Idempotent."""
        job = self.context.jobs.find(session, request)
        if job is None:
            return
        stage = "running" if job.first_run_ns else "queued"
        waiting = self.context.jobs.cancel(job)
        unspent = job.cost if stage == "queued" else job.cost * waiting // len(job.prepared)
        self.context.metrics.cancelled.labels(job.model, stage).inc()
        self.context.metrics.saved.labels(job.model, stage).inc(
            unspent * self.context.queue.paces.per_token_s(job.model)
        )

    def taken(self, session: bytes, request: int, count: int) -> None:
        """A frontend has taken so many parts of a stream, or bytes of generated text."""
        job = self.context.jobs.find(session, request)
        if job is not None:
            job.strategy.taken(job, count)

    def released(self) -> None:
        """A lease ended: there may be room for waiting jobs, and for parts of streams."""
        if len(self.context.line):
            self.rooms.fail_late()
            self.intake.retry()
            self.kinds.streams.wake_roomless()

    def tick(self) -> None:
        """Ten times a second: deadlines, and what waits."""
        # NOTE: first, since the error of a waiting job that is late says what the job lacked.
        self.rooms.fail_late()
        self.context.jobs.expire()
        for model, count in self.kinds.sequences.expire():
            self.context.metrics.sequences_expired.labels(model, self.context.metrics.worker).inc(count)
        self.released()
        self.memory.tick()


class Runtime:
    """One worker process, apart from its start and its end."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        slot: int,
        arena: Arena,
        device: devices.Device,
        metrics: WorkerMetrics,
    ) -> None:
        self._settings, self._arena, self._device = settings, arena, device
        self.endpoint = Endpoint(settings.paths, slot, LeaseTable(arena), self)
        with contextlib.ExitStack() as undone:
            undone.callback(self.endpoint.close)
            tokens = devices.batch_tokens(settings, device)
            self._context = Context.make(settings, metrics, arena, self.endpoint, tokens)
            self.models = ModelTable(catalog, slot, device, self._context, self._models_changed)
            self.pipeline = Pipeline(self._context, self.models, device)
            undone.pop_all()
        self.notifier = Notifier()
        self._reporter = Reporter(
            self._context, self.pipeline.executor, self.pipeline.kinds.sequences, self.models, device
        )
        self.statistics: Statistics = Statistics(
            self._context, self.pipeline.executor, self.models, self._reporter.monitor
        )
        self._draining_until = 0.0
        self._ticked = time.monotonic()
        self._ready_sent = self._stopping_sent = self._announcing = False

    def run(self) -> None:
        """Serve until a drain has ended."""
        self._context.counts.hold()
        self.pipeline.executor.start()
        self.models.start()
        self._models_changed()
        self._context.queue.gather_from_here()
        self.endpoint.run()
        self.models.close()
        self.pipeline.close()
        self._context.counts.flush()

    def drain(self) -> None:
        """Announce the end; stop when all jobs are done, or after `worker.drain_timeout_s`. Endpoint thread only."""
        if not self._draining_until:
            log.info(
                "draining: %d requests open, %d leases", len(self._context.jobs), self.endpoint.leases.leases
            )
            self._draining_until = time.monotonic() + self._settings.worker.drain_timeout_s
            self._notify_stopping()
            self.endpoint.broadcast(Leaving())

    @property
    def draining(self) -> bool:
        """Whether this worker takes nothing new."""
        return bool(self._draining_until)

    def welcome(self) -> Welcome:
        """Present state, for a new session."""
        # NOTE: frontends get changes as differences. A new session begins with the state that all others have.
        self._announce_models()
        return self.present()

    def present(self) -> Welcome:
        """Present state, for somebody without a session. Changes nothing."""
        return Welcome(
            VERSION,
            self._arena.epoch,
            os.getpid(),
            start_ticks(os.getpid()),
            str(self._arena.path),
            self._device.name,
            self._device.threads,
            self.models.told(),
            self._credits(_STRANGER)[_STRANGER],
            self.models.preloaded,
            self.models.free_bytes,
            self._device.uuid,
            lasting_thread(),
        )

    def want(self, message: Load) -> None:
        """Load a model, as a frontend asks."""
        if not self.draining:
            self.models.want(message.model, message.explicit)

    def unload(self, model: str) -> None:
        """Unload a model, as a frontend asks."""
        self.models.unload(model)

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in. Raises a `PenstockError` when it cannot be taken."""
        if self.draining:
            raise Draining("this worker is stopping", retry_after_s=1)
        self.pipeline.intake.submit(session, message, payload)

    def cancel(self, session: Session, request: int) -> None:
        """Cancel a request whose caller has gone. Idempotent."""
        session.outstanding.pop(request, None)
        self.pipeline.cancel(session.key, request)

    def taken(self, session: Session, request: int, count: int) -> None:
        """A frontend has taken so many parts of a stream, or bytes of generated text."""
        self.pipeline.taken(session.key, request, count)

    def released(self) -> None:
        """A lease ended, so there may be room in the arena."""
        self.pipeline.released()

    def tick(self) -> None:
        """Ten times a second: the pipeline, old leases, credits, watchdog, metrics, drain."""
        self.pipeline.tick()
        revoked = self.endpoint.leases.revoke_older(self._settings.arena.lease_max_age_s)
        if revoked:
            log.error("%d leases were older than arena.lease_max_age_s and were taken back", revoked)
        self._context.counts.flush()
        self._reporter.tick(revoked)
        self.statistics.tick()
        self._send_credits()
        activity, now = self._context.activity, time.monotonic()
        unseen_s, self._ticked = now - self._ticked, now
        if activity.overdue(unseen_s):
            running_s, limit_s = activity.running_s, activity.limit_s
            text = "the device thread hangs: a step runs for %.0f s, its batch may take %.0f s; this process ends"
            log.critical(text, running_s, limit_s)
            logs.flush()
            os._exit(EXIT_HUNG)
        self._notify()
        if self._draining_until:
            self._finish_drain()

    def turn_ended(self) -> None:
        """Wake the device once for all requests of this turn."""
        self._context.queue.wake()

    def _notify(self) -> None:
        if self.draining and not self._stopping_sent:
            self._notify_stopping()
        self.notifier.send(watchdog=1)
        if not self._ready_sent and self.models.preloaded:
            self._ready_sent = self.notifier.send(ready=1, status=self._reporter.models_ready())

    def _notify_stopping(self) -> None:
        self._stopping_sent = self.notifier.send(stopping=1, status="draining")

    def _finish_drain(self) -> None:
        # NOTE: in this order. The device thread posts the answers of a batch before it is idle, and wakes the endpoint
        # after that. The lease of an answer begins when the answer leaves.
        idle = self.pipeline.idle and not self.endpoint.has_posted and not self.endpoint.leases.leases
        quiet = self._stopping_sent and idle
        if quiet or time.monotonic() > self._draining_until:
            self.endpoint.stop()

    def _credits(self, *more: bytes) -> dict[bytes, Credits]:
        """What each session may send, and sessions with the keys `more`."""
        step_s = int(self._context.activity.running_s)
        return self._context.queue.credits([*(each.key for each in self.endpoint.sessions), *more], step_s)

    def _send_credits(self) -> None:
        """Tell each session what it may send, if that has changed."""
        credits = self._credits()
        for session in self.endpoint.sessions:
            state = _rounded(credits[session.key])
            if state != session.credits:
                session.credits = state
                self.endpoint.tell(session, credits[session.key])

    def _models_changed(self) -> None:
        """States of models changed; called from any thread. Changes until the endpoint's turn travel together."""
        if not self._announcing:
            self._announcing = True
            self.endpoint.post(self._announce_models)

    def _announce_models(self) -> None:
        self._announcing = False
        if (entries := self.models.entries.changes(self.models.catalog)) is not None:
            self.endpoint.broadcast(entries)
        changed, gone = self.models.changes()
        self._reporter.models(changed, gone)
        self.endpoint.broadcast(Models(changed, gone, self.models.preloaded, self.models.free_bytes))


def _rounded(credits: Credits) -> tuple[object, ...]:
    """Credits that differ by so little are not worth a message."""
    seconds = (credits.room_s, credits.wait_s, credits.bulk_room_s, credits.bulk_wait_s, credits.others_s)
    prices = [(model, f"{price:.1e}") for model, price in credits.prices.items()]
    return (
        *(round(each, 2) for each in seconds),
        int(credits.rate) // 64,
        credits.step_s,
        credits.floor,
        *prices,
    )
