"""Takes requests in: makes jobs of them, reserves what they need, and passes them on to be prepared.

1. `submit` finds the model and its kind of job, refuses what cannot run, and counts the cost.
2. Room for copies of the client's memory and for the result is reserved before anything is computed. A job that lacks
   something waits in the one `WaitingLine`, and fails shortly before its deadline with what it lacks.
3. A job whose result size follows from its prepared items is prepared before its room is reserved (`find_room`).

Endpoint thread only, but for `find_room`. The reasons of `WaitingLine`:

| reason | the job lacks | looked at |
|---|---|---|
| SLOT | a slot of its model for its sequence, before it may hold room | when a lease ends, every tick |
| COPY | room for a private copy of its client's shared memory | the same |
| ROOM | room in the arena for its result | the same |
| PART | room in the arena for the next part of its answer | the same |
| PAUSE | time: its model asked to go on later | when the time has come |

Jobs of one reason keep their order. A job that ended meanwhile stays in the line until somebody takes jobs of its
reason.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ipc import deadline
from ipc.errors import ModelNotLoaded
from ipc.memory.arena import LeaseTable
from ipc.settings import Settings
from ipc.wire.messages import InferCall, Submit
from workers import operations
from workers.endpoint.sessions import Session
from workers.inputs import NOTHING, ClientMemory, Payload
from workers.operations import operation_of
from workers.scheduling import outputs
from workers.scheduling.job import Job
from workers.scheduling.preparing import Preparer, is_short
from workers.scheduling.queue import WorkQueue
from workers.scheduling.table import JobTable

FAIL_EARLY_NS = 250_000_000


class Reason(enum.Enum):
    """What a waiting job lacks."""

    SLOT = enum.auto()
    COPY = enum.auto()
    ROOM = enum.auto()
    PART = enum.auto()
    PAUSE = enum.auto()


class WaitingLine:
    """Any thread may call these."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # PERF: the device thread asks for pauses at every batch, and must not look at thousands of other jobs.
        self._lines: dict[Reason, dict[Job, int]] = {reason: {} for reason in Reason}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, job: Job, reason: Reason, until_ns: int = 0) -> None:
        """At the end; with PAUSE, until that instant."""
        with self._lock:
            self._lines[reason][job] = until_ns

    def has(self, reason: Reason) -> bool:
        """Whether some open job waits for this reason."""
        with self._lock:
            return any(job.state == "open" for job in self._lines[reason])

    def holds(self, job: Job) -> bool:
        """Whether the job waits here."""
        return any(job in line for line in self._lines.values())

    def jobs(self, *reasons: Reason) -> list[Job]:
        """The open jobs that wait for one of these reasons, reason after reason."""
        with self._lock:
            return [job for reason in reasons for job in self._lines[reason] if job.state == "open"]

    def take(self, reason: Reason) -> list[Job]:
        """The open jobs that wait for this reason, and out of the line with them."""
        return self._take(reason, None)

    def next_ns(self) -> int | None:
        """When the first pause of an open job ends; None without any."""
        if not self._lines[Reason.PAUSE]:
            return None
        with self._lock:
            ends = [until for job, until in self._lines[Reason.PAUSE].items() if job.state == "open"]
        return min(ends, default=None)

    def take_paused(self, now_ns: int) -> list[Job]:
        """The open jobs whose pause has ended, and out of the line with them."""
        return self._take(Reason.PAUSE, now_ns)

    def _take(self, reason: Reason, until_ns: int | None) -> list[Job]:
        line = self._lines[reason]
        if not line:
            return []
        with self._lock:
            taken = [job for job, until in line.items() if until_ns is None or until <= until_ns]
            gone = [job for job in line if job.state != "open"]
            for job in {*taken, *gone}:
                del line[job]
        return [job for job in taken if job.state == "open"]


_PLACES = (Reason.ROOM, Reason.COPY, Reason.SLOT)
"""In the order in which they are looked at: a job that has its copies goes before one that lacks them."""


class Served(Protocol):
    """A model that is served."""

    adapter: Any
    instance: Any


class Models(Protocol):
    """What intake asks of the table of models."""

    def find(self, name: str) -> Served | None:
        """The model of that name."""

    def touch(self, name: str) -> None:
        """The model is used now."""

    def require_lora(self, instance: Any, call: Any) -> None:
        """Raise while the LoRA adapter of a call is not loaded."""


