"""Requests of models with sequences: one `SlotTable` for each instance, whose turns decide what may run.

A request is a one-shot job that waits for its turn within its sequence. A batch that failed does not run again, not in
halves either: nobody knows what the model has kept of it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

from ipc.wire.messages import InferCall, ItemError
from workers.adapters.base import Adapter
from workers.adapters.shared.slot_batch import check_step
from workers.scheduling.job import Job, Piece
from workers.strategies.base import item_error
from workers.strategies.one_shot import Attempts, OneShot
from workers.strategies.slot_table import Outcome, SlotTable, Turn

log = logging.getLogger(__name__)


class Sequences(OneShot):
    """The order of `admit` is the order of the requests. `Job.kept` is the `Turn` of a job."""

    def __init__(self, most_waiting: int, *of: Any, **more: Any) -> None:
        """`most_waiting` sequences of an instance may wait for a slot; the rest is that of `OneShot`."""
        super().__init__(*of, **more)
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._tables: WeakKeyDictionary[Adapter, tuple[str, SlotTable]] = WeakKeyDictionary()

    def admit(self, job: Job) -> None:
        """Give a job its turn. Raises as `check_step` and `SlotTable.enrol`."""
        call = job.work.call
        assert isinstance(call, InferCall)
        step = check_step(job.adapter.config, call)
        with self._lock:
            turn = job.kept = self._table(job).enrol(step, job)
        if turn.restarts:
            log.warning(
                "model %s: sequence %a starts again (request %s) and has never ended",
                job.model,
                step.id,
                job.work.request_id,
            )

    def _table(self, job: Job) -> SlotTable:
        known = self._tables.get(job.adapter)
        if known is None:
            config = job.adapter.config
            idle_ns = config.sequence_batching.max_idle_us * 1000
            slots = SlotTable(config.name, max(1, config.max_batch_size), idle_ns, self._most_waiting)
            known = self._tables[job.adapter] = (job.model, slots)
        return known[1]

    def has_place(self, job: Job) -> bool:
        """Whether the sequence of a job has a slot. Nobody is notified when a slot becomes free."""
        turn: Turn | None = job.kept
        return turn is None or turn.sequence.slot is not None

    def arrive(self, job: Job) -> bool:
        """Whether it is the turn of a job. If not, the end of the job before puts it into the queue."""
        turn: Turn | None = job.kept
        if turn is None:
            return False
        with self._lock:
            may_run = self._tables[job.adapter][1].arrive(turn)
            if may_run:
                for item in job.prepared:
                    item.slot = turn.sequence.slot
        return may_run

    def left(self, job: Job) -> None:
        """The next job of the sequence may run."""
        # NOTE: a job and its turn name each other; what they hold must not wait for the collector of such cycles.
        turn, job.kept = job.kept, None
        if turn is None:
            return
        with self._lock:
            outcome = self._tables[job.adapter][1].finish(turn, job.state == "done", time.monotonic_ns())
        self._follow(outcome)

    def expire(self) -> list[tuple[str, int]]:
        """Take the slots of idle sequences back; returns how many there were of each model."""
        counts, outcomes = [], []
        with self._lock:
            now = time.monotonic_ns()
            for model, table in self._tables.values():
                late, outcome = table.expire(now)
                if late:
                    log.warning("model %s: %d idle sequences expired: %s", model, len(late), ascii(late[:8]))
                    counts.append((model, len(late)))
                    outcomes.append(outcome)
        for outcome in outcomes:
            self._follow(outcome)
        return counts

    def numbers(self) -> list[tuple[str, int, int]]:
        """(model, sequences that have a slot, sequences that wait for one)."""
        with self._lock:
            return [(model, table.active, table.waiting) for model, table in self._tables.values()]

    def _follow(self, outcome: Outcome) -> None:
        """Run the jobs whose turn has come, and fail those whose turn comes no more."""
        for job in outcome.void:
            if outcome.error is not None:
                self.table.fail(job, outcome.error)
        for job in outcome.run:
            self.queue.put(job, 0, len(job.prepared))

    def recover(self, attempts: Attempts, pieces: list[Piece], error: Exception) -> None:
        """Fail all requests of the batch: nobody knows what of it the model has kept, or whose fault it was."""
        if len(pieces) == 1:
            self.table.complete(pieces[0].job, 1, [item_error(pieces[0], error)])
            return
        names = ", ".join(piece.job.work.request_id for piece in pieces[:8])
        log.error("a batch of %d requests (%s) failed in the model", len(pieces), names, exc_info=error)
        text = "the model failed on a batch with this request; what it keeps of the sequence is not certain"
        for piece in pieces:
            self.table.complete(piece.job, 1, [ItemError(piece.index, "INFERENCE_ERROR", text)])
