"""Puts a worker together and answers the endpoint: requests in, states out, the periodic tick, the drain.

The endpoint's thread calls everything here except `_models_changed`, which the loading thread calls.
"""

from __future__ import annotations

import logging
import os
import time

from ipc import deadline, logs
from ipc.catalog.entries import Catalog
from ipc.errors import Draining, ModelNotLoaded, PenstockError, Unsupported
from ipc.memory.arena import Arena
from ipc.memory.leases import LeaseTable
from ipc.metrics.registry import WorkerMetrics
from ipc.processes.liveness import start_ticks
from ipc.processes.notify import Notifier
from ipc.settings import Settings
from ipc.wire.messages import (
    LANES,
    VERSION,
    Credits,
    InferCall,
    Leaving,
    Load,
    Models,
    Submit,
    Welcome,
)
from ipc.wire.streams import PartFlow, PartsConsumed
from workers import operations
from workers.device import devices, oom
from workers.device.executor import Executor
from workers.endpoint.endpoint import Endpoint
from workers.endpoint.sessions import Session
from workers.lifecycle.models import ModelTable
from workers.memory import outputs
from workers.memory.client_regions import ClientMemory
from workers.memory.payload import NOTHING, Payload
from workers.operations import operation_of
from workers.reporting import tracing
from workers.reporting.reporter import Reporter
from workers.reporting.statistics import Statistics
from workers.scheduling.chunks import is_short
from workers.scheduling.job import Job
from workers.scheduling.jobs import JobBook
from workers.scheduling.preparing import Preparer
from workers.scheduling.queue import WorkQueue
from workers.strategies.streamed import Streamed

log = logging.getLogger(__name__)

