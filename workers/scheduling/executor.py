"""The device thread: gives the device to one batch after the other.

1. The thread takes the batch that was formed ahead, else forms a batch of the jobs that wait. Nothing waits on a timer.
2. While the device is busy and at least a full budget waits, a second thread forms and collates the next batch.
3. The requests of a batch are named in the arena's flight record while the batch is collated, and while they have the
   device.
4. The strategy of its jobs runs a batch. Between two steps of a long batch the device may go to other work: the batch
   is suspended and waits in the queue like any other, with the same fairness.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import greenlet
import torch

from workers import foreign
from workers.device import oom
from workers.device.stepping import Turn, vital_thread
from workers.scheduling.batcher import UNKNOWN_PACE
from workers.scheduling.bound import ModelBudgets
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, BatchLog, Job, Piece, collate
from workers.scheduling.job_table import JobTable
from workers.scheduling.queue import Call, WorkQueue

CLOSE_S = 2.0


class Executor:
    """Runs the device thread: batches, calls, and strategies that ask for the thread."""

    def __init__(self, context: Context, touch: Callable[[str], None]) -> None:
        """`touch` takes the model of every batch."""
        self._context, self._touch = context, touch
        self._queue, self._jobs, self._activity = context.queue, context.jobs, context.activity
        self.batches = BatchLog()
        self.next = NextBatch(
            context.queue,
            context.jobs,
            context.budgets,
            context.settings.batch.max_items,
            context.arena.record_forming,
        )
        self._running: Batch | None = None
        self._ending = False
        """Whether suspended batches run to their end, so that a batch that lacks memory gets theirs."""
        self._turns: list[Turn] = []
        """Turns without a batch."""
        self._torch_threads = torch.get_num_threads()
        self._single_threaded = threading.Event()
        self._threads = [vital_thread("device", self._run), vital_thread("form-ahead", self._form_ahead)]

    def start(self) -> None:
        """Start the device thread and the thread that forms batches ahead."""
        for thread in reversed(self._threads):
            thread.start()

    def join(self) -> None:
        """Wait `CLOSE_S` at most for the end of the device thread, which first closes the begun steps of models."""
        self._threads[0].join(CLOSE_S)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, nothing is formed and nothing is suspended."""
        return not (self._activity.busy or self.next.ahead or self._queue.suspended)

    def _run(self) -> None:
        self._single_threaded.wait()
        torch.set_num_threads(self._torch_threads)
        with torch.inference_mode():
            while self._queue.wait_work(self._has_formed, self._context.line.next_ns()):
                self._between_batches()
                batch = self.next.take()
                if batch is not None:
                    self.run_turn(batch)
                    # PERF: drop the references now, not when the next batch arrives.
                    del batch
            for strategy in self._queue.take_asking():
                strategy.go_on()

    def _has_formed(self) -> bool:
        return self.next.ahead

    def _between_batches(self) -> None:
        """Jobs whose pause has ended, strategies that ask for the device thread, and calls."""
        for job in self._context.line.take_paused(time.monotonic_ns()):
            job.strategy.resume(job)
        for strategy in self._queue.take_asking():
            strategy.go_on()
        for call in self._queue.take_calls():
            self._run_call(call)

    def _run_call(self, call: Call) -> None:
        work, future = call
        self._activity.begin(self._context.settings.worker.load_stall_s)
        try:
            future.set_result(work())
        except BaseException as error:
            oom.end_if_broken(error)
            future.set_exception(error)
        finally:
            self._activity.end()

    def _form_ahead(self) -> None:
        def may_form() -> bool:
            return self._activity.busy and not self.next.ahead

        # PERF: a second OpenMP team in the process would make the device thread's team sleep between its steps.
        torch.set_num_threads(1)
        self._single_threaded.set()
        while self._queue.wait_backlog(lambda: self._context.budgets.smallest, may_form):
            self.next.form_ahead()
            self._queue.nudge()

    def run_turn(self, batch: Batch) -> None:
        """Give the device to a batch until the batch is done or makes way. `Turn.run` calls the strategy."""
        began = time.monotonic_ns()
        jobs = list({id(piece.job): piece.job for piece in batch.pieces}.values())
        first = jobs[0]
        self._context.arena.record_flight([(job.tag, job.id) for job in jobs])
        if batch.turn is None:
            self._touch(first.model)
            self._queue.begin(batch)
            for job in jobs:
                job.first_run_ns = job.first_run_ns or began
                job.batches += 1
            batch.turn = self._turns.pop() if self._turns else Turn(self.make_way, self.free_memory)
            batch.turn.done = False
        else:
            batch.paused_ns += began - batch.suspended_ns
            self._activity.begin(batch.limit_s)
        self._running = batch
        # NOTE: an error that escapes here ends the process, and the flight record still has to name the suspects then.
        ran = batch.turn.switch(batch)
        self._running = None
        ended = time.monotonic_ns()
        batch.limit_s = self._activity.limit_s
        self._activity.end()
        self._context.arena.record_flight([])
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
        self._jobs.wake_endpoint()

    def make_way(self) -> None:
        """Between two steps of the batch that runs: suspend the batch if other work waits. Called by its turn."""
        batch = self._running
        if self._ending or batch is None or greenlet.getcurrent() is not batch.turn:
            return
        if self.next.ahead or self._queue.interrupted or self._queue.others_wait(batch.first.adapter):
            batch.turn.leave()

    def free_memory(self) -> bool:
        """Run all suspended batches to their end, which frees their memory; returns whether there were any.

        Called by the turn of a batch that does not fit beside them.
        """
        batch = self._running
        if batch is None or greenlet.getcurrent() is not batch.turn or not self._queue.suspended:
            return False
        batch.lacks_memory = True
        batch.turn.leave()
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
        self._jobs.unclaim_pieces(batch.pieces)
        strategy.after(batch)
        self._queue.ran(batch, ran)
        budget = self._context.budgets.tokens_of(model)
        self.batches.note(model, len(batch.pieces), ran, budget, batch.seconds)
        if strategy.is_batch(batch):
            self._context.counts.note_batch(model, batch, budget)


class NextBatch:
    """Chooses the next batch. The device thread calls `take`, the thread beside calls `form_ahead`."""

    def __init__(
        self,
        queue: WorkQueue,
        table: JobTable,
        budgets: ModelBudgets,
        max_items: int,
        record_forming: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        """`record_forming` names the requests of a batch in the flight record."""
        self._queue, self._table, self._budgets, self._max_items = queue, table, budgets, max_items
        self._record_forming = record_forming
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
        """A suspended batch whose turn has come, the batch formed ahead, or a batch formed now.

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
        """Take pieces out of the queue; a batch of the pieces whose jobs are still open."""
        taken = self._queue.take(self._budgets.configured, self._max_items, self._budgets.tokens_of)
        if not taken:
            return None
        pieces: list[Piece] = self._table.claim_pieces(taken)
        if not pieces:
            return None
        self._record_forming([(piece.job.tag, piece.job.id) for piece in pieces])
        try:
            collated = collate(pieces)
        except BaseException as raised:
            # NOTE: the batch collates its pieces again, where an error can be answered.
            foreign.error_of(raised)
            collated = None
        self._record_forming([])
        tokens_per_s = self._queue.paces.tokens_per_s(pieces[0].job.model) or UNKNOWN_PACE
        predicted = tokens = sum([piece.prepared.cost for piece in taken])
        if len(pieces) < len(taken):
            tokens = sum([piece.prepared.cost for piece in pieces])
        full = self._queue.leaves(pieces[0].job.model)
        return Batch(pieces, collated, tokens, predicted / tokens_per_s, full)
