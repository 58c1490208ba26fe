"""The worker's bounded queue: a lock around the batcher, the bound of what waits, and the paces of the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ipc.settings import Settings
from ipc.wire.messages import Credits
from workers.scheduling.batcher import Batcher, Room
from workers.scheduling.bound import Bound, DrainRate, Paces
from workers.scheduling.job import Batch, Job, Piece

WAKE_AFTER = 16
"""Jobs that a gathering thread puts before the device is woken all the same."""
_LONGEST_WAIT_S = 3600.0
"""The device thread looks again after so long, because a lock takes no arbitrary time."""


class WorkQueue:
    """Waiting jobs, shared by the endpoint, the preparing threads and the device thread."""

    def __init__(
        self, settings: Settings, batch_tokens: int = 2048, full_of: Callable[[str], int] | None = None
    ) -> None:
        """`batch_tokens` is what a batch of any model may hold, `full_of` what one of a model, by its name, holds."""
        self._batcher = Batcher(int(settings.batch.starve_after_s * 1e9), settings.batch.turn_s)
        self._lock = threading.Lock()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._asleep = False
        """Whether the device thread waits for the bell; whoever ends that rings once."""
        self._backlog = threading.Condition(self._lock)
        self._backlog_tokens = 0
        self._closed = False
        self._gatherer: int | None = None
        self._unseen = 0
        """Jobs that the gathering thread has put without waking the device."""
        self.rate = DrainRate()
        self.paces = Paces()
        self._bound = Bound(settings.queue, self.paces, batch_tokens, full_of)

    @property
    def limit(self) -> int:
        """Present bound of queries in tokens, for people: the bound itself is a time."""
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
        """A request that was admitted, and counted out while it rested, goes on."""
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
        """Whether prepared work of a model waits: a batch that has just been taken is full."""
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
        """What the calling thread puts from now on wakes the device at its next `wake`, or when several jobs wait."""
        # PERF: a device thread that wakes at the first request of many only fights this thread for the interpreter.
        self._gatherer = threading.get_ident()

    def wake(self) -> None:
        """Wake the device for what the gathering thread has put."""
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
        """A suspended batch, which goes on now whatever waits; None without any."""
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
        """Wait until a batch is due, `other` is true (see `nudge`), or `until_ns`; False when the queue closed.

        One thread at a time may wait.
        """
        while True:
            with self._lock:
                if self._closed or other():
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

    def wait_backlog(self, tokens: Callable[[], int], wanted: Callable[[], bool]) -> bool:
        """Wait until at least `tokens()` tokens wait and `wanted()` is true; False when the queue closed."""

        def due() -> bool:
            self._backlog_tokens = tokens()
            if self._closed or self._batcher.tokens < self._backlog_tokens or not wanted():
                return self._closed
            return self._batcher.due_tokens(time.monotonic_ns()) >= self._backlog_tokens

        with self._lock:
            self._backlog.wait_for(due)
            return not self._closed

    def remove(self, job: Job) -> int:
        """Drop what is still waiting of a job; returns the number of items."""
        with self._lock:
            return self._batcher.remove(job)

    def nudge(self) -> None:
        """Wake the device thread to look at something else than the queue."""
        with self._lock:
            self._ring()

    def device_busy(self) -> None:
        """The device thread begins a batch: a backlog may be formed into the next one."""
        with self._lock:
            if self._batcher.tokens >= self._backlog_tokens:
                self._backlog.notify()

    def close(self) -> None:
        """Make waiters return."""
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
