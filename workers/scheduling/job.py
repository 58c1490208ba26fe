"""One request inside a worker: what it asks for, how it takes its turns, where its results go, what is counted.

Device thread, queue and table of jobs know jobs as work that wants a turn. A `Strategy` is one kind of job: a batch in
one pass (`one_shot`), a request of a sequence (`sequence`), an answer in parts (`stream`), a text (`generation`).

1. `check` and `admit` may refuse an arriving job or note where it stands; `has_place` and `arrive` may hold it back.
2. `run` is a turn on the device. A job that needs more turns is put into the queue again by its strategy.
3. Of jobs that wait for something else than the device, the strategy is called in the device thread: `resume` when the
   pause of a job is over, `go_on` after the strategy has asked for it (`WorkQueue.ask`).
4. `ended` and `left` tell of its end: the first at once, the second when nothing works with its memory any more.

Batches are counted for metrics, for the statistics of the tensor protocols and for the live page (`BatchCounts`,
`BatchLog`). The device thread counts once or twice for each batch, so every series is looked up once only. Runs are
written at once, because a client that has its answer must find the run. All other counts wait in memory for the next
tick (`flush`).
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipc.errors import Unsupported
from ipc.memory.arena import Block
from ipc.metrics.families import size_label
from ipc.metrics.registry import Tally, WorkerMetrics, WrittenAmount
from ipc.wire.messages import (
    BatchTimes,
    ItemError,
    TensorInfo,
    TensorRef,
    TextTiming,
    Trace,
    Work,
    Written,
)
from ipc.wire.stats import BatchRecord
from workers import foreign, operations
from workers.adapters.base import Prepared
from workers.device import oom
from workers.inputs import NOTHING, Payload

log = logging.getLogger(__name__)

SHOWN_BATCHES = 48
_FAMILIES = ("runs", "runs_input", "runs_compute", "runs_output")


@dataclass(slots=True, eq=False)
class Output:
    """Reserved space of one request: a block of the arena, or private bytes when the result is small.

    `arrays` are writable numpy views by tensor name, first dimension = item.
    """

    block: Block | None
    buffer: memoryview | bytes
    arrays: dict[str, np.ndarray]


class JobTrace:
    """The instants of one traced request, in CLOCK_MONOTONIC nanoseconds.

    They are kept in memory and sent back with the result; the frontend makes spans of them.
    """

    __slots__ = ("_batches", "_began_ns", "_ended_ns")

    def __init__(self) -> None:
        self._began_ns = self._ended_ns = 0
        self._batches: list[BatchTimes] = []

    def prepared(self, began_ns: int, ended_ns: int) -> None:
        """Some items of the request were prepared."""
        self._began_ns = self._began_ns or began_ns
        self._ended_ns = ended_ns

    def ran(self, batch: BatchTimes) -> None:
        """The request took part in a batch."""
        self._batches.append(batch)

    def record(self, queued_ns: int) -> Trace:
        """The record that travels with the result."""
        return Trace(self._began_ns, self._ended_ns, queued_ns, self._batches)


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request: `work` is what a frontend planned. Times are CLOCK_MONOTONIC nanoseconds.

    strategy   its `Strategy`, which keeps what it knows of the job in `strategy_state`
    cost       tokens: the estimate of `work` at first, the real number once all is prepared
    counted    tokens that the bound of the queue counts now; `begun` are those that the device has begun
    resting    whether the queue does not count it, since it waits for its own client or has its sequences in an engine
    group      jobs of equal groups may share a batch
    starts     first row of each item (and the end) in tensors with many rows per item
    loose      values whose size the model decides, by name and item
    claims     how many threads may still read its input or write to its output
    infos      the outputs of an infer call
    told_prepare_ns  the part of `prepare_ns` that its runs have counted; `collate_ns` is a part of `device_ns`
    apart      whether no other may share a step with its generated text
    written    what earlier workers have written of a text that another worker may carry on
    ordered    whether its answer must not pass those of earlier jobs of its model
    text       the phases of generated text
    """

    session: bytes
    tag: int
    id: int
    work: Work
    adapter: Any
    strategy: Any = None
    solo: bool = False
    payload: Payload = NOTHING
    group: Hashable = None
    strategy_state: Any = None
    cost: int = field(init=False)
    open_items: int = field(init=False)
    prepared: list[Prepared] = field(init=False)
    trace: JobTrace | None = field(init=False)
    ordered: bool = False
    apart: bool = False
    written: Written | None = None
    resting: bool = False
    refs: list[TensorRef] = field(default_factory=list)
    result_nbytes: int = 0
    starts: dict[str, list[int]] = field(default_factory=dict)
    loose: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    output: Output | None = None
    infos: list[TensorInfo] = field(default_factory=list)
    errors: dict[int, ItemError] = field(default_factory=dict)
    prepared_items: int = 0
    claims: int = 0
    counted: int = 0
    begun: int = 0
    queued_ns: int = 0
    first_queued_ns: int = 0
    first_run_ns: int = 0
    prepare_ns: int = 0
    told_prepare_ns: int = 0
    device_ns: int = 0
    collate_ns: int = 0
    copy_ns: int = 0
    batches: int = 0
    text: TextTiming | None = None
    state: str = "open"

    def __post_init__(self) -> None:
        """Take the cost that the frontend estimated."""
        self.cost, self.open_items = self.work.cost, len(self.work.call.items)
        self.prepared = [None] * self.open_items  # type: ignore[list-item]
        self.trace = JobTrace() if self.work.traceparent else None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.work.model

    def is_late(self, now_ns: int) -> bool:
        """Whether the job has waited too long; the strategy says whether a job that has begun may go on."""
        work = self.work
        if self.first_run_ns:
            return bool(self.strategy.ends_late) and now_ns >= work.deadline_ns
        return now_ns >= work.waits_until_ns


