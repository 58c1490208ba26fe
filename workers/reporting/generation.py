"""Metrics of models that generate, from the numbers of their engines.

1. Gauges take the present numbers, by model, and summed over all models under the names of mistral.rs.
2. Counters grow by the difference to the last report. An engine that was loaded anew counts from zero again.
3. A model that is no longer loaded falls to zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipc.metrics.families import GENERATION_STATES
from ipc.metrics.registry import WorkerMetrics
from ipc.wire.stats import GenerationStats

_COUNTERS = {
    "prefix_lookups": "rs_lookups",
    "prefix_hits": "rs_hits",
    "prefix_evictions": "rs_evictions",
    "preemptions": "rs_preemptions",
}
"""Rising numbers, which are also the names of families by model, and the families of the same sum over all models."""
_SUMS = {
    "running": "rs_running",
    "waiting": "rs_waiting",
    "capacity": "rs_capacity",
    "blocks_used": "rs_blocks_used",
    "blocks_total": "rs_blocks",
}
_DIRECTIONS = {"prompt_tokens": "in", "output_tokens": "out"}


class GenerationCounts:
    """Writes the metrics of all generating models of a worker. One thread."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[str, GenerationStats] = {}

    def report(self, present: Sequence[GenerationStats]) -> None:
        """The numbers of all models that are loaded now."""
        gone = self._last.keys() - {stats.model for stats in present}
        if not present and not gone:
            return
        for model in gone:
            self._gauges(GenerationStats(model, *(0,) * 11))
        for stats in present:
            self._gauges(stats)
            self._counters(stats, self._last.get(stats.model))
        for field, family in _SUMS.items():
            self._family(family).set(sum(getattr(stats, field) for stats in present))
        self._last = {stats.model: stats for stats in present}

    def _family(self, name: str) -> Any:
        return getattr(self._metrics, name)

    def _gauges(self, stats: GenerationStats) -> None:
        metrics, worker = self._metrics, self._metrics.worker
        for state in GENERATION_STATES:
            metrics.generations.labels(stats.model, worker, state).set(getattr(stats, state))
        metrics.cache_used.labels(stats.model, worker).set(stats.blocks_used)
        metrics.cache_blocks.labels(stats.model, worker).set(stats.blocks_total)

    def _counters(self, stats: GenerationStats, last: GenerationStats | None) -> None:
        for field, total in _COUNTERS.items():
            grown = _growth(field, stats, last)
            self._family(field).labels(stats.model, self._metrics.worker).inc(grown)
            self._family(total).inc(grown)
        for field, direction in _DIRECTIONS.items():
            grown = _growth(field, stats, last)
            self._metrics.tokens.labels(stats.model, direction).inc(grown)
            self._metrics.rs_tokens.inc(grown)


def _growth(field: str, stats: GenerationStats, last: GenerationStats | None) -> int:
    number: int = getattr(stats, field)
    before: int = getattr(last, field) if last else 0
    return number - before if number >= before else number