class Intake:
    """From the endpoint to the queue."""

    def __init__(
        self,
        settings: Settings,
        queue: WorkQueue,
        table: JobTable,
        line: WaitingLine,
        leases: LeaseTable,
        models: Callable[[], Any],
        memory: ClientMemory | None,
        strategy_of: Callable[..., Any],
        is_idle: Callable[[], bool],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`models` gives `Models`; `post` runs a function in the endpoint's thread."""
        self._queue, self._table, self._line, self._leases = queue, table, line, leases
        self._models, self._memory, self._strategy_of = models, memory, strategy_of
        self._is_idle, self._post = is_idle, post
        self._inline_nbytes = settings.arena.inline_bytes
        self.preparer: Preparer

    def submit(self, session: Session, message: Submit, payload: memoryview) -> None:
        """Take a request in. Raises a `PenstockError` when it cannot be taken."""
        work = message.work
        models: Models = self._models()
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
        job.apart = message.apart
        # NOTE: two instances of a model may serve at the same time while a changed entry takes effect.
        job.group = (work.model, served.instance.serial, strategy.group(job))
        self.take_in(job)

    def take_in(self, job: Job) -> None:
        """Count a job, and send it on its way. Raises as `WorkQueue.admit`, `Strategy.admit` and `operations` do."""
        work = job.work
        self._queue.admit(job)
        try:
            job.strategy.admit(job)
        except BaseException:
            self._queue.settle(job)
            raise
        self._table.enter(job)
        try:
            self._send_on(job, planned=not operation_of(work.call).needs_prepared(work.call))
        except BaseException:
            self._table.cancel(job)
            raise

    def _send_on(self, job: Job, planned: bool) -> None:
        """`planned`: the size of the result is known before anything is prepared."""
        if planned:
            self._plan(job)
            if not job.strategy.has_place(job) and self._needs_room(job):
                self._line.add(job, Reason.SLOT)
                return
            if not self._reserve(job):
                return
        if operation_of(job.work.call).instant(job.work.call) or self._is_lone(job):
            # PERF: a lone short request gains a thread switch; nobody waits behind it in this thread.
            self.preparer.prepare_now(job)
        else:
            self.preparer.put(job)

    def _needs_room(self, job: Job) -> bool:
        return job.result_nbytes > self._inline_nbytes or job.payload.lacks_room

    def _is_lone(self, job: Job) -> bool:
        return len(self._table) == 1 and self._is_idle() and is_short(job.work.call)

    def _plan(self, job: Job) -> None:
        job.payload.plan(job.work.call)
        layout = operation_of(job.work.call).layout(job.adapter, job.work.call, job.prepared)
        outputs.plan(job, layout, self._leases)

    def find_room(self, job: Job) -> None:
        """All items are ready and the size of the result is known; called from a preparing thread."""
        self._post(lambda: self._find_room(job))

    def _find_room(self, job: Job) -> None:
        if job.state != "open":
            return
        try:
            self._plan(job)
        except BaseException as raised:
            self.preparer.fail(job, raised)
            return
        if self._reserve(job):
            self._queue.put(job, 0, len(job.prepared))

    def _reserve(self, job: Job) -> bool:
        """Reserve room for the inputs that a job copies, then for its outputs. Whether the job has both.

        A job that lacks room waits behind the jobs that lack room of the same kind.
        """
        waiting = len(self._line)
        if job.payload.lacks_room and (
            (waiting and self._line.has(Reason.COPY)) or not job.payload.reserve()
        ):
            self._line.add(job, Reason.COPY)
            return False
        queued = waiting and self._needs_room(job) and self._line.has(Reason.ROOM)
        output = None if queued else outputs.reserve(job, self._leases, self._inline_nbytes)
        if output is None:
            self._line.add(job, Reason.ROOM)
            return False
        self._table.attach(job, output)
        return True

    def fail_late(self) -> None:
        """Fail the waiting jobs that are nearly out of time, with what they lack."""
        soon = time.monotonic_ns() + FAIL_EARLY_NS
        for job in self._line.jobs(Reason.ROOM, Reason.COPY) if len(self._line) else ():
            if soon >= job.work.deadline_ns:
                lacks_room = job.payload.lacks_room
                self._table.fail(job, job.payload.exhausted() if lacks_room else outputs.exhausted(1.0))

    def retry(self) -> None:
        """Send waiting jobs on in their order, as far as there is what they lack."""
        for job in [job for reason in _PLACES for job in self._line.take(reason)]:
            if not job.strategy.has_place(job) and self._needs_room(job):
                self._line.add(job, Reason.SLOT)
            elif self._reserve(job):
                if job.prepared_items == len(job.prepared):
                    self._queue.put(job, 0, len(job.prepared))
                else:
                    self.preparer.put(job)