# PERF: not frozen, which would make the two pieces of each item three times as dear.
@dataclass(slots=True, eq=False)
class Piece:
    """One item of one job, as it takes part in a batch. Nobody changes a piece."""

    job: Job
    index: int
    prepared: Prepared


@dataclass(slots=True, eq=False)
class Batch:
    """Pieces of one group, collated for the adapter (None: collating failed and is tried again piecewise).

    `predicted_s` is the device time for which the queue has charged the group and that has not been settled.
    `full`: work of the model was left waiting when the batch was taken. `lacks_memory`: the batch goes on when no other
    batch is suspended. `turn` is the computation once the computation has begun, and `limit_s` is the time that the
    watchdog allows. `seconds` is the time on the device, `paused_ns` the time in which the batch was suspended, last at
    `suspended_ns`.
    """

    pieces: list[Piece]
    collated: Any
    tokens: int
    predicted_s: float
    full: bool = False
    overtaken: bool = False
    lacks_memory: bool = False
    turn: Any = None
    limit_s: float = 0.0
    seconds: float = 0.0
    paused_ns: int = 0
    suspended_ns: int = 0

    @property
    def first(self) -> Job:
        """Any job of the batch: model, adapter, strategy and options are the same for all."""
        return self.pieces[0].job


def collate(pieces: list[Piece]) -> Any:
    """What the adapter makes of these pieces."""
    return pieces[0].job.adapter.collate([piece.prepared for piece in pieces])


