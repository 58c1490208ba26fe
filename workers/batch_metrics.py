"""Counts batches by model. The device thread calls it once for each batch, so every series is looked up once only."""

from __future__ import annotations

from typing import Any

from ipc.metrics import WorkerMetrics
from workers.forming import Batch
from workers.operations import operation_of


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
            series.padding.observe(batch.pieces[0].job.adapter.padding_ratio(batch.collated))
        if series.efficiency is not None:
            series.efficiency.observe(batch.tokens / budget)
        truncated = sum([piece.prepared.truncated for piece in batch.pieces])
        if truncated:
            series.truncated.inc(truncated)
