"""Requests of models with sequences: one `SlotTable` for each instance, whose turns decide what may run.

A request is a one-shot job that waits for its turn within its sequence. A batch that failed runs in halves only if the
model is `atomic` and the run itself raised. Otherwise the model may have kept some of the requests in the state of
their sequences.

`SlotTable` is a pure policy for the sequences of one model instance: which sequences have a slot, which wait for one,
and whose turn it is.

1. A sequence is the requests of one correlation id and one caller (API key, where there are keys). Its START takes a
   free slot or joins the backlog.
2. The requests of an id take turns in the order of their arrival. A request runs when all requests before it in its
   sequence have ended, and the sequence has a slot.
3. After END the slot goes to the oldest sequence of the backlog. Requests of the same id behind the END are a sequence
   of their own, which lines up again.
4. START on an open sequence begins another sequence in the same slot, behind the queued requests.
5. After a START that failed no state exists: the turns behind that START, up to the next START, are void.
6. A sequence without requests for a while loses its slot.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ipc.errors import NEVER_BEGUN, QueueFull, SequenceUnknown, UnexpectedOutput, not_begun
from ipc.wire.messages import InferCall, ItemError, Step
from workers.adapters.base import Adapter
from workers.adapters.shared.slot_batch import check_step
from workers.scheduling.context import Context
from workers.scheduling.job import Job, Piece, item_error
from workers.strategies.one_shot import OneShot, Passes

log = logging.getLogger(__name__)

Key = tuple[str, int | str]
"""Caller and correlation id."""
MAX_LOST = 1024
"""So many ids of lost sequences are remembered, so that the error of their next request names the reason."""
_VOID = "its START request did not succeed"


@dataclass(slots=True, eq=False)
class Sequence:
    """The requests of one id and one caller.

    `slot` is None while the sequence waits in the backlog. `open` holds until an END is the last request.
    """

    id: int | str
    caller: str = ""
    slot: int | None = None
    open: bool = False
    turns: deque[Turn] = field(default_factory=deque)
    idle_since_ns: int = 0

    @property
    def key(self) -> Key:
        """Caller and id, by which sequences are told apart."""
        return self.caller, self.id


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a sequence. `arrived`: ready for its turn. `restarts`: the START met an open sequence."""

    job: Job
    sequence: Sequence
    start: bool
    end: bool
    restarts: bool = False
    arrived: bool = False


@dataclass(slots=True)
class Outcome:
    """The consequences of a change: jobs that run now, and jobs that fail with `error`."""

    run: list[Job] = field(default_factory=list)
    void: list[Job] = field(default_factory=list)
    error: SequenceUnknown | None = None


class SlotTable:
    """All sequences of one instance. Instants are nanoseconds of one clock."""

    def __init__(self, model: str, slots: int, idle_ns: int, most_waiting: int) -> None:
        """`model` is its name in messages; at most `most_waiting` sequences wait for a slot."""
        self._model, self._slots, self._idle_ns, self._most_waiting = model, slots, idle_ns, most_waiting
        self._by_id: dict[Key, Sequence] = {}
        self._backlog: deque[Sequence] = deque()
        self._free: list[int] = []
        self._used = 0
        self._lost: OrderedDict[Key, str] = OrderedDict()

    @property
    def active(self) -> int:
        """The number of sequences that have a slot."""
        return len(self._by_id) - len(self._backlog)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._backlog)

    def enrol(self, step: Step, job: Job) -> Turn:
        """A request has come.

        Raises:
            SequenceUnknown: the request goes on with a sequence that is not open.
            QueueFull: the request begins a sequence, and too many sequences wait for a slot already.
        """
        key = (job.work.caller, step.id)
        sequence = self._by_id.get(key)
        if not step.start and (sequence is None or not sequence.open):
            raise self._unknown(step.id, self._lost.get(key, NEVER_BEGUN))
        if sequence is None:
            sequence = self._begin(step.id, job.work.caller)
        turn = Turn(job, sequence, step.start, step.end, restarts=step.start and sequence.open)
        sequence.open = not step.end
        sequence.turns.append(turn)
        return turn

    def arrive(self, turn: Turn) -> bool:
        """A request is ready to run. Whether its turn has come; if not, `finish` of an earlier request says when."""
        turn.arrived = True
        sequence = turn.sequence
        return sequence.slot is not None and bool(sequence.turns) and sequence.turns[0] is turn

    def finish(self, turn: Turn, succeeded: bool, now_ns: int) -> Outcome:
        """A request has ended, with or without a run. Idempotent."""
        sequence, outcome = turn.sequence, Outcome()
        if turn not in sequence.turns:
            return outcome
        was_first = sequence.turns[0] is turn
        if turn.start and not succeeded:
            self._void(turn, outcome)
        sequence.turns.remove(turn)
        if not was_first:
            return outcome
        sequence.idle_since_ns = now_ns
        if not sequence.turns and not sequence.open:
            self._close(sequence, outcome)
        elif turn.end and sequence.slot is not None and self._backlog:
            slot, sequence.slot = sequence.slot, None
            self._backlog.append(sequence)
            self._give(slot, outcome)
        else:
            self._run_first(sequence, outcome)
        return outcome

    def expire(self, now_ns: int) -> tuple[list[int | str], Outcome]:
        """Take the slots of idle sequences back; returns their ids."""
        outcome = Outcome()
        late = [
            sequence
            for sequence in self._by_id.values()
            if not sequence.turns and now_ns - sequence.idle_since_ns > self._idle_ns
        ]
        for sequence in late:
            self._remember(
                sequence, f"it expired after {self._idle_ns // 1000} microseconds without a request"
            )
            self._close(sequence, outcome)
        return [sequence.id for sequence in late], outcome

    def _begin(self, name: int | str, caller: str) -> Sequence:
        sequence = Sequence(name, caller)
        if self._free:
            sequence.slot = heapq.heappop(self._free)
        elif self._used < self._slots:
            sequence.slot, self._used = self._used, self._used + 1
        elif len(self._backlog) < self._most_waiting:
            self._backlog.append(sequence)
        else:
            raise QueueFull(
                f"all {self._slots} sequence slots of model '{self._model}' are taken and {self._most_waiting} "
                "sequences wait for one",
                retry_after_s=1,
            )
        self._by_id[sequence.key] = sequence
        self._lost.pop(sequence.key, None)
        return sequence

    def _void(self, start: Turn, outcome: Outcome) -> None:
        """Remove the turns that would have gone on from a START that failed."""
        sequence = start.sequence
        behind = list(sequence.turns)[sequence.turns.index(start) + 1 :]
        upto = next((at for at, turn in enumerate(behind) if turn.start), len(behind))
        if upto == len(behind):
            sequence.open = False
            self._remember(sequence, _VOID)
        for turn in behind[:upto]:
            sequence.turns.remove(turn)
        outcome.void = [turn.job for turn in behind[:upto]]
        outcome.error = self._unknown(sequence.id, _VOID)

    def _close(self, sequence: Sequence, outcome: Outcome) -> None:
        del self._by_id[sequence.key]
        if sequence.slot is None:
            self._backlog.remove(sequence)
        else:
            self._give(sequence.slot, outcome)

    def _give(self, slot: int, outcome: Outcome) -> None:
        """Give a free slot to the oldest sequence of the backlog."""
        if not self._backlog:
            heapq.heappush(self._free, slot)
            return
        oldest = self._backlog.popleft()
        oldest.slot = slot
        self._run_first(oldest, outcome)

    @staticmethod
    def _run_first(sequence: Sequence, outcome: Outcome) -> None:
        if sequence.slot is not None and sequence.turns and sequence.turns[0].arrived:
            outcome.run.append(sequence.turns[0].job)

    def _remember(self, sequence: Sequence, why: str) -> None:
        self._lost[sequence.key] = why
        self._lost.move_to_end(sequence.key)
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)

    def _unknown(self, name: int | str, why: str) -> SequenceUnknown:
        return SequenceUnknown(not_begun(name, self._model, why))


