"""Takes requests in: makes jobs of them, reserves what they need, and passes them on to be prepared.

1. `Intake.submit` finds the model and its kind of job, refuses what cannot run, and counts the cost.
2. `Rooms` reserves room for copies of the client's memory and for the result before anything is computed. A job that
   lacks something waits in the `WaitingLine`, and fails shortly before its deadline with what it lacks.
3. A job whose result size follows from its prepared items is prepared before its room is reserved (`find_room`).

Endpoint thread only, but for `find_room`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ipc import deadline
from ipc.errors import ModelNotLoaded
from ipc.wire.messages import InferCall, Submit
from workers import operations
from workers.endpoint.sessions import Session
from workers.inputs import NOTHING, ClientMemory, Payload
from workers.operations import operation_of
from workers.scheduling.context import Context
from workers.scheduling.job import Job
from workers.scheduling.outputs import arena_full, plan_output, reserve_output
from workers.scheduling.preparing import Preparer, fail_unready, is_short, place_of_endpoint
from workers.scheduling.queue import Reason

FAIL_EARLY_NS = 250_000_000


_PLACES = (Reason.ROOM, Reason.COPY, Reason.SLOT)
"""Reasons for which a job waits for room, in the order of `retry`: a job that has its copies goes first."""


class Served(Protocol):
    """A model of the table, with the adapter that answers its requests."""

    @property
    def adapter(self) -> Any:
        """The loaded adapter; None while no adapter serves the model."""

    @property
    def instance(self) -> Any:
        """The instance with the weights, which several models may share."""


class Models(Protocol):
    """The part of the table of models that intake needs."""

    def find(self, name: str) -> Served | None:
        """The model of that name."""

    def touch(self, name: str) -> None:
        """Note that a request uses the model now: the model used longest ago is unloaded first."""

    def require_lora(self, instance: Any, call: Any) -> None:
        """Raise while the LoRA adapter of a call is not loaded."""


class Rooms:
    """Reserves memory for the inputs that jobs copy and the results that jobs write, in the order of the jobs."""

    def __init__(self, context: Context) -> None:
        self._context, self._line, self._leases = context, context.line, context.endpoint.leases
        self._inline_nbytes = context.settings.arena.inline_bytes

    def plan(self, job: Job) -> None:
        """Note the sizes of what a job copies and writes. Raises `InvalidInput` for sizes that never fit."""
        job.payload.plan(job.work.call)
        layout = operation_of(job.work.call).layout(job.adapter, job.work.call, job.prepared)
        plan_output(job, layout, self._leases)

    def reserve(self, job: Job) -> bool:
        """Reserve room for the inputs that a job copies, then for its outputs. Whether the job has both.

        A job that lacks room waits behind the jobs that lack room of the same kind. A job without a slot waits first.
        """
        if not job.strategy.has_place(job) and self._is_needed(job):
            self._line.add(job, Reason.SLOT)
            return False
        waiting = len(self._line)
        if job.payload.lacks_room and (
            (waiting and self._line.has(Reason.COPY)) or not job.payload.reserve()
        ):
            self._line.add(job, Reason.COPY)
            return False
        queued = waiting and self._is_needed(job) and self._line.has(Reason.ROOM)
        output = None if queued else reserve_output(job, self._leases, self._inline_nbytes)
        if output is None:
            self._line.add(job, Reason.ROOM)
            return False
        self._context.jobs.attach(job, output)
        return True

    def _is_needed(self, job: Job) -> bool:
        return job.result_nbytes > self._inline_nbytes or job.payload.lacks_room

    def find_room(self, job: Job) -> None:
        """All items are ready and the size of the result is known; called from a preparing thread."""
        self._context.endpoint.post(partial(self._find_room, job))

    def _find_room(self, job: Job) -> None:
        if job.state != "open":
            return
        try:
            self.plan(job)
        except BaseException as raised:
            fail_unready(self._context.jobs, job, raised)
            return
        if self.reserve(job):
            self._context.queue.put(job, 0, len(job.prepared))

    def fail_late(self) -> None:
        """Fail the waiting jobs that are nearly out of time, with what they lack."""
        soon = time.monotonic_ns() + FAIL_EARLY_NS
        for job in self._line.jobs(Reason.ROOM, Reason.COPY) if len(self._line) else ():
            if soon >= job.work.deadline_ns:
                lacks_room = job.payload.lacks_room
                error = job.payload.exhausted() if lacks_room else arena_full(1.0)
                self._context.jobs.fail(job, error)

    def retry(self) -> list[Job]:
        """Reserve room for waiting jobs in their order, as far as there is room; returns those that have room now."""
        waiting = [job for reason in _PLACES for job in self._line.take(reason)]
        return [job for job in waiting if self.reserve(job)]


class Intake:
    """The way of a request from the endpoint to the preparing threads or to the queue."""

    def __init__(
        self,
        context: Context,
        rooms: Rooms,
        preparer: Preparer,
        models: Models,
        memory: ClientMemory,
        strategy_of: Callable[..., Any],
        is_idle: Callable[[], bool],
    ) -> None:
        """`is_idle` says whether the device has nothing to do."""
        self._context, self._rooms, self.preparer = context, rooms, preparer
        self._models, self._memory, self._strategy_of, self._is_idle = models, memory, strategy_of, is_idle
        self._name = partial(context.arena.record_preparing, place_of_endpoint(context.settings))

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in. Raises a `PenstockError` when it cannot be taken."""
        # NOTE: code of the model's adapter may end the process, and the flight record has to name the suspect then.
        self._name(session.tag, message.id)
        try:
            job = self._job_of(session, message, payload)
        finally:
            self._name(0, 0)
        self.take_in(job)

    def _job_of(self, session: Session, message: Submit, payload: memoryview) -> Job:
        """The job of a request that fits its model. Raises as `submit`."""
        work, models = message.work, self._models
        served = models.find(work.model)
        adapter = None if served is None else served.adapter
        if served is None or adapter is None:
            raise ModelNotLoaded(f"Model '{work.model}' is not loaded", retry_after_s=5)
        deadline.check(work.waits_until_ns, "on the way to the worker")
        strategy = self._strategy_of(adapter, on_device=operation_of(work.call).on_device)
        strategy.check(work)
        operations.check(adapter, work.call)
        if work.call.lora:
            models.require_lora(served.instance, work.call)
        models.touch(work.model)
        raw = Payload(payload, self._memory) if isinstance(work.call, InferCall) else NOTHING
        job = Job(session.key, session.tag, message.id, work, adapter, strategy, message.solo, raw)
        job.apart, job.written = message.apart, message.written
        # NOTE: two instances of a model may serve at the same time while a changed entry takes effect.
        job.group = (work.model, served.instance.serial, strategy.group(job))
        return job

    def take_in(self, job: Job) -> None:
        """Count a job, and send it on its way. Raises as `WorkQueue.admit`, `Strategy.admit` and `operations` do."""
        work = job.work
        self._context.queue.admit(job)
        try:
            job.strategy.admit(job)
        except BaseException:
            self._context.queue.settle(job)
            raise
        self._context.jobs.enter(job)
        try:
            self._send_on(job, planned=not operation_of(work.call).needs_prepared(work.call))
        except BaseException:
            self._context.jobs.cancel(job)
            raise

    def _send_on(self, job: Job, planned: bool) -> None:
        """Have a job prepared; room is reserved before if the size of the result is known (`planned`)."""
        if planned:
            self._rooms.plan(job)
            if not self._rooms.reserve(job):
                return
        if operation_of(job.work.call).instant(job.work.call) or self._is_lone(job):
            # PERF: a lone short request gains a thread switch; nobody waits behind it in this thread.
            self.preparer.prepare_now(job)
        else:
            self.preparer.put(job)

    def _is_lone(self, job: Job) -> bool:
        return len(self._context.jobs) == 1 and self._is_idle() and is_short(job.work.call)

    def retry(self) -> None:
        """Send waiting jobs on in their order, as far as there is what they lack."""
        for job in self._rooms.retry():
            if job.prepared_items == len(job.prepared):
                self._context.queue.put(job, 0, len(job.prepared))
            else:
                self.preparer.put(job)
