"""Counts the runs of models by batch size, for the statistics of the tensor protocols."""

from __future__ import annotations

from typing import Any

from ipc.metrics.infer_families import size_label
from ipc.metrics.registry import WorkerMetrics

_FAMILIES = ("runs", "runs_input", "runs_compute", "runs_output")


class Executions:
    """One per worker; called by the device thread once for each batch."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._rows: dict[tuple[str, int], list[Any]] = {}
        self._parts: dict[str, Any] = {}

    def note(self, model: str, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """A batch of `rows` of the entry `model` ran: joining and placing inputs, the model, writing outputs."""
        key = model, size_label(rows)
        counters = self._rows.get(key)
        if counters is None:
            labels = model, str(key[1]), self._metrics.device
            counters = self._rows[key] = [getattr(self._metrics, name).labels(*labels) for name in _FAMILIES]
        counters[0].inc()
        for counter, nanoseconds in zip(counters[1:], (input_ns, infer_ns, output_ns), strict=True):
            counter.inc(nanoseconds * 1e-9)

    def responded(self, model: str) -> None:
        """A part of a streamed answer of the entry `model` was sent."""
        counter = self._parts.get(model)
        if counter is None:
            counter = self._parts[model] = self._metrics.parts.labels(model)
        counter.inc()
