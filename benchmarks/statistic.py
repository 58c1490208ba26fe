"""Medians, percentiles and ratios of interleaved rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Smallest value that at least `percent` of `values` do not exceed. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of `ours[r] / theirs[r]`: both were measured in the same round, so slow rounds cancel."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
