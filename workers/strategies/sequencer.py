"""The sequences of all loaded models: one `SlotTable` for each instance whose configuration has sequences.

`enrol` gives an arriving request its turn, `arrive` says whether it may wait for the device or first for its turn, and
`finish` whose turn is next. Any thread may call these; the order of `enrol` is the order of the requests.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import WeakKeyDictionary

from ipc.wire.messages import InferCall
from workers.adapters.base import Adapter
from workers.adapters.shared.slot_batch import check_step
from workers.scheduling.job import Job
from workers.strategies.sequences import Outcome, SlotTable

log = logging.getLogger(__name__)


class Sequencer:
    """Turns of jobs; a job without a turn is none of its business."""

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting` sequences of an instance may wait for a slot."""
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._tables: WeakKeyDictionary[Adapter, tuple[str, SlotTable]] = WeakKeyDictionary()

    def enrol(self, job: Job) -> None:
        """Give a job of a model with sequences its turn. Raises as `check_step` and `SlotTable.enrol`."""
        config, call = job.adapter.config, job.call
        if config is None or config.sequence_batching is None or not isinstance(call, InferCall):
            return
        step = check_step(config, call)
        with self._lock:
            job.turn = self._table(job).enrol(step, job)
        if job.turn.restarts:
            log.warning(
                "model %s: sequence %a starts again (request %s) and has never ended",
                job.model,
                step.id,
                job.request_id,
            )

    def _table(self, job: Job) -> SlotTable:
        found = self._tables.get(job.adapter)
        if found is None:
            config = job.adapter.config
            idle_ns = config.sequence_batching.max_idle_us * 1000
            table = SlotTable(config.name, max(1, config.max_batch_size), idle_ns, self._most_waiting)
            found = self._tables[job.adapter] = (job.model, table)
        return found[1]

    def has_slot(self, job: Job) -> bool:
        """Whether the sequence of a job has a slot, or it has no sequence; if not, a slot comes without a word."""
        turn = job.turn
        return turn is None or turn.sequence.slot is not None

    def arrive(self, job: Job) -> bool:
        """A job is prepared and has its place for results; whether it may run now. If not, `finish` names it later."""
        turn = job.turn
        if turn is None:
            return True
        with self._lock:
            may_run = self._tables[job.adapter][1].arrive(turn)
            if may_run:
                for item in job.prepared:
                    item.slot = turn.sequence.slot
        return may_run

    def finish(self, job: Job) -> Outcome | None:
        """A job has ended, and nothing runs for it any more."""
        # NOTE: a job and its turn name each other; what they hold must not wait for the collector of such cycles.
        turn, job.turn = job.turn, None
        if turn is None:
            return None
        with self._lock:
            return self._tables[job.adapter][1].finish(turn, job.state == "done", time.monotonic_ns())

    def expire(self) -> list[tuple[str, int, Outcome]]:
        """Take the slots of idle sequences back: for each model how many there were, and what follows."""
        found = []
        with self._lock:
            now = time.monotonic_ns()
            for model, table in self._tables.values():
                late, outcome = table.expire(now)
                if late:
                    log.warning("model %s: %d idle sequences expired: %s", model, len(late), ascii(late[:8]))
                    found.append((model, len(late), outcome))
        return found

    def counts(self) -> list[tuple[str, int, int]]:
        """(model, sequences that have a slot, sequences that wait for one)."""
        with self._lock:
            return [(model, table.active, table.waiting) for model, table in self._tables.values()]
