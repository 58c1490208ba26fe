"""Counts batches by model. The device thread calls it once for each batch, so every series is looked up once only."""

from __future__ import annotations

import logging
from typing import Any

from ipc.metrics.registry import WorkerMetrics
from workers.operations import operation_of
from workers.scheduling.forming import Batch

log = logging.getLogger(__name__)


class _Series:
    """The series of one model. Programs have fewer: the contract of SIE does not know them, and nothing is padded."""

    def __init__(self, metrics: WorkerMetrics, model: str, contract: bool) -> None:
        worker = metrics.worker
        self.sizes: list[Any] = [metrics.batch_size.labels(model, worker)]
        self.tokens: list[Any] = [metrics.batch_tokens.labels(model, worker)]
        self.token_counts: list[Any] = [metrics.tokens.labels(model, "in")]
        self.padding = self.efficiency = None
        self.truncated = metrics.truncated.labels(model, "truncate")
        if contract:
            self.sizes += [metrics.sie_batch_size.labels(model), metrics.sie_gpu_items.labels(model)]
            self.tokens.append(metrics.sie_gpu_tokens.labels(model))
            self.token_counts.append(metrics.sie_tokens.labels(model))
            self.padding = metrics.padding.labels(model, worker)
            self.efficiency = metrics.sie_adaptive_efficiency.labels(model)


class BatchMetrics:
    """Sizes, tokens, padding and cut inputs of batches."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._series: dict[str, _Series] = {}
        self._unpadded = set[str]()

    def note(self, model: str, batch: Batch, budget: int) -> None:
        """A batch has run; `budget` is how many tokens would have fitted."""
        series = self._series.get(model)
        if series is None:
            contract = operation_of(batch.pieces[0].job.call).itemized
            series = self._series[model] = _Series(self._metrics, model, contract)
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
            histogram.observe(batch.pieces[0].job.adapter.padding_ratio(batch.collated))
        except Exception as error:
            if model not in self._unpadded:
                log.warning(
                    "the padding of model %s cannot be told: %s: %s", model, type(error).__name__, error
                )
                self._unpadded.add(model)
