"""Counts of batches: for metrics, for the statistics of the tensor protocols, for the live page.

The device thread counts once or twice for each batch, so every series is looked up once only. Runs are written at
once, because a client that has its answer must find the run. All other counts wait in memory for the next tick
(`flush`).
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from typing import Any

from ipc.metrics.families import size_label
from ipc.metrics.registry import Tally, WorkerMetrics, WrittenAmount
from ipc.wire.stats import BatchRecord
from workers import foreign
from workers.operations import operation_of
from workers.scheduling.job import Batch

log = logging.getLogger(__name__)

SHOWN_BATCHES = 48
_FAMILIES = ("runs", "runs_input", "runs_compute", "runs_output")


class BatchLog:
    """The last batches, and the time spent in all of them. The device thread writes, the endpoint's thread reads."""

    def __init__(self) -> None:
        self._records: deque[BatchRecord] = deque(maxlen=SHOWN_BATCHES)
        self.busy_s = 0.0

    def note(self, model: str, items: int, tokens: int, budget: int, seconds: float) -> None:
        """A batch has ended."""
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
        """Oldest first."""
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
        """Keep what batches count in memory from now on, until `flush`."""
        self._tally.hold()

    def flush(self) -> None:
        """Write what waits in memory. Any thread."""
        with self._lock:
            self._tally.flush()

    def note_batch(self, model: str, batch: Batch, budget: int) -> None:
        """A batch has run; `budget` is how many tokens would have fitted."""
        with self._lock:
            self._note_batch(model, batch, budget)

    def _note_batch(self, model: str, batch: Batch, budget: int) -> None:
        series = self._series.get(model)
        if series is None:
            contract = operation_of(batch.first.work.call).itemized
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
        """A part of a streamed answer of the entry `model` was sent."""
        counter = self._parts.get(model)
        if counter is None:
            counter = self._parts[model] = self._metrics.parts.labels(model)
        counter.inc()
