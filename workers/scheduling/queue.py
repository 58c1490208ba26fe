"""Jobs that wait: in the queue for the device, in the waiting line for anything else.

`WorkQueue` is a lock around the batcher, the bound of what waits, and the paces of the device. The queue also has what
the device thread does between two batches: calls, and strategies that ask for it.

The reasons of `WaitingLine`:

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ipc.settings import Settings
from ipc.wire.messages import Credits
from workers.scheduling.batcher import Batcher, Room
from workers.scheduling.bound import Bound, DrainRate, Paces
from workers.scheduling.job import Batch, Job, Piece

WAKE_AFTER = 16
"""A gathering thread wakes the device after it has put so many jobs."""
_LONGEST_WAIT_S = 3600.0
"""The longest wait for the bell, in seconds: a lock refuses timeouts above its own bound."""


Call = tuple[Callable[[], Any], Future[Any]]
"""Work for the device thread, and where its result goes."""


class Asking(Protocol):
    """The part of a strategy that the queue calls."""

    def go_on(self) -> None:
        """End or resume the jobs of the strategy that have ended or can go on."""


class WorkQueue:
    """Jobs that wait for the device, shared by the endpoint, the preparing threads and the device thread."""

    def __init__(
        self, settings: Settings, batch_tokens: int = 2048, full_of: Callable[[str], int] | None = None
    ) -> None:
        """`batch_tokens` is what a batch of any model may hold, `full_of` what one of a model, by its name, holds."""
        self._batcher = Batcher(int(settings.batch.starve_after_s * 1e9), settings.batch.turn_s)
        self._lock = threading.Lock()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._asleep = False
        """Whether the device thread waits for the bell. The thread that takes this flag back rings once."""
        self._backlog = threading.Condition(self._lock)
        self._backlog_tokens = 0
        self._closed = False
        self._calls: deque[Call] = deque()
        self._asking: dict[Asking, None] = {}
        self._gatherer: int | None = None
        self._unseen = 0
        """Jobs that the gathering thread has put without waking the device."""
        self.rate = DrainRate()
        full_of = full_of or (lambda model: batch_tokens)
        self.paces = Paces(full_of)
        self._bound = Bound(settings.queue, self.paces, batch_tokens, full_of)

    @property
    def limit(self) -> int:
        """Present bound of queries in tokens, which people read; the bound itself is a time."""
        with self._lock:
            return self._bound.limit_tokens(self.rate.tokens_per_s)

    @property
    def admitted(self) -> int:
        """Tokens admitted and not begun."""
        return self._bound.tokens

    def admit(self, job: Job) -> None:
        """Count a request in. Raises `QueueFull` with the time until the queue has drained."""
        with self._lock:
            self._bound.admit(job)

    def settle(self, job: Job) -> None:
        """Count a request out."""
        with self._lock:
            self._bound.end(job)

    def count_in(self, job: Job) -> None:
        """Count an admitted request in again that was counted out while the request rested."""
        with self._lock:
            self._bound.begin(job)

    def correct(self, job: Job, cost: int) -> None:
        """The cost of an admitted request turned out to be `cost`."""
        with self._lock:
            job.cost = cost
            self._bound.change(job, max(0, cost - job.begun))

    def begin(self, batch: Batch) -> None:
        """The device begins a batch."""
        with self._lock:
            self._bound.run(batch)

    def ran(self, batch: Batch, tokens: int) -> None:
        """The device is done with a batch, of which so many tokens ran whole."""
        with self._lock:
            self._bound.ran()
            if tokens:
                # NOTE: what ended early or failed says nothing of the pace.
                self.paces.record(batch.first.model, tokens, batch.seconds, batch.full)
                if not batch.first.strategy.in_turns:
                    self.rate.record(tokens, batch.seconds)

    def credits(self, sessions: Iterable[bytes], step_s: int = 0) -> dict[bytes, Credits]:
        """What each session is told of the queue; the present step of the device runs for `step_s`."""
        keys = list(sessions)
        with self._lock:
            bound, rate = self._bound, self.rate.tokens_per_s
            rooms_s, bulk_rooms_s = bound.rooms("interactive", keys), bound.rooms("bulk", keys)
            wait_s, bulk_wait_s = bound.drain_s("interactive"), bound.drain_s("bulk")
            prices, floor = bound.prices(), bound.floor // max(1, len(keys))
            others_s = {key: bound.others_s(key) for key in keys}
        return {
            key: Credits(
                rooms_s[key],
                wait_s,
                rate,
                step_s,
                bulk_rooms_s[key],
                bulk_wait_s,
                others_s[key],
                prices,
                floor,
            )
            for key in keys
        }

    def leaves(self, model: str) -> bool:
        """Whether the batch that was taken last left prepared work of its model behind, so that the batch is full."""
        with self._lock:
            return self._batcher.holds_work(model)

    def put(self, job: Job, start: int, stop: int) -> None:
        """Prepared items `start` to `stop` of an open job wait for the device from now on, or first for their turn."""
        job.queued_ns = job.queued_ns or time.monotonic_ns()
        job.first_queued_ns = job.first_queued_ns or job.queued_ns
        if not job.strategy.arrive(job):
            return
        with self._lock:
            if job.state != "open":
                return
            self._batcher.add(job, start, stop)
            if threading.get_ident() == self._gatherer and self._unseen < WAKE_AFTER:
                self._unseen += 1
                return
            self._notify()

    def _notify(self) -> None:
        self._unseen = 0
        self._ring()
        # PERF: waking the thread that forms ahead for every request would cost more than the request.
        if self._batcher.tokens >= self._backlog_tokens:
            self._backlog.notify()

    def gather_from_here(self) -> None:
        """Jobs that the calling thread puts from now on wake the device at the next `wake`, or as `WAKE_AFTER` says."""
        # PERF: a device thread that wakes at the first request of many only fights this thread for the interpreter.
        self._gatherer = threading.get_ident()

    def wake(self) -> None:
        """Wake the device for the jobs that the gathering thread has put."""
        if self._unseen:
            with self._lock:
                self._notify()

    def take(
        self,
        max_tokens: int,
        max_items: int,
        room: Room | None = None,
    ) -> list[Piece]:
        """The next batch now; empty when nothing is due. See `Batcher.take`."""
        with self._lock:
            pace = self.paces.tokens_per_s
            return self._batcher.take(max_tokens, max_items, time.monotonic_ns(), pace, room)

    def put_again(self, job: Job) -> None:
        """An open job waits for another turn on the device, behind the others."""
        job.queued_ns = time.monotonic_ns()
        self.put(job, 0, len(job.prepared))

    def _ring(self) -> None:
        """Wake the device thread if the thread waits. With `_lock` held."""
        # PERF: one lock that is handed over costs a third of a condition variable, which makes a lock for each wait.
        if self._asleep:
            self._asleep = False
            self._bell.release()

    def suspend(self, batch: Batch) -> None:
        """A batch that made way for other work waits to go on; meanwhile nothing else of its adapter may run."""
        with self._lock:
            self._batcher.suspend(batch)
            self._ring()

    def resume_batch(self, ahead: Batch | None = None) -> Batch | None:
        """The suspended batch that goes on now, unless waiting work, or the batch formed `ahead`, comes first."""
        with self._lock:
            return self._batcher.resume(time.monotonic_ns(), ahead)

    def any_suspended(self) -> Batch | None:
        """A suspended batch, which goes on now whatever waits; None if no batch is suspended."""
        with self._lock:
            return self._batcher.any_suspended()

    def others_wait(self, adapter: object) -> bool:
        """Whether work of another adapter is due."""
        with self._lock:
            return self._batcher.others_wait(adapter, time.monotonic_ns())

    def holds(self, adapter: object) -> bool:
        """Whether nothing of this adapter may run, since a batch of it is suspended."""
        return self._batcher.holds(adapter)

    @property
    def suspended(self) -> bool:
        """Whether a batch is suspended."""
        return self._batcher.suspended

    @property
    def has_work(self) -> bool:
        """Whether anything waits for the device."""
        return bool(self._batcher.items) or self._batcher.suspended

    def settle_time(self, job: Job, seconds: float) -> None:
        """A batch with this job took `seconds` more (or less) of the device than its model's pace said."""
        with self._lock:
            self._batcher.settle(job, seconds)

    def overtakes(self, pieces: Sequence[Piece]) -> bool:
        """Whether waiting work should run before `pieces`, the batch that was taken last."""
        with self._lock:
            return self._batcher.overtakes(pieces)

    def wait_work(self, other: Callable[[], bool], until_ns: int | None = None) -> bool:
        """Wait until a batch is due, something else is, or `until_ns`; False when the queue closed.

        Something else is a call, a strategy that asks, or that `other` is true (see `nudge`).

        One thread at a time may wait.
        """
        while True:
            with self._lock:
                if self._closed or self.interrupted or other():
                    return not self._closed
                due = [at for at in (self._batcher.due_ns(), until_ns) if at is not None]
                left_s = (min(due) - time.monotonic_ns()) / 1e9 if due else -1
                if due and left_s <= 0:
                    return True
                self._asleep = True
            if not self._bell.acquire(timeout=min(left_s, _LONGEST_WAIT_S)):
                with self._lock:
                    if not self._asleep:
                        # The bell was rung after the time was up.
                        self._bell.acquire()
                    self._asleep = False

    def wait_backlog(self, tokens: Callable[[], int], may_form: Callable[[], bool]) -> bool:
        """Wait until at least `tokens()` tokens wait and `may_form()` is true; False when the queue closed."""

        def due() -> bool:
            self._backlog_tokens = tokens()
            if self._closed or self._batcher.tokens < self._backlog_tokens or not may_form():
                return self._closed
            return self._batcher.due_tokens(time.monotonic_ns()) >= self._backlog_tokens

        with self._lock:
            self._backlog.wait_for(due)
            return not self._closed

    def remove(self, job: Job) -> int:
        """Drop the waiting items of a job; returns their number."""
        with self._lock:
            return self._batcher.remove(job)

    def nudge(self) -> None:
        """Wake the device thread to look at something else than the queue."""
        with self._lock:
            self._ring()

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the device thread, before the next batch, for at most `worker.load_stall_s`."""
        future: Future[Any] = Future()
        self._calls.append((work, future))
        self.nudge()
        return future

    def take_calls(self) -> list[Call]:
        """The calls that wait now. Calls that come meanwhile wait for the batch behind. Device thread only."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def ask(self, strategy: Asking) -> None:
        """Have the device thread call `strategy.go_on` before the next batch."""
        with self._lock:
            self._asking[strategy] = None
            self._ring()

    def take_asking(self) -> list[Asking]:
        """The strategies that have asked since the last call. Device thread only."""
        if not self._asking:
            return []
        with self._lock:
            asking, self._asking = list(self._asking), {}
        return asking

    @property
    def interrupted(self) -> bool:
        """Whether the device thread has something to do before the next batch."""
        return bool(self._calls or self._asking)

    def device_busy(self) -> None:
        """The device thread begins a batch: a backlog may be formed into the next one."""
        with self._lock:
            if self._batcher.tokens >= self._backlog_tokens:
                self._backlog.notify()

    def close(self) -> None:
        """End all waits: `wait_work` and `wait_backlog` return False from now on."""
        with self._lock:
            self._closed = True
            self._ring()
            self._backlog.notify_all()

    def snapshot(self) -> list[tuple[str, str, int, int, float]]:
        """(model, lane, items, tokens, age of the oldest in seconds) per group and lane."""
        now = time.monotonic_ns()
        with self._lock:
            return [
                (model, name, lane.items, lane.tokens, (now - (lane.oldest_ns() or now)) / 1e9)
                for model, name, lane in self._batcher.lanes()
            ]


