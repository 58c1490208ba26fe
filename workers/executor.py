"""The device thread: takes a batch, runs it, writes the rows into place, and takes the next.

1. A batch formed ahead is taken if there is one; otherwise what waits is taken now. Nothing waits on a timer.
2. While the device is busy and at least a full budget waits, a second thread forms and collates the next batch.
3. The requests of a batch are named in the arena's flight record before it starts.
4. A batch that fails is split in halves until the guilty item stands alone; memory trouble also shrinks the budget.
5. A poisoned device context ends the process: nothing runs on it again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ipc import logs
from ipc.arena import Arena
from ipc.messages import ItemError
from ipc.metrics import WorkerMetrics
from ipc.settings import Batch as BatchSettings
from workers import oom, outputs
from workers.job import Piece
from workers.jobs import JobBook
from workers.operations import operation_of
from workers.queue import WorkQueue

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST = 4


@dataclass(slots=True, eq=False)
class Batch:
    """Pieces of one group, collated for the adapter."""

    pieces: list[Piece]
    collated: Any
    tokens: int


class Executor:
    """Owns the device thread."""

    def __init__(
        self,
        queue: WorkQueue,
        book: JobBook,
        arena: Arena,
        settings: BatchSettings,
        budget: oom.TokenBudget,
        metrics: WorkerMetrics,
    ) -> None:
        self._queue, self._book, self._arena, self._metrics = queue, book, arena, metrics
        self._max_items = settings.max_items
        self.budget = budget
        self.busy_since_ns = 0
        self.busy_tokens = 0
        self._ahead: deque[Batch] = deque(maxlen=1)
        self._forming = threading.Lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._threads = [
            threading.Thread(target=self._run, name="device", daemon=True),
            threading.Thread(target=self._form_ahead, name="form-ahead", daemon=True),
        ]

    def start(self) -> None:
        """Begin to take work."""
        for thread in self._threads:
            thread.start()

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on the device thread, before the next batch."""
        future: Future[Any] = Future()
        self._calls.append((work, future))
        self._queue.nudge()
        return future

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing is formed."""
        return not self.busy_since_ns and not self._ahead

    def _run(self) -> None:
        with torch.inference_mode():
            while self._queue.wait_work(lambda: bool(self._ahead or self._calls)):
                while self._calls:
                    self._run_call(*self._calls.popleft())
                batch = self._ahead.popleft() if self._ahead else self._form()
                if batch is not None:
                    self._run_batch(batch)
                    # PERF: drop the references now, not when the next batch arrives.
                    del batch

    @staticmethod
    def _run_call(work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def _form_ahead(self) -> None:
        def wanted() -> bool:
            return bool(self.busy_since_ns) and not self._ahead

        while self._queue.wait_backlog(lambda: self.budget.tokens, wanted):
            batch = self._form()
            if batch is not None:
                self._ahead.append(batch)
                self._queue.nudge()

    def _form(self) -> Batch | None:
        with self._forming:
            pieces = self._book.board(self._queue.take(self.budget.tokens, self._max_items))
            return self._collate(pieces) if pieces else None

    @staticmethod
    def _collate(pieces: list[Piece]) -> Batch:
        prepared = [piece.prepared for piece in pieces]
        return Batch(pieces, pieces[0].job.adapter.collate(prepared), sum(item.cost for item in prepared))

    def _run_batch(self, batch: Batch) -> None:
        began = time.monotonic_ns()
        self.busy_tokens, self.busy_since_ns = batch.tokens, began
        self._queue.device_busy()
        jobs = list({id(piece.job): piece.job for piece in batch.pieces}.values())
        self._arena.record_flight([(job.tag, job.id) for job in jobs])
        for job in jobs:
            job.first_run_ns = job.first_run_ns or began
            job.batches += 1
        try:
            self._attempt(batch)
        finally:
            self.busy_since_ns = 0
            self._arena.record_flight([])
            self._book.land(batch.pieces)
            self._queue.rate.record(batch.tokens, (time.monotonic_ns() - began) / 1e9)
        model = jobs[0].model
        self._metrics.batch_size.labels(model, self._metrics.worker).observe(len(batch.pieces))
        self._metrics.sie_batch_size.labels(model).observe(len(batch.pieces))
        self._metrics.batch_tokens.labels(model, self._metrics.worker).observe(batch.tokens)
        self._metrics.padding.labels(model, self._metrics.worker).observe(
            getattr(batch.collated, "padding_ratio", 0.0)
        )
        self._metrics.tokens.labels(model, "in").inc(batch.tokens)
        self._metrics.sie_tokens.labels(model).inc(batch.tokens)
        truncated = sum(piece.prepared.truncated for piece in batch.pieces)
        self._metrics.truncated.labels(model, "truncate").inc(truncated)

    def _attempt(self, batch: Batch) -> None:
        """Run a batch; on failure run its halves, down to the single item that fails."""
        job = batch.pieces[0].job
        try:
            began = time.monotonic_ns()
            results = operation_of(job.call).run(job.adapter, batch.collated, job.call)
            finite = outputs.finite_rows(results)
            computed = time.monotonic_ns()
            outputs.write(batch.pieces, results)
            self._finish(batch.pieces, finite, computed - began, time.monotonic_ns() - computed)
            self.budget.grow()
        except Exception as error:
            if oom.is_sticky(error):
                self._give_up(error)
            self._recover(batch, error)

    def _recover(self, batch: Batch, error: Exception) -> None:
        model = batch.pieces[0].job.model
        exhausted = oom.is_out_of_memory(error)
        if exhausted:
            self._metrics.oom.labels(model, self._metrics.worker).inc()
            self.budget.shrink(batch.tokens)
            oom.release_cached()
        if len(batch.pieces) > 1:
            log.warning(
                "a batch of %d items failed (%s); trying its halves", len(batch.pieces), type(error).__name__
            )
            middle = len(batch.pieces) // 2
            for half in (batch.pieces[:middle], batch.pieces[middle:]):
                self._attempt(self._collate(half))
            return
        piece = batch.pieces[0]
        if exhausted:
            text = f"item {piece.index} ({piece.prepared.cost} tokens) does not fit in device memory"
            failed = ItemError(piece.index, "RESOURCE_EXHAUSTED", text)
        else:
            log.error(
                "request %s item %d failed in the model", piece.job.request_id, piece.index, exc_info=error
            )
            failed = ItemError(
                piece.index, "INFERENCE_ERROR", f"item {piece.index}: the model failed on this input"
            )
        self._book.complete(piece.job, 1, [failed])

    def _finish(self, pieces: list[Piece], finite: list[bool], device_ns: int, copy_ns: int) -> None:
        by_job: dict[int, list[int]] = {}
        for at, piece in enumerate(pieces):
            by_job.setdefault(id(piece.job), []).append(at)
        for places in by_job.values():
            job = pieces[places[0]].job
            cut = sum(pieces[at].prepared.truncated for at in places)
            if cut:
                self._metrics.truncated.labels(job.model, "truncate").inc(cut)
            job.device_ns += device_ns
            job.copy_ns += copy_ns
            errors = [
                ItemError(
                    pieces[at].index,
                    "INFERENCE_ERROR",
                    f"item {pieces[at].index}: the model gave a value that is not finite",
                )
                for at in places
                if not finite[at]
            ]
            self._book.complete(job, len(places), errors)

    @staticmethod
    def _give_up(error: Exception) -> None:
        log.critical("the device context is lost (%s); this process ends", type(error).__name__)
        logs.flush()
        os._exit(EXIT_DEVICE_LOST)