class Strategy:
    """How a kind of job takes its turns on the device. A worker has one strategy of each kind."""

    ends_late = False
    """Whether a job that runs ends at its deadline; else what has begun goes on."""
    in_turns = False
    """Whether a job takes many turns; then a turn counts for the pace of its model only."""
    bounds_itself = False
    """Whether `admit` bounds what waits, so that the queue need not."""

    def is_batch(self, batch: Batch) -> bool:
        """Whether a turn counts as a batch of its model."""
        return True

    def check(self, work: Work) -> None:
        """Raise a `PenstockError` for a request that does not fit the kind of its model."""
        # NOTE: the model may have changed since the frontend looked at its configuration.
        if work.parts:
            raise Unsupported(f"Model '{work.model}' gives one response, and no stream, to a request")

    def admit(self, job: Job) -> None:
        """A job has come, and the queue counts it. Raises a `PenstockError` to refuse it."""

    def group(self, job: Job) -> Hashable:
        """Jobs of one model with equal groups may share a batch."""
        return operations.group_of(job.adapter, job.work.call)

    def has_place(self, job: Job) -> bool:
        """Whether the job may hold room for its result; a job without a place would keep room from those before it."""
        return True

    def arrive(self, job: Job) -> bool:
        """A job is prepared and has room; whether it may wait for the device now. Any thread."""
        return True

    def run(self, batch: Batch) -> int:
        """One turn of a batch; returns how many tokens ran whole. Device thread only, raises nothing."""
        raise NotImplementedError

    def after(self, batch: Batch) -> None:
        """The turn is over, and the flight record names the batch no more. Device thread only."""

    def taken(self, job: Job, count: int) -> None:
        """The frontend has taken so much of what the job has sent ahead. Endpoint thread only."""

    def go_on(self) -> None:
        """End or resume jobs that have ended or can go on, also when the worker ends. Device thread only."""

    def resume(self, job: Job) -> None:
        """Go on with a job whose pause is over. Device thread only."""

    def ended(self, job: Job) -> None:
        """Note that a job has ended, perhaps while the device runs the job. Any thread; must not wait."""

    def left(self, job: Job) -> None:
        """Note that no thread reads or writes the memory of an ended job any more. Any thread."""


def item_error(piece: Piece, error: Exception) -> ItemError:
    """The error of an item by what the model raised on it alone."""
    if oom.is_out_of_memory(error):
        text = f"item {piece.index} ({piece.prepared.cost} tokens) does not fit in device memory"
        return ItemError(piece.index, "RESOURCE_EXHAUSTED", text)
    operation = operations.operation_of(piece.job.work.call)
    place = f"request {piece.job.work.request_id} item {piece.index} failed in the model"
    text = "the model failed on this input"
    answer = foreign.answer_of(
        error,
        place,
        f"item {piece.index}: {text}" if operation.itemized else text,
        may_refuse=operation.refuses,
        tells=piece.job.adapter.tells_errors,
    )
    return ItemError(piece.index, answer.code, answer.message)


def error_of(raised: BaseException) -> Exception:
    """The error with which a turn goes on after code of a model raised.

    Ends the process when the device context is poisoned: nothing may run on it again.
    """
    oom.end_if_broken(raised)
    error = foreign.error_of(raised)
    if not oom.is_out_of_memory(error) and oom.context_is_broken(error):
        oom.end_process(error)
    return error


class BatchLog:
    """The last batches, and the time spent in all of them. The device thread writes, the endpoint's thread reads."""

    def __init__(self) -> None:
        self._records: deque[BatchRecord] = deque(maxlen=SHOWN_BATCHES)
        self.busy_s = 0.0

    def note(self, model: str, items: int, tokens: int, budget: int, seconds: float) -> None:
        """Add a batch that has ended."""
        self._records.append(BatchRecord(time.monotonic_ns(), seconds, model, items, tokens, budget))
        self.busy_s += seconds

    def models(self) -> set[str]:
        """The models of the last batches."""
        return {record.model for record in self.records()}

    def pace_of(self, model: str) -> tuple[float, float]:
        """(median milliseconds, mean fill of the budget from 0 to 1) of a model's recent batches; 0 for none."""
        recent = [record for record in self.records() if record.model == model]
        if not recent:
            return 0.0, 0.0
        fills = [min(1.0, record.tokens / record.budget) for record in recent if record.budget]
        return statistics.median(record.seconds for record in recent) * 1e3, statistics.fmean(fills or [0.0])

    def records(self) -> list[BatchRecord]:
        """The records of the last batches, the oldest first."""
        return list(self._records)