class Reason(enum.Enum):
    """The thing for which a job waits outside of the queue."""

    SLOT = enum.auto()
    COPY = enum.auto()
    ROOM = enum.auto()
    PART = enum.auto()
    PAUSE = enum.auto()


class WaitingLine:
    """Jobs that wait for anything but the device. Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # PERF: the device thread asks for pauses at every batch, and must not look at thousands of other jobs.
        self._lines: dict[Reason, dict[Job, int]] = {reason: {} for reason in Reason}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, job: Job, reason: Reason, until_ns: int = 0) -> None:
        """Put a job at the end of the line of a reason; with PAUSE, until the instant `until_ns`."""
        with self._lock:
            self._lines[reason][job] = until_ns

    def has(self, reason: Reason) -> bool:
        """Whether some open job waits for this reason."""
        with self._lock:
            return any(job.state == "open" for job in self._lines[reason])

    def holds(self, job: Job) -> bool:
        """Whether the job is in this line, for any reason."""
        return any(job in line for line in self._lines.values())

    def jobs(self, *reasons: Reason) -> list[Job]:
        """The open jobs that wait for one of these reasons, reason after reason."""
        with self._lock:
            return [job for reason in reasons for job in self._lines[reason] if job.state == "open"]

    def take(self, reason: Reason) -> list[Job]:
        """Remove and return the open jobs that wait for this reason."""
        return self._take(reason, None)

    def next_ns(self) -> int | None:
        """When the first pause of an open job ends; None if no open job pauses."""
        if not self._lines[Reason.PAUSE]:
            return None
        with self._lock:
            ends = [until for job, until in self._lines[Reason.PAUSE].items() if job.state == "open"]
        return min(ends, default=None)

    def take_paused(self, now_ns: int) -> list[Job]:
        """Remove and return the open jobs whose pause has ended."""
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