EXIT_HUNG = 70
PARK_MARGIN_NS = 250_000_000


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
        self.leases = LeaseTable(arena)
        self.queue = WorkQueue(settings)
        self.book = JobBook(self.queue, lambda: self.endpoint)
        tokens = devices.batch_tokens(settings, device)
        budgets = oom.ModelBudgets(tokens, lambda *of: self.models.batch_tokens(*of))
        self.executor = Executor(
            self.queue,
            self.book,
            arena,
            settings,
            budgets,
            metrics,
            lambda model: self.models.touch(model),
            lambda model, wait_s: self.models.unload_idle(model, wait_s),
        )
        self.models = ModelTable(
            catalog,
            settings,
            slot,
            device,
            lambda work: self.executor.call(work).result(),
            self._models_changed,
            self.book,
            metrics,
        )
        self.preparer = Preparer(
            self.queue,
            self.book,
            arena,
            settings.worker.prepare_threads,
            settings.limits.max_chunked_tokens,
            self._prepared,
        )
        self._client_memory = ClientMemory(
            settings, device.torch, on_room=lambda: self.endpoint.post(self.released)
        )
        self.endpoint = Endpoint(settings.paths, slot, self.leases, self)
        self.notifier = Notifier()
        self._reporter = Reporter(self, metrics, device)
        self._statistics = Statistics(self, self._reporter.monitor, self.executor.batches)
        self._metrics = metrics
        self._uncopied: list[Job] = []
        self._parked: list[Job] = []
        self._slotless: list[Job] = []
        self._draining_until = 0.0
        self._last_credits: tuple[int, ...] | None = None
        self._ready_sent = self._stopping_sent = self._announcing = False

    def run(self) -> None:
        """Serve until a drain has ended."""
        self.executor.start()
        self.models.start()
        self._models_changed()
        self.endpoint.run()
        self.book.cancel_streams()
        self.models.close()
        self.queue.close()
        self.preparer.close()
        self.executor.join()

    def drain(self) -> None:
        """Announce the end; stop when all is done, or after `worker.drain_timeout_s`. Endpoint thread only."""
        if not self._draining_until:
            log.info("draining: %d requests open, %d leases", len(self.book), self.leases.leases)
            self._draining_until = time.monotonic() + self._settings.worker.drain_timeout_s
            self._notify_stopping()
            self.endpoint.broadcast(Leaving())

    @property
    def draining(self) -> bool:
        """Whether this worker takes nothing new."""
        return bool(self._draining_until)

    def welcome(self) -> Welcome:
        """Present state, for a new session."""
        # NOTE: changes are told as differences, and those of a new session begin where those of all others are.
        self._announce_models()
        return Welcome(
            VERSION,
            self._arena.epoch,
            os.getpid(),
            start_ticks(os.getpid()),
            str(self._arena.path),
            self._device.name,
            self._device.threads,
            self.models.told(),
            self._credits(),
            self.models.preloaded,
            self.models.free_bytes,
            self._device.uuid,
        )

    def load(self, message: Load) -> None:
        """A frontend wants a model."""
        if not self.draining:
            self.models.load(message.model, message.explicit)

    def unload(self, model: str) -> None:
        """Somebody wants a model's memory back."""
        self.models.unload(model)

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in. Raises a `PenstockError` when it cannot be taken."""
        work = message.work
        host = self.models.find(work.model)
        adapter = host.adapter if host is not None else None
        if host is None or adapter is None:
            raise ModelNotLoaded(f"Model '{work.model}' is not loaded", retry_after_s=5)
        deadline.check(work.waits_until_ns, "on the way to the worker")
        if self.draining:
            raise Draining("this worker is stopping", retry_after_s=1)
        streams = adapter.streams
        if streams != bool(work.parts):
            # The model may have changed since the frontend looked at its configuration.
            gives = "any number of responses" if streams else "one response, and no stream,"
            raise Unsupported(f"Model '{work.model}' gives {gives} to a request")
        operations.check(adapter, work.call)
        if work.call.lora:
            self.models.require_lora(host.instance, work.call)
        if streams:
            self.book.check_resting(self._settings.queue.max_resting_streams)
        self.models.touch(work.model)
        lane = work.lane if work.lane in LANES else "interactive"
        self.queue.admit(work.cost, lane, work.caller, work.share)
        job = Job(
            session.key,
            session.tag,
            message.id,
            work.model,
            work.call,
            work.deadline_ns,
            work.request_id,
            message.solo,
            work.cost,
            Payload(payload, self._client_memory) if isinstance(work.call, InferCall) else NOTHING,
        )
        # Two instances of a model may serve at the same time while a changed entry takes effect.
        alike = None if streams else operations.group_of(adapter, work.call)
        job.adapter, job.group = adapter, (work.model, host.instance.serial, alike)
        job.gathering, job.batch_tokens = adapter.gathering, adapter.batch_tokens
        job.lane, job.caller, job.share = lane, work.caller, work.share
        if streams:
            job.stream = Streamed(PartFlow(work.parts))
        job.start_by_ns = work.start_by_ns
        job.trace = tracing.begin(work.traceparent)
        count = len(work.call.items)
        job.prepared, job.open_items = [None] * count, count  # type: ignore[list-item]
        try:
            self.queue.sequencer.enrol(job)
        except PenstockError:
            self.queue.settle(job.cost, lane, job.caller)
            raise
        self.book.open(job)
        self._place(job)

    def _place(self, job: Job) -> None:
        """Reserve output space and send the job to the preparing threads, or park it until there is space."""
        try:
            self._pass_on(job, known=not operation_of(job.call).needs_prepared(job.call))
        except Exception:
            self.book.cancel(job)
            raise

    def _pass_on(self, job: Job, known: bool) -> None:
        """`known`: the size of the result is, before anything is prepared."""
        if known:
            self._plan(job)
        if known and self._must_wait_for_slot(job):
            self._slotless.append(job)
        elif known and not self._reserve(job):
            return
        elif operation_of(job.call).instant(job.call) or self._is_lone(job):
            # PERF: a lone short request gains a thread switch; nobody waits behind it in this thread.
            self.preparer.prepare_now(job)
        else:
            self.preparer.put(job)

    def _must_wait_for_slot(self, job: Job) -> bool:
        """Whether a job would hold room in the arena that the sequences before its own need to come to their end."""
        return self._needs_room(job) and not self.queue.sequencer.has_slot(job)

    def _needs_room(self, job: Job) -> bool:
        return job.result_nbytes > self._settings.arena.inline_bytes or job.payload.lacks_room

    def _is_lone(self, job: Job) -> bool:
        return len(self.book) == 1 and self.executor.idle and is_short(job.call)

    def _plan(self, job: Job) -> None:
        job.payload.plan(job.call)
        outputs.plan(job, operation_of(job.call).layout(job.adapter, job.call, job.prepared), self.leases)

    def _prepared(self, job: Job) -> None:
        """All items are ready and the size of the result is known; called from a preparing thread."""
        self.endpoint.post(lambda: self._place_prepared(job))

    def _place_prepared(self, job: Job) -> None:
        if job.state != "open":
            return
        try:
            self._plan(job)
        except PenstockError as error:
            self.book.fail(job, error)
            return
        if self._reserve(job):
            self.queue.put(job, 0, len(job.prepared))

    def _reserve(self, job: Job) -> bool:
        """Room for what a job copies, then for what it writes; without, it waits behind others that lack the same."""
        if job.payload.lacks_room and (self._uncopied or not job.payload.reserve()):
            self._uncopied.append(job)
            return False
        queued = self._parked and self._needs_room(job)
        output = None if queued else outputs.reserve(job, self.leases, self._settings.arena.inline_bytes)
        if output is None:
            self._parked.append(job)
            return False
        self.book.attach(job, output)
        return True

    def _fail_parked(self) -> None:
        """Fail the parked jobs that are out of time, with what they lack."""
        soon = time.monotonic_ns() + PARK_MARGIN_NS
        for job in [*self._parked, *self._uncopied]:
            if job.state == "open" and soon >= job.deadline_ns:
                lacks_room = job.payload.lacks_room
                self.book.fail(job, job.payload.exhausted() if lacks_room else outputs.exhausted(1.0))

    def _unpark(self) -> None:
        """Place parked jobs in order, as far as there is room; forget ended ones."""
        waiting = [*self._parked, *self._uncopied]
        self._parked, self._uncopied = [], []
        for job in [*waiting, *self._admit_slotless()]:
            if job.state != "open" or not self._reserve(job):
                continue
            if job.prepared_items == len(job.prepared):
                self.queue.put(job, 0, len(job.prepared))
            else:
                self.preparer.put(job)

    def _admit_slotless(self) -> list[Job]:
        """Jobs whose sequence has a slot by now."""
        waiting, self._slotless = [job for job in self._slotless if job.state == "open"], []
        admitted: list[Job] = []
        for job in waiting:
            (admitted if self.queue.sequencer.has_slot(job) else self._slotless).append(job)
        return admitted

    def cancel(self, session: Session, request: int) -> None:
        """The caller of a request has gone. Idempotent."""
        session.outstanding.pop(request, None)
        job = self.book.find(session.key, request)
        if job is None:
            return
        stage = "running" if job.first_run_ns else "queued"
        waiting = self.book.cancel(job)
        unspent = job.cost if stage == "queued" else job.cost * waiting // len(job.prepared)
        self._metrics.cancelled.labels(job.model, stage).inc()
        self._metrics.saved.labels(job.model, stage).inc(self.queue.rate.seconds_for(unspent))

    def taken(self, session: Session, message: PartsConsumed) -> None:
        """A frontend has taken parts of a stream."""
        job = self.book.find(session.key, message.id)
        if job is not None:
            self.book.taken(job, message.count)

    def _expire_sequences(self) -> None:
        for model, count, outcome in self.queue.sequencer.expire():
            self._metrics.sequences_expired.labels(model, self._metrics.worker).inc(count)
            self.book.follow(outcome)

    def released(self) -> None:
        """A lease ended: there may be room for parked jobs, and for parts of streams."""
        if self._parked or self._uncopied or self._slotless:
            self._fail_parked()
            self._unpark()
        self.book.wake_roomless()

    def tick(self) -> None:
        """Ten times a second: deadlines, parked jobs, old leases, credits, watchdog, metrics, drain."""
        # A parked job that is late is told what it lacked, and not only that it was late.
        self._fail_parked()
        self.book.expire()
        self.book.wake_roomless()
        self._expire_sequences()
        self._unpark()
        revoked = self.leases.revoke_older(self._settings.arena.lease_max_age_s)
        if revoked:
            log.error("%d leases were older than arena.lease_max_age_s and were taken back", revoked)
        self._reporter.tick(revoked)
        self._statistics.tick()
        self._client_memory.tick()
        self._send_credits()
        if self.executor.activity.overdue():
            running_s, limit_s = self.executor.activity.running_s, self.executor.activity.limit_s
            text = "the device thread hangs: a step runs for %.0f s, its batch may take %.0f s; this process ends"
            log.critical(text, running_s, limit_s)
            logs.flush()
            os._exit(EXIT_HUNG)
        self._notify()
        if self._draining_until:
            self._finish_drain()

    def _notify(self) -> None:
        if self.draining and not self._stopping_sent:
            self._notify_stopping()
        self.notifier.send(watchdog=1)
        if not self._ready_sent and self.models.preloaded:
            states = [status.state for status in self.models.statuses()]
            status = f"{states.count('loaded')}/{len(states)} models ready"
            self._ready_sent = self.notifier.send(ready=1, status=status)

    def _notify_stopping(self) -> None:
        self._stopping_sent = self.notifier.send(stopping=1, status="draining")

    def _finish_drain(self) -> None:
        quiet = self._stopping_sent and not len(self.book) and self.executor.idle and not self.leases.leases
        if quiet or time.monotonic() > self._draining_until:
            self.endpoint.stop()

    def _credits(self) -> Credits:
        limit = self.queue.limit // max(1, len(self.endpoint.sessions))
        step_s = int(self.executor.activity.running_s)
        return Credits(limit, self.queue.admitted, self.queue.rate.tokens_per_s, step_s)

    def _send_credits(self) -> None:
        credits = self._credits()
        sessions = len(self.endpoint.sessions)
        rate = int(credits.rate) // 64
        state = (credits.limit // 1024, credits.queued // 256, rate, credits.step_s, sessions)
        if state != self._last_credits:
            self._last_credits = state
            self.endpoint.broadcast(credits)

    def _models_changed(self) -> None:
        """States of models changed; called from any thread. What changes until the endpoint's turn is told at once."""
        if not self._announcing:
            self._announcing = True
            self.endpoint.post(self._announce_models)

    def _announce_models(self) -> None:
        self._announcing = False
        changed, gone = self.models.changes()
        self._reporter.models(changed, gone)
        self.endpoint.broadcast(Models(changed, gone, self.models.preloaded, self.models.free_bytes))