class _Series:
    """The series of one model. Programs have fewer: the contract of SIE does not know them, and nothing is padded."""

    def __init__(self, metrics: WorkerMetrics, tally: Tally, model: str, contract: bool) -> None:
        worker, histogram, counter = metrics.worker, tally.observations, tally.amount
        self.sizes = [histogram(metrics.batch_size.labels(model, worker))]
        self.tokens = [histogram(metrics.batch_tokens.labels(model, worker))]
        self.token_counts = [counter(metrics.tokens.labels(model, "in"))]
        self.padding = self.efficiency = None
        self.truncated = counter(metrics.truncated.labels(model, "truncate"))
        if contract:
            self.sizes.append(histogram(metrics.sie_batch_size.labels(model)))
            self.sizes.append(histogram(metrics.sie_gpu_items.labels(model)))
            self.tokens.append(histogram(metrics.sie_gpu_tokens.labels(model)))
            self.token_counts.append(counter(metrics.sie_tokens.labels(model)))
            self.padding = histogram(metrics.padding.labels(model, worker))
            self.efficiency = histogram(metrics.sie_adaptive_efficiency.labels(model))


class BatchCounts:
    """Sizes, tokens, padding and cut inputs of batches; runs of models by batch size; parts of answers."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics, self._tally = metrics, Tally()
        self._lock = threading.Lock()
        self._series: dict[str, _Series] = {}
        self._unpadded = set[str]()
        self._rows: dict[tuple[str, int], tuple[WrittenAmount, ...]] = {}
        self._parts: dict[str, Any] = {}

    def hold(self) -> None:
        """Hold the counts of batches in memory from now on, until `flush`."""
        self._tally.hold()

    def flush(self) -> None:
        """Write the counts that are held in memory. Any thread."""
        with self._lock:
            self._tally.flush()

    def note_batch(self, model: str, batch: Batch, budget: int) -> None:
        """Count a batch that has run; `budget` is the number of tokens that would have fitted."""
        with self._lock:
            self._note_batch(model, batch, budget)

    def _note_batch(self, model: str, batch: Batch, budget: int) -> None:
        series = self._series.get(model)
        if series is None:
            contract = operations.operation_of(batch.first.work.call).itemized
            series = self._series[model] = _Series(self._metrics, self._tally, model, contract)
        for histogram in series.sizes:
            histogram.observe(len(batch.pieces))
        for histogram in series.tokens:
            histogram.observe(batch.tokens)
        for counter in series.token_counts:
            counter.inc(batch.tokens)
        if series.padding is not None and batch.collated is not None:
            self._note_padding(model, series.padding, batch)
        if series.efficiency is not None:
            series.efficiency.observe(batch.tokens / budget)
        truncated = sum([piece.prepared.truncated for piece in batch.pieces])
        if truncated:
            series.truncated.inc(truncated)

    def _note_padding(self, model: str, histogram: Any, batch: Batch) -> None:
        """No figure may end the worker: an operator's own adapter may lay out what its base does not know."""
        try:
            histogram.observe(batch.first.adapter.padding_ratio(batch.collated))
        except BaseException as raised:
            error = foreign.error_of(raised)
            if model not in self._unpadded:
                log.warning(
                    "the padding of model %s cannot be told: %s: %s", model, type(error).__name__, error
                )
                self._unpadded.add(model)

    def note_run(self, model: str, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """A batch with `rows` of tensor requests to the entry `model` ran: preparing and joining inputs, the model,
        writing outputs.
        """
        key = model, rows
        counters = self._rows.get(key)
        if counters is None:
            labels = model, str(size_label(rows)), self._metrics.device
            counters = tuple(
                WrittenAmount(getattr(self._metrics, name).labels(*labels)) for name in _FAMILIES
            )
            self._rows[key] = counters
        runs, inputs, computing, outputs = counters
        inputs.inc(input_ns * 1e-9)
        computing.inc(infer_ns * 1e-9)
        outputs.inc(output_ns * 1e-9)
        runs.inc()

    def responded(self, model: str) -> None:
        """Count a part of a streamed answer of the entry `model`."""
        counter = self._parts.get(model)
        if counter is None:
            counter = self._parts[model] = self._metrics.parts.labels(model)
        counter.inc()
