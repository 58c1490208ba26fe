"""Metrics of models that generate, from the numbers of their engines."""

from __future__ import annotations

from typing import Any

from ipc.metrics.registry import WorkerMetrics
from ipc.wire.stats import GenerationStats
from workers.reports import GenerationCounts


def stats(model: str, **numbers: int) -> GenerationStats:
    plain = dict.fromkeys(GenerationStats.__struct_fields__[1:], 0)
    return GenerationStats(model, **plain | numbers)


def value(family: Any, *labels: str) -> float:
    """The value of a counter or gauge with these label values."""
    child = family.labels(*labels) if labels else family
    return float(child._value.get())


def test_counters_grow_by_the_difference_and_begin_anew_with_a_new_engine() -> None:
    metrics = WorkerMetrics("worker-0")
    counts = GenerationCounts(metrics)
    for prompt, output, hits in ((100, 10, 1), (150, 30, 2), (40, 5, 1)):
        counts.report([stats("a", prompt_tokens=prompt, output_tokens=output, prefix_hits=hits)])
    assert value(metrics.tokens, "a", "in") == 190
    assert value(metrics.tokens, "a", "out") == 35
    assert value(metrics.prefix_hits, "a", "worker-0") == 3
    assert value(metrics.rs_tokens) == 225


def test_gauges_are_by_model_and_summed_over_models() -> None:
    metrics = WorkerMetrics("worker-0")
    counts = GenerationCounts(metrics)
    counts.report(
        [
            stats("a", running=2, waiting=1, capacity=8, blocks_used=3, blocks_total=10),
            stats("b", running=5, capacity=4, blocks_used=7, blocks_total=20),
        ]
    )
    assert value(metrics.generations, "b", "worker-0", "running") == 5
    assert value(metrics.cache_used, "a", "worker-0") == 3
    assert [value(metrics.rs_running), value(metrics.rs_capacity), value(metrics.rs_blocks)] == [7, 12, 30]


def test_pictures_and_their_features_are_counted_by_model() -> None:
    metrics = WorkerMetrics("worker-0")
    counts = GenerationCounts(metrics)
    for pictures, hits in ((2, 1), (5, 3)):
        counts.report([stats("a", pictures=pictures, feature_bytes=70, feature_hits=hits)])
    assert value(metrics.pictures, "a", "worker-0") == 5
    assert value(metrics.feature_hits, "a", "worker-0") == 3
    assert value(metrics.feature_bytes, "a", "worker-0") == 70


def test_a_model_that_is_unloaded_falls_to_zero_and_keeps_its_counts() -> None:
    metrics = WorkerMetrics("worker-0")
    counts = GenerationCounts(metrics)
    counts.report([stats("a", running=2, blocks_used=3, blocks_total=10, preemptions=4)])
    counts.report([])
    assert value(metrics.generations, "a", "worker-0", "running") == 0
    assert value(metrics.cache_blocks, "a", "worker-0") == 0
    assert value(metrics.rs_running) == 0
    assert value(metrics.preemptions, "a", "worker-0") == 4
