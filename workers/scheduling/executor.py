"""The device thread: gives the device to one batch after the other.

1. The thread takes the batch that was formed ahead, else forms a batch of the jobs that wait. Nothing waits on a timer.
2. While the device is busy and at least a full budget waits, a second thread forms and collates the next batch.
3. The requests of a batch are named in the arena's flight record while they have the device.
4. The strategy of its jobs runs a batch. Between two steps of a long batch the device may go to other work: the batch
   is suspended and waits in the queue like any other, with the same fairness.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import greenlet
import torch

from ipc.memory.arena import Arena
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from workers import foreign
from workers.device.oom import ModelBudgets
from workers.device.stepping import Activity, Turn, vital_thread
from workers.scheduling.batch_counts import BatchCounts, BatchLog
from workers.scheduling.batcher import UNKNOWN_PACE
from workers.scheduling.job import Batch, Job, Piece, collate
from workers.scheduling.queue import WorkQueue
from workers.scheduling.strategy import Strategy
from workers.scheduling.table import JobTable

CLOSE_S = 2.0


class Executor:
    """Owns the device thread."""

    def __init__(
        self,
        queue: WorkQueue,
        table: JobTable,
        arena: Arena,
        settings: Settings,
        budgets: ModelBudgets,
        metrics: WorkerMetrics,
        touch: Callable[[str], None] = lambda model: None,
    ) -> None:
        """`touch` takes the model of every batch. The owner sets `strategies` before `start`."""
        self._queue, self._table, self._arena = queue, table, arena
        self._settings, self._touch, self.budgets = settings, touch, budgets
        self.activity = Activity(settings.worker.hang_timeout_s)
        self.counts = BatchCounts(metrics)
        self.batches = BatchLog()
        self.strategies: tuple[Strategy, ...] = ()
        """The kinds of jobs that wait for something else than the device."""
        self.next = NextBatch(queue, table, budgets, settings.batch.max_items)
        self._turn: Turn | None = None
        self._ending = False
        """Whether suspended batches run to their end, so that a batch that lacks memory gets theirs."""
        self._turns: list[Turn] = []
        """Turns without a batch."""
        self._torch_threads = torch.get_num_threads()
        self._single_threaded = threading.Event()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads = [vital_thread("device", self._run), vital_thread("form-ahead", self._form_ahead)]

    def start(self) -> None:
        """Begin to take work."""
        for thread in reversed(self._threads):
            thread.start()

    def join(self) -> None:
        """Wait a while for the end of the device thread: when the queue is closed it closes what models have begun."""
        self._threads[0].join(CLOSE_S)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the device thread, before the next batch, for at most `worker.load_stall_s`."""
        future: Future[Any] = Future()
        self._calls.append((work, future))
        self._queue.nudge()
        return future

    @property
    def idle(self) -> bool:
        """Whether nothing runs, nothing is formed and nothing is suspended."""
        return not (self.activity.busy or self.next.ahead or self._queue.suspended)

    def _run(self) -> None:
        self._single_threaded.wait()
        torch.set_num_threads(self._torch_threads)
        with torch.inference_mode():
            while self._queue.wait_work(self._has_other_work, self._next_ns()):
                for strategy in self.strategies:
                    strategy.go_on()
                while self._calls:
                    self._run_call(*self._calls.popleft())
                batch = self.next.take()
                if batch is not None:
                    self.run_turn(batch)
                    # PERF: drop the references now, not when the next batch arrives.
                    del batch
            for strategy in self.strategies:
                strategy.close_ended()

    def _has_other_work(self) -> bool:
        changed = any(strategy.has_changed for strategy in self.strategies)
        return self.next.ahead or bool(self._calls) or changed

    def _next_ns(self) -> int | None:
        times = [at for strategy in self.strategies if (at := strategy.next_ns()) is not None]
        return min(times, default=None)

    def _run_call(self, work: Callable[[], Any], future: Future[Any]) -> None:
        self.activity.begin(self._settings.worker.load_stall_s)
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self.activity.end()

    def _form_ahead(self) -> None:
        def wanted() -> bool:
            return self.activity.busy and not self.next.ahead

        # PERF: a second OpenMP team in the process would make the device thread's team sleep between its steps.
        torch.set_num_threads(1)
        self._single_threaded.set()
        while self._queue.wait_backlog(lambda: self.budgets.smallest, wanted):
            self.next.form_ahead()
            self._queue.nudge()

    def run_turn(self, batch: Batch) -> None:
        """Give the device to a batch until the batch is done or makes way. `Turn.run` calls the strategy."""
        began = time.monotonic_ns()
        jobs = list({id(piece.job): piece.job for piece in batch.pieces}.values())
        first = jobs[0]
        self._arena.record_flight([(job.tag, job.id) for job in jobs])
        if batch.turn is None:
            self._touch(first.model)
            self._queue.begin(batch)
            for job in jobs:
                job.first_run_ns = job.first_run_ns or began
                job.batches += 1
            batch.turn = self._turns.pop() if self._turns else Turn()
            batch.turn.done = False
        else:
            batch.paused_ns += began - batch.suspended_ns
            self.activity.begin(batch.limit_s)
        self._turn = batch.turn
        # NOTE: an error that escapes here ends the process, and the flight record still has to name the suspects then.
        ran = batch.turn.switch(batch)
        self._turn = None
        ended = time.monotonic_ns()
        batch.limit_s = self.activity.limit_s
        self.activity.end()
        self._arena.record_flight([])
        seconds = (ended - began) / 1e9
        batch.seconds += seconds
        self._queue.settle_time(first, seconds - batch.predicted_s)
        batch.predicted_s = 0.0
        if batch.turn.done:
            self._turns.append(batch.turn)
            self._done(batch, jobs, ran)
        elif batch.lacks_memory:
            batch.suspended_ns, batch.lacks_memory = ended, False
            self._end_suspended()
            self.run_turn(batch)
        else:
            batch.suspended_ns = ended
            self._queue.suspend(batch)
        self._table.wake_endpoint()

    def make_way(self, batch: Batch) -> None:
        """Between two steps of a batch: suspend it if other work waits. Called by the turn of the batch."""
        adapter = batch.first.adapter
        if self._ending or self._turn is None or greenlet.getcurrent() is not self._turn:
            return
        if self._has_other_work() or self._queue.others_wait(adapter):
            self._turn.leave()

    def free_memory(self, batch: Batch) -> bool:
        """Let all suspended batches end, which gives their memory back; whether there were any.

        Called by the turn of a batch that does not fit beside them.
        """
        turn = self._turn
        if turn is None or greenlet.getcurrent() is not turn or not self._queue.suspended:
            return False
        batch.lacks_memory = True
        turn.leave()
        return True

    def _end_suspended(self) -> None:
        """Run all suspended batches to their end; none of them makes way meanwhile."""
        before, self._ending = self._ending, True
        try:
            while (batch := self._queue.any_suspended()) is not None:
                self.run_turn(batch)
        finally:
            self._ending = before

    def _done(self, batch: Batch, jobs: list[Job], ran: int) -> None:
        batch.turn = None
        strategy, model = jobs[0].strategy, jobs[0].model
        self._table.unclaim_pieces(batch.pieces)
        strategy.after(batch)
        self._queue.ran(batch, ran)
        budget = self.budgets.tokens_of(model)
        self.batches.note(model, len(batch.pieces), ran, budget, batch.seconds)
        if strategy.is_batch(batch):
            self.counts.note_batch(model, batch, budget)