class Sequences(OneShot):
    """The order of `admit` is the order of the requests. `Job.strategy_state` is the `Turn` of a job."""

    def __init__(self, context: Context, unload_idle: Callable[[str, float], bool]) -> None:
        """`unload_idle`: see `Eviction`."""
        super().__init__(context, unload_idle)
        self._most_waiting = context.settings.queue.max_waiting_sequences
        self._lock = threading.Lock()
        self._tables: WeakKeyDictionary[Adapter, tuple[str, SlotTable]] = WeakKeyDictionary()

    def admit(self, job: Job) -> None:
        """Give a job its turn. Raises as `check_step` and `SlotTable.enrol`."""
        call = job.work.call
        assert isinstance(call, InferCall)
        step = check_step(job.adapter.config, call)
        with self._lock:
            turn = job.strategy_state = self._table(job).enrol(step, job)
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
        turn: Turn | None = job.strategy_state
        return turn is None or turn.sequence.slot is not None

    def arrive(self, job: Job) -> bool:
        """Whether the turn of a job has come. If not, the end of the job before puts this job into the queue."""
        turn: Turn | None = job.strategy_state
        if turn is None:
            return False
        with self._lock:
            may_run = self._tables[job.adapter][1].arrive(turn)
            if may_run:
                for item in job.prepared:
                    item.slot = turn.sequence.slot
        return may_run

    def left(self, job: Job) -> None:
        """Give the turn of an ended job to the next job of its sequence."""
        # NOTE: a job and its turn name each other; what they hold must not wait for the collector of such cycles.
        turn, job.strategy_state = job.strategy_state, None
        if turn is None:
            return
        with self._lock:
            outcome = self._tables[job.adapter][1].finish(turn, job.state == "done", time.monotonic_ns())
        self._follow(outcome)

    def expire(self) -> list[tuple[str, int]]:
        """Take the slots of idle sequences back; returns the number of such sequences by model."""
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
                self.context.jobs.fail(job, outcome.error)
        for job in outcome.run:
            self.context.queue.put(job, 0, len(job.prepared))

    def recover(self, passes: Passes, pieces: list[Piece], error: Exception) -> None:
        """Find the guilty request by halves, or fail all: nobody knows which rows the model has kept."""
        if len(pieces) == 1:
            self.context.jobs.complete(pieces[0].job, 1, [item_error(pieces[0], error)])
            return
        # NOTE: outputs are checked and placed after the run, which has changed the state of all rows then.
        came_to_end = passes.came_to_end or isinstance(error, UnexpectedOutput)
        if pieces[0].job.adapter.atomic and not came_to_end:
            super().recover(passes, pieces, error)
            return
        names = ", ".join(piece.job.work.request_id for piece in pieces[:8])
        log.error("a batch of %d requests (%s) failed in the model", len(pieces), names, exc_info=error)
        text = "the model failed on a batch with this request; what it keeps of the sequence is not certain"
        for piece in pieces:
            self.context.jobs.complete(piece.job, 1, [ItemError(piece.index, "INFERENCE_ERROR", text)])
