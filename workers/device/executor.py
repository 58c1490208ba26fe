"""The device thread: takes a batch, runs it, writes the rows into place, and takes the next.

1. A batch formed ahead is taken if there is one; otherwise what waits is taken now. Nothing waits on a timer.
2. While the device is busy and at least a full budget waits, a second thread forms and collates the next batch.
3. The requests of a batch are named in the arena's flight record before it starts.
4. A batch that fails is split in halves until the guilty item stands alone; memory trouble also shrinks the budget. A
   batch of a model that keeps state fails as a whole.
5. A poisoned device context ends the process: nothing runs on it again.
6. Between the steps of a long batch (`stepping`) one short batch of queries of other models may run (`Interlude`).
7. A request that is answered in parts runs alone, for a few steps at a time (`Generations`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ipc import logs
from ipc.errors import DeadlineExceeded, PenstockError
from ipc.memory.arena import Arena
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Settings
from ipc.wire.messages import ItemError
from workers.adapters.base import ItemFailure
from workers.device import oom
from workers.device.threads import EXIT_BUG, vital_thread
from workers.device.watchdog import Activity, batch_limit_s
from workers.memory import outputs
from workers.memory.named_outputs import Placer
from workers.operations import operation_of
from workers.reporting import tracing
from workers.reporting.batch_metrics import BatchMetrics
from workers.reporting.executions import Executions
from workers.reporting.statistics import BatchLog
from workers.scheduling.forming import Batch, Former, collate
from workers.scheduling.job import Piece
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import DrainRate, WorkQueue
from workers.strategies import stepping
from workers.strategies.interlude import LONGEST_S, Flight, Interlude
from workers.strategies.stream import Generations

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST = 4
CLOSE_S = 2.0


class Executor:
    """Owns the device thread."""

    def __init__(
        self,
        queue: WorkQueue,
        book: JobBook,
        arena: Arena,
        settings: Settings,
        budgets: oom.ModelBudgets,
        metrics: WorkerMetrics,
        touch: Callable[[str], None] = lambda model: None,
        unload_idle: Callable[[str, float], bool] = lambda model, wait_s: False,
    ) -> None:
        """`touch` is told of the model of every batch; `unload_idle` is that of `oom.Relief`."""
        self._queue, self._book, self._arena = queue, book, arena
        self._settings, self._touch = settings, touch
        # NOTE: steps of one model take milliseconds or seconds; nothing that is known of it tells which comes next.
        self._step_limit_s = batch_limit_s(settings.worker.hang_timeout_s, 0.0)
        self.budgets = budgets
        self._recoveries, self._relief = oom.RecoveryCounts(metrics), oom.Relief(unload_idle)
        self._executions, self._batch_metrics = Executions(metrics), BatchMetrics(metrics)
        self._placer = Placer(book, settings.arena.inline_bytes)
        self.activity = Activity(settings.worker.hang_timeout_s)
        self._interlude = Interlude()
        self._ran = 0
        """Tokens of the batch that runs whose passes came to their end."""
        self._generations = Generations(
            book, self._placer, self._executions, self.activity, queue.rate, self._record_flight
        )
        self.batches = BatchLog()
        self._rates: defaultdict[str, DrainRate] = defaultdict(DrainRate)
        self._former = Former(
            queue, book, budgets.configured, settings.batch.max_items, self._pace, budgets.tokens_of
        )
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
        """Whether nothing runs and nothing is formed."""
        return not self.activity.busy and not self._former.ahead

    def _run(self) -> None:
        self._single_threaded.wait()
        torch.set_num_threads(self._torch_threads)
        with torch.inference_mode():
            while self._queue.wait_work(self._has_other_work, self._book.paused_until_ns()):
                self._book.wake_paused()
                self._generations.close_ended(self._step_limit_s)
                while self._calls:
                    self._run_call(*self._calls.popleft())
                batch = self._former.next()
                if batch is not None:
                    self._run_batch(batch)
                    # PERF: drop the references now, not when the next batch arrives.
                    del batch
            self._generations.close_ended(self._step_limit_s)

    def _has_other_work(self) -> bool:
        return self._former.ahead or bool(self._calls) or bool(self._book.over)

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
            return self.activity.busy and not self._former.ahead

        # PERF: a second OpenMP team in the process would make the device thread's team sleep between its steps.
        torch.set_num_threads(1)
        self._single_threaded.set()
        while self._queue.wait_backlog(lambda: self.budgets.smallest, wanted):
            self._former.form_ahead()
            self._queue.nudge()

    def _pace(self, model: str) -> float:
        rate = self._rates.get(model)
        return rate.tokens_per_s if rate else 0.0

    def _run_batch(self, batch: Batch) -> None:
        began, paused_ns = time.monotonic_ns(), self._interlude.total_ns
        jobs = list({id(piece.job): piece.job for piece in batch.pieces}.values())
        model, stream = jobs[0].model, jobs[0].stream
        self._touch(model)
        self._ran = 0
        flight = [(job.tag, job.id) for job in jobs]
        self._record_flight(flight)
        for job in jobs:
            job.first_run_ns = job.first_run_ns or began
            job.batches += 1
        try:
            self._attempt(batch.pieces, batch.collated)
        finally:
            self.activity.end()
            self._record_flight([])
            self._book.land(batch.pieces)
            self._recoveries.ended(model)
            if stream is not None:
                self._generations.go_on(jobs[0], stream)
        seconds = (time.monotonic_ns() - began - self._interlude.total_ns + paused_ns) / 1e9
        self._queue.settle_time(jobs[0], seconds - batch.predicted_s)
        self._record_rates(model, seconds, stream is None)
        budget = self.budgets.tokens_of(model)
        self.batches.note(model, len(batch.pieces), self._ran, budget, seconds)
        if stream is None or jobs[0].batches == 1:
            self._batch_metrics.note(model, batch, budget)

    def _record_rates(self, model: str, seconds: float, whole: bool) -> None:
        """What ended early or failed says nothing of the pace; `whole` is false of a stint of a stream."""
        if self._ran:
            self._rates[model].record(self._ran, seconds)
            if whole:
                self._queue.rate.record(self._ran, seconds)

    def _record_flight(self, flight: Flight) -> None:
        """These requests, and those of a long batch that pauses, are on the device."""
        self._arena.record_flight(self._interlude.flight + flight)

    def _attempt(self, pieces: list[Piece], collated: Any = None) -> None:
        """Run some pieces; on failure run their halves, down to the single item that fails."""
        error = self._try(pieces, collated)
        if error is None:
            return
        if not oom.is_out_of_memory(error) and oom.context_is_broken():
            self._give_up(error)
        # PERF: the frames of a failed pass would hold its tensors while the halves need the memory.
        oom.forget_frames(error)
        if not pieces[0].job.adapter.repeatable:
            self._fail_together(pieces, error)
            return
        if oom.is_out_of_memory(error):
            error = self._make_room(pieces, error)
        if error is not None:
            self._recover(pieces, error)

    def _try(self, pieces: list[Piece], collated: Any = None) -> Exception | None:
        """One forward pass whose results are written and told; what it raised."""
        job = pieces[0].job
        tokens = sum(piece.prepared.cost for piece in pieces)
        predicted_s = self._rates[job.model].seconds_for(tokens)
        awaited_s = max(piece.job.deadline_ns for piece in pieces) / 1e9 - time.monotonic()
        hang_timeout_s = self._settings.worker.hang_timeout_s
        self.activity.begin(batch_limit_s(hang_timeout_s, predicted_s, tokens, awaited_s))
        self._queue.device_busy()
        try:
            began, paused_ns = time.monotonic_ns(), self._interlude.total_ns
            if collated is None:
                collated = collate(pieces)
            if job.stream is not None:
                self._generations.stint(pieces[0], job.stream, collated, self._step_limit_s)
                self._ran += tokens
                return None
            collated_ns = time.monotonic_ns()
            between = partial(self._between_steps, pieces)
            with stepping.running(self.activity, pieces, between), job.adapter.using(job.call.lora):
                results = operation_of(job.call).run(job.adapter, collated, job.call)
            finite = results.finite([piece.prepared.rows for piece in pieces])
            computed = time.monotonic_ns()
            outputs.write(pieces, results)
            if results.named:
                results.failures |= self._placer.write(pieces, results.named)
            failures = _failures(pieces, finite, results.failures)
            copied = time.monotonic_ns()
            tracing.note_batch(pieces, began, computed, copied)
            paused_ns = self._interlude.total_ns - paused_ns
            rows = sum(getattr(piece.job.call, "rows", 1) for piece in pieces)
            # Who is answered and asks for the statistics at once must find the run in them.
            self._executions.note(
                job.model, rows, collated_ns - began, computed - collated_ns - paused_ns, copied - computed
            )
            self._finish(pieces, failures, computed - began - paused_ns, copied - computed)
            self.budgets.grow(job.model)
            self._ran += tokens - _left(pieces, failures)
        except Exception as error:
            return error
        return None

    def _between_steps(self, pieces: list[Piece]) -> None:
        """Run one short batch of queries of other models, if there is one; not inside of such a batch.

        Streams that ended meanwhile are closed here too: a long batch would keep their inputs for as long.
        """
        if self._interlude.playing:
            return
        batch = self._former.beside(pieces[0].job.adapter, LONGEST_S)
        if batch is None and not self._book.over:
            return
        limit_s, recoveries, ran = self.activity.limit_s, self._recoveries, self._ran
        flight = list(dict.fromkeys((piece.job.tag, piece.job.id) for piece in pieces))
        self._recoveries = recoveries.fresh()
        try:
            with self._interlude.of(flight):
                if batch is not None:
                    self._run_batch(batch)
                self._generations.close_ended(self._step_limit_s)
        finally:
            self._recoveries, self._ran = recoveries, ran
            self.activity.begin(limit_s)

    def _make_room(self, pieces: list[Piece], error: Exception) -> Exception | None:
        """Memory ran out: give the cache back; several items get a smaller budget, a single one is tried again.

        Returns what the last try raised.
        """
        model = pieces[0].job.model
        if len(pieces) > 1:
            tried = sum(piece.prepared.cost for piece in pieces)
            self.budgets.shrink(model, tried, pieces[0].job.batch_tokens)
        with contextlib.suppress(Exception):
            oom.release_cached()
        if len(pieces) > 1:
            self._recoveries.exhausted(model, len(pieces))
            return error
        again = self._try(pieces)
        if again is not None and oom.is_out_of_memory(again):
            again = self._without_another(pieces, again)
        self._recoveries.exhausted(model, 1, lost=again is not None)
        return again

    def _without_another(self, pieces: list[Piece], error: Exception) -> Exception | None:
        """Have an idle model unloaded and run a single item for the last time; what that raised."""
        model = pieces[0].job.model
        oom.forget_frames(error)
        self.activity.begin(2 * oom.EVICTION_WAIT_S)
        if not self._relief.make_room(model):
            return error
        self._recoveries.evicted(model)
        last = self._try(pieces)
        if last is not None:
            self._relief.in_vain(model)
        return last

    def _recover(self, pieces: list[Piece], error: Exception) -> None:
        """Run the halves of a batch that failed; fail an item that stands alone."""
        if len(pieces) > 1:
            log.warning(
                "a batch of %d items failed (%s); trying its halves", len(pieces), type(error).__name__
            )
            middle = len(pieces) // 2
            self._attempt(pieces[:middle])
            self._attempt(pieces[middle:])
            return
        self._fail(pieces[0], error)

    def _fail(self, piece: Piece, error: Exception) -> None:
        """An item fails by what the model raised on it alone."""
        if oom.is_out_of_memory(error):
            text = f"item {piece.index} ({piece.prepared.cost} tokens) does not fit in device memory"
            failed = ItemError(piece.index, "RESOURCE_EXHAUSTED", text)
        elif isinstance(error, PenstockError):
            failed = ItemError(piece.index, error.code, error.message)
        else:
            request = piece.job.request_id
            log.error("request %s item %d failed in the model", request, piece.index, exc_info=error)
            text = f"item {piece.index}: the model failed on this input"
            failed = ItemError(piece.index, "INFERENCE_ERROR", text)
        self._book.complete(piece.job, 1, [failed])

    def _fail_together(self, pieces: list[Piece], error: Exception) -> None:
        """A batch that must not run again: nobody knows what of it the model has kept, or whose fault it was."""
        if len(pieces) == 1:
            self._fail(pieces[0], error)
            return
        names = ", ".join(piece.job.request_id for piece in pieces[:8])
        log.error("a batch of %d requests (%s) failed in the model", len(pieces), names, exc_info=error)
        text = "the model failed on a batch with this request; what it keeps of the sequence is not certain"
        for piece in pieces:
            self._book.complete(piece.job, 1, [ItemError(piece.index, "INFERENCE_ERROR", text)])

    def _finish(
        self, pieces: list[Piece], failures: dict[int, ItemError], device_ns: int, copy_ns: int
    ) -> None:
        by_job: dict[int, list[int]] = {}
        for at, piece in enumerate(pieces):
            by_job.setdefault(id(piece.job), []).append(at)
        for places in by_job.values():
            job = pieces[places[0]].job
            job.device_ns += device_ns
            job.copy_ns += copy_ns
            self._book.complete(job, len(places), [failures[at] for at in places if at in failures])

    @staticmethod
    def _give_up(error: Exception) -> None:
        code = EXIT_DEVICE_LOST if oom.is_device_lost(error) else EXIT_BUG
        log.critical(
            "the device context is lost (%s); this process ends", type(error).__name__, exc_info=error
        )
        logs.flush()
        os._exit(code)


def _left(pieces: list[Piece], failures: dict[int, ItemError]) -> int:
    """Tokens of the items that the adapter left because nobody waited for them."""
    ended = [at for at, failure in failures.items() if failure.code == DeadlineExceeded.code]
    return sum(pieces[at].prepared.cost for at in ended)


def _failures(
    pieces: list[Piece], finite: list[bool], failed: dict[int, ItemFailure]
) -> dict[int, ItemError]:
    """Errors by place in the batch: what the adapter said of single items, and values that are not finite."""
    errors = {}
    for at, piece in enumerate(pieces):
        if at in failed:
            call = piece.job.call
            where = f"{call.names.item.format(piece.index)}: " if operation_of(call).itemized else ""
            errors[at] = ItemError(piece.index, failed[at].code, where + failed[at].message)
        elif not finite[at]:
            text = f"item {piece.index}: the model gave a value that is not finite"
            errors[at] = ItemError(piece.index, "INFERENCE_ERROR", text)
    return errors