class NextBatch:
    """Chooses what the device does next. `take` is the device thread's, `form_ahead` that of the thread beside it."""

    def __init__(self, queue: WorkQueue, table: JobTable, budgets: ModelBudgets, max_items: int) -> None:
        self._queue, self._table, self._budgets, self._max_items = queue, table, budgets, max_items
        self._lock = threading.Lock()
        self._ahead: Batch | None = None

    @property
    def ahead(self) -> bool:
        """Whether a batch was formed ahead."""
        return self._ahead is not None

    def form_ahead(self) -> None:
        """Form the batch after the one that runs."""
        with self._lock:
            if self._ahead is None:
                self._ahead = self._form()

    def take(self) -> Batch | None:
        """A suspended batch whose turn it is, the batch formed ahead, or one formed now.

        A query that came meanwhile passes the batch formed ahead, once.
        """
        with self._lock:
            ahead = self._ahead
            if self._queue.suspended:
                suspended = self._queue.resume_batch(ahead)
                if suspended is not None:
                    return suspended
                if ahead is not None and self._queue.holds(ahead.first.adapter):
                    return self._form()
            if ahead is None:
                return self._form()
            if not ahead.overtaken and self._queue.overtakes(ahead.pieces):
                ahead.overtaken = True
                if (batch := self._form()) is not None:
                    return batch
            self._ahead = None
            return ahead

    def _form(self) -> Batch | None:
        """A batch of what is taken now, as far as its jobs are still open."""
        taken = self._queue.take(self._budgets.configured, self._max_items, self._budgets.tokens_of)
        if not taken:
            return None
        pieces: list[Piece] = self._table.claim_pieces(taken)
        if not pieces:
            return None
        try:
            collated = collate(pieces)
        except BaseException as raised:
            # NOTE: the batch collates its pieces again, where an error can be answered.
            foreign.error_of(raised)
            collated = None
        tokens_per_s = self._queue.paces.tokens_per_s(pieces[0].job.model) or UNKNOWN_PACE
        predicted = tokens = sum([piece.prepared.cost for piece in taken])
        if len(pieces) < len(taken):
            tokens = sum([piece.prepared.cost for piece in pieces])
        full = self._queue.leaves(pieces[0].job.model)
        return Batch(pieces, collated, tokens, predicted / tokens_per_s, full)
