"""PNG charts of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

Series = Mapping[str, Sequence[tuple[float, float]]]


def bar_chart(path: Path, title: str, unit: str, values: Mapping[str, float]) -> None:
    """Horizontal bars, one per name, in the given order from the top."""
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.35 * len(values)), layout="constrained")
    bars = axes.barh(list(values), list(values.values()))
    axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    axes.set_title(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def line_chart(path: Path, title: str, x_label: str, y_label: str, series: Series) -> None:
    """One line per name over a base-2 logarithmic x axis; y starts at 0."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
