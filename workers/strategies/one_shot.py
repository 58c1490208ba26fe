"""Jobs that are done once each of their items has run in some batch: encode, score, extract, infer.

1. A batch runs in one pass. Its results are written to their places, then the answers are sent.
2. A batch that fails is split in halves until the guilty item stands alone; memory trouble also shrinks the budget.
   A batch that ends because nobody waits for any of its items does not run again.
3. A single item that does not fit is tried again after the caches were given back, then after the suspended batches
   have ended, then after an idle model was unloaded.
4. A long pass has steps (`stepping`). Between two of them the device may be given to other work.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from ipc.errors import DeadlineExceeded
from ipc.metrics.registry import WorkerMetrics
from ipc.wire.messages import BatchTimes, ItemError
from workers.adapters.base import ItemFailure
from workers.device import oom, stepping
from workers.device.stepping import batch_limit_s
from workers.operations import operation_of
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, Job, Piece, Strategy, collate, error_of, item_error
from workers.scheduling.outputs import write_results
from workers.strategies.named_outputs import Placer

log = logging.getLogger(__name__)


EVICTION_WAIT_S = 5.0
"""Seconds that the device thread waits for the memory of a model that is being unloaded."""
EVICT_AGAIN_AFTER_S = 60.0


class OneShot(Strategy):
    """Runs batches, and the rest of a batch that fails."""

    def __init__(self, context: Context, unload_idle: Callable[[str, float], bool]) -> None:
        """`unload_idle`: see `Eviction`."""
        self.context = context
        self.placer = Placer(context.jobs, context.settings.arena.inline_bytes)
        self.eviction = Eviction(unload_idle)

    def run(self, batch: Batch) -> int:
        """Run a batch, and the rest of the batch after failures."""
        passes = Passes(self, batch)
        passes.run(batch.pieces, batch.collated)
        passes.recoveries.ended(batch.first.model)
        return passes.ran

    def recover(self, passes: Passes, pieces: list[Piece], error: Exception) -> None:
        """Run pieces that failed together again, in halves, until the guilty piece stands alone."""
        left: Exception | None = error
        if oom.is_out_of_memory(error):
            left = passes.make_room(pieces, error)
        if left is None:
            return
        if isinstance(left, stepping.Deserted):
            # NOTE: halves would compute for nobody.
            for piece in pieces:
                self.context.jobs.complete(piece.job, 1, [item_error(piece, left)])
            return
        if len(pieces) > 1:
            log.warning(
                "a batch of %d items failed (%s); trying its halves", len(pieces), type(left).__name__
            )
            middle = len(pieces) // 2
            passes.run(pieces[:middle])
            self.context.jobs.wake_endpoint()
            passes.run(pieces[middle:])
            return
        self.context.jobs.complete(pieces[0].job, 1, [item_error(pieces[0], left)])


class Passes:
    """The passes of one batch: the first with all pieces, more after failures.

    `ran` counts the tokens of passes that came to their end. `came_to_end`: the run of the last pass did not raise.
    """

    def __init__(self, strategy: OneShot, batch: Batch) -> None:
        self._strategy, self._context, self._batch = strategy, strategy.context, batch
        self.recoveries = RecoveryCounts(strategy.context.metrics)
        self.ran = 0
        self.came_to_end = False

    def run(self, pieces: list[Piece], collated: Any = None) -> None:
        """Run some pieces, and recover from a failure."""
        error = self._try(pieces, collated)
        if error is None:
            return
        # PERF: the frames of a failed pass would hold its tensors while the halves need the memory.
        oom.forget_frames(error)
        self._strategy.recover(self, pieces, error)

    def _try(self, pieces: list[Piece], collated: Any = None) -> Exception | None:
        """One pass, with its results written and its answers sent; returns the exception that the pass raised."""
        context, batch, job = self._context, self._batch, pieces[0].job
        # PERF: the batch has counted its tokens.
        whole = len(pieces) == len(batch.pieces)
        tokens = batch.tokens if whole else sum([piece.prepared.cost for piece in pieces])
        predicted_s = context.queue.paces.seconds_for(job.model, tokens)
        awaited_s = max([piece.job.work.deadline_ns for piece in pieces]) / 1e9 - time.monotonic()
        hang_timeout_s = context.settings.worker.hang_timeout_s
        context.activity.begin(batch_limit_s(hang_timeout_s, predicted_s, tokens, awaited_s))
        context.queue.device_busy()
        self.came_to_end = False
        try:
            began, paused_ns = time.monotonic_ns(), batch.paused_ns
            if collated is None:
                collated = collate(pieces)
            collated_ns = time.monotonic_ns()
            call = job.work.call
            with stepping.Running(context.activity, pieces), job.adapter.using(call.lora):
                results = operation_of(call).run(job.adapter, collated, call)
            self.came_to_end = True
            if results.named:
                computed = time.monotonic_ns()
                results.failures |= self._strategy.placer.write(pieces, results.named)
                failures = _failures(pieces, [], results.failures)
            else:
                finite = results.finite([piece.prepared.rows for piece in pieces])
                computed = time.monotonic_ns()
                write_results(pieces, results)
                failures = _failures(pieces, finite, results.failures)
            copied = time.monotonic_ns()
            note_batch(pieces, began, computed, copied)
            paused_ns = batch.paused_ns - paused_ns
            phases = collated_ns - began, computed - collated_ns - paused_ns, copied - computed
            # NOTE: counted before anybody is answered: a client that asks for the statistics then must find the run.
            self._count(pieces, failures, *phases)
            self._finish(pieces, failures, *phases)
            context.budgets.grow(job.model)
            self.ran += tokens - _left(pieces, failures)
        except BaseException as raised:
            return error_of(raised)
        return None

    def _count(
        self,
        pieces: list[Piece],
        failures: dict[int, ItemError],
        collate_ns: int,
        infer_ns: int,
        output_ns: int,
    ) -> None:
        """Count the run in the statistics of tensor requests: by the rows that succeeded, none without any.

        Each request has the times of the whole run. The time of preparing counts in the first run that follows.
        """
        counted = [piece for at, piece in enumerate(pieces) if piece.job.work.tensors and at not in failures]
        if not counted:
            return
        prepare_ns = 0
        for job in {id(piece.job): piece.job for piece in counted}.values():
            prepare_ns += job.prepare_ns - job.told_prepare_ns
            job.told_prepare_ns = job.prepare_ns
        rows = sum([getattr(piece.job.work.call, "rows", 1) for piece in counted])
        model = pieces[0].job.model
        self._context.counts.note_run(model, rows, prepare_ns + collate_ns, infer_ns, output_ns)

    def _finish(
        self,
        pieces: list[Piece],
        failures: dict[int, ItemError],
        collate_ns: int,
        infer_ns: int,
        copy_ns: int,
    ) -> None:
        by_job: dict[int, list[int]] = {}
        for at, piece in enumerate(pieces):
            by_job.setdefault(id(piece.job), []).append(at)
        for places in by_job.values():
            job = pieces[places[0]].job
            job.device_ns += collate_ns + infer_ns
            job.collate_ns += collate_ns
            job.copy_ns += copy_ns
            errors = [failures[at] for at in places if at in failures] if failures else []
            # PERF: the device thread wakes the endpoint once for all answers, when this turn needs nothing more.
            self._context.jobs.complete(job, len(places), errors, wake=False)

    def make_room(self, pieces: list[Piece], error: Exception) -> Exception | None:
        """Memory ran out: give the cache back; several items get a smaller budget, a single one is tried again.

        Returns what the last try raised.
        """
        model, budgets = pieces[0].job.model, self._context.budgets
        if len(pieces) > 1:
            tried = sum(piece.prepared.cost for piece in pieces)
            budgets.shrink(model, tried, pieces[0].job.adapter.batch_tokens)
        with contextlib.suppress(Exception):
            oom.release_cached()
        if len(pieces) > 1:
            self.recoveries.exhausted(model, len(pieces))
            return error
        again = self._try(pieces)
        if again is not None and oom.is_out_of_memory(again):
            oom.forget_frames(again)
            if stepping.free_memory():
                with contextlib.suppress(Exception):
                    oom.release_cached()
                again = self._try(pieces)
        if again is not None and oom.is_out_of_memory(again):
            again = self._without_another(pieces, again)
        self.recoveries.exhausted(model, 1, lost=again is not None)
        return again

    def _without_another(self, pieces: list[Piece], error: Exception) -> Exception | None:
        """Have an idle model unloaded and run a single item for the last time; returns what that raised."""
        model, eviction = pieces[0].job.model, self._strategy.eviction
        oom.forget_frames(error)
        self._context.activity.begin(2 * EVICTION_WAIT_S)
        if not eviction.make_room(model):
            return error
        self.recoveries.evicted(model)
        last = self._try(pieces)
        if last is not None:
            eviction.in_vain(model)
        return last


def note_batch(pieces: list[Piece], began_ns: int, computed_ns: int, copied_ns: int) -> None:
    """After a batch, note its times and its members for the traced requests in the batch."""
    if not any(piece.job.trace for piece in pieces):
        return
    jobs: dict[int, Job] = {id(piece.job): piece.job for piece in pieces}
    traced = [job for job in jobs.values() if job.trace is not None]
    batch = BatchTimes(
        began_ns,
        computed_ns,
        copied_ns,
        len(pieces),
        sum(piece.prepared.cost for piece in pieces),
        len(jobs),
        [job.work.traceparent for job in traced[: BatchTimes.MAX_MEMBERS]],
    )
    for job in traced:
        assert job.trace is not None
        job.trace.ran(batch)


def _left(pieces: list[Piece], failures: dict[int, ItemError]) -> int:
    """Tokens of the items that the adapter left because nobody waited for them."""
    if not failures:
        return 0
    ended = [at for at, failure in failures.items() if failure.code == DeadlineExceeded.code]
    return sum([pieces[at].prepared.cost for at in ended])


def _failures(
    pieces: list[Piece], finite: list[bool], failed: dict[int, ItemFailure]
) -> dict[int, ItemError]:
    """Errors by place in the batch: failures that the adapter named, and values that are not finite."""
    errors: dict[int, ItemError] = {}
    if not failed and all(finite):
        return errors
    for at, piece in enumerate(pieces):
        if at in failed:
            call = piece.job.work.call
            where = f"{call.names.item.format(piece.index)}: " if operation_of(call).itemized else ""
            errors[at] = ItemError(piece.index, failed[at].code, where + failed[at].message)
        elif finite and not finite[at]:
            text = f"item {piece.index}: the model gave a value that is not finite"
            errors[at] = ItemError(piece.index, "INFERENCE_ERROR", text)
    return errors


class Eviction:
    """Has an idle model unloaded for an item that does not fit even alone.

    An item may simply be too large for the device. After an eviction that did not help, the same model causes none for
    `EVICT_AGAIN_AFTER_S`, so that such items do not clear the device of all other models.
    """

    def __init__(self, unload_idle: Callable[[str, float], bool]) -> None:
        """`unload_idle(model, wait_s)` unloads an idle model other than `model`; whether its memory has come back."""
        self._unload_idle = unload_idle
        self._in_vain: dict[str, float] = {}

    def make_room(self, model: str) -> bool:
        """Whether memory of another model was given back for this one. Device thread only."""
        since = self._in_vain.get(model)
        if since is not None and time.monotonic() < since + EVICT_AGAIN_AFTER_S:
            return False
        self._in_vain.pop(model, None)
        return self._unload_idle(model, EVICTION_WAIT_S)

    def in_vain(self, model: str) -> None:
        """Note that the item did not fit after the eviction either."""
        self._in_vain[model] = time.monotonic()


class RecoveryCounts:
    """Counts how batches that ran out of memory ended, under the names that dashboards of the SIE contract ask for."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._attempted = self._lost = False

    def exhausted(self, model: str, items: int, *, lost: bool = False) -> None:
        """Some items of a batch did not fit: several are split, one alone is tried again and may be `lost`."""
        metrics = self._metrics
        metrics.oom.labels(model, metrics.worker).inc()
        metrics.sie_oom_clears.labels(model).inc()
        if not self._attempted:
            self._attempted = True
            metrics.sie_oom_attempted.labels(model).inc()
        if items > 1:
            metrics.sie_oom_splits.labels(model).inc()
        elif lost:
            self._lost = True
            metrics.sie_oom_terminal.labels(model).inc()

    def evicted(self, model: str) -> None:
        """Count an item for which another model was unloaded."""
        self._metrics.sie_oom_evictions.labels(model).inc()

    def ended(self, model: str) -> None:
        """A batch is done; a recovery in which no item was given up succeeded."""
        if self._attempted and not self._lost:
            self._metrics.sie_oom_succeeded.labels(model).inc()
        self._attempted = self._lost = False
