"""Results of one benchmark: progress on the terminal, tables, JSON, charts; and the published summary.

1. A benchmark makes one `Report`, calls `say` as it goes, and adds tables and plots.
2. `save` writes `benchmarks/results/<name>.json` with the settings, the machine facts and the raw data.
3. `python -m benchmarks.report` turns all saved results into the measured part of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).resolve().parent / "results")
"""Where reports are saved: `BENCH_RESULTS` where the environment names a directory."""
SUMMARY = Path(__file__).resolve().parent / "RESULTS.md"
MEASURED = "<!-- everything below is written by benchmarks.report -->"
_PACKAGES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "falcon",
    "gunicorn",
    "uvicorn",
    "pyzmq",
    "numpy",
)

_EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
"""Vector and matrix extensions that decide how fast a model runs."""

Row = Sequence[str | float | int | None]
Series = Mapping[str, Sequence[tuple[float, float]]]

PLOTS = importlib.util.find_spec("matplotlib") is not None
"""Whether plots are drawn; the rest of a report needs no matplotlib."""


def _pyplot() -> Any:
    """matplotlib's pyplot, which draws into files."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    return pyplot


def _cpu_field(name: str) -> str:
    """First value of a field of `/proc/cpuinfo`, empty without the field."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _cpu_name() -> str:
    """Model name of the first core."""
    return _cpu_field("model name") or "unknown"


def _cpu_features() -> list[str]:
    """Extensions of `_EXTENSIONS` that the processor has."""
    flags = set(_cpu_field("flags").split())
    return [name for name in _EXTENSIONS if name in flags]


def machine() -> dict[str, Any]:
    """Facts about this machine and its software that a reader of the figures needs."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "features": _cpu_features(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": versions,
    }


def cell(value: str | float | int | None) -> str:
    """A table cell: floats with three significant digits, None as a dash."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:,.{digits}f}"


def aligned(headers: Sequence[str], rows: Sequence[Row]) -> str:
    """A plain-text table with the first column left and the others right."""
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    texts = []
    for line in lines:
        rest = [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        texts.append("  ".join([line[0].ljust(widths[0]), *rest]))
    texts.insert(1, "-" * len(texts[0]))
    return "\n".join(texts)


def bar_chart(path: Path, title: str, unit: str, values: Mapping[str, float]) -> None:
    """Horizontal bars, one per name, in the given order from the top."""
    pyplot = _pyplot()
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
    pyplot = _pyplot()
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


class Report:
    """Collects the results of one benchmark. `name` is the file name, `settings` the conditions of the run."""

    def __init__(self, name: str, title: str, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._started = time.monotonic()
        self._content: dict[str, Any] = {
            "benchmark": name,
            "title": title,
            "machine": machine(),
            "settings": dict(settings),
            "notes": [],
            "tables": [],
            "plots": [],
        }
        self.say(title)

    def say(self, text: str) -> None:
        """Print one line of progress with the seconds since the start."""
        print(f"[{time.monotonic() - self._started:7.1f} s] {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Add a sentence to the figures, for example about a figure that could not be measured."""
        self._content["notes"].append(text)
        self.say(text)

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Row]) -> None:
        """Print a table and keep it for the file."""
        self._content["tables"].append(
            {"title": title, "headers": list(headers), "rows": [list(row) for row in rows]}
        )
        print(f"\n{title}\n{aligned(headers, rows)}\n", flush=True)

    def bars(self, title: str, unit: str, values: Mapping[str, float]) -> None:
        """Plot one bar per name into `<name>-<number>.png`."""
        if self._plots():
            bar_chart(self._plot_path(), title, unit, values)

    def lines(self, title: str, x_label: str, y_label: str, series: Series) -> None:
        """Plot one line of (x, y) points per name, x on a base-2 logarithmic axis, into `<name>-<number>.png`."""
        if self._plots():
            line_chart(self._plot_path(), title, x_label, y_label, series)

    def _plots(self) -> bool:
        """Whether plots are drawn; says so where not."""
        if not PLOTS:
            self.say("no plot: matplotlib is not installed")
        return PLOTS

    def _plot_path(self) -> Path:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}-{len(self._content['plots']) + 1}.png"
        self._content["plots"].append(path.name)
        return path

    def save(self, data: Any) -> Path:
        """Write the JSON file; `data` holds the raw measurements. Returns its path."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        self._content["seconds"] = round(time.monotonic() - self._started, 1)
        path.write_text(json.dumps(self._content | {"data": data}, indent=1) + "\n")
        self.say(f"wrote {path}")
        return path


def markdown(result: Mapping[str, Any]) -> str:
    """One saved result as a Markdown section."""
    facts = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    processor_line = f"{facts['cpu']}, {facts['cores']} cores ({', '.join(facts['features'])})"
    state = f"{facts['memory_gib']} GiB; load average at start {facts['load_average'][0]}"
    parts = [
        f"## {result['title']}",
        f"`python -m benchmarks.{result['benchmark']}`",
        f"{facts['date']}; {processor_line}, {state}; Python {facts['python']}, {versions}.",
        "Settings: " + ", ".join(f"{name} {value}" for name, value in result["settings"].items()) + ".",
    ]
    for table in result["tables"]:
        rows = [" | ".join(cell(value) for value in row) for row in table["rows"]]
        head = [" | ".join(table["headers"]), " | ".join(["---"] * len(table["headers"]))]
        parts.append(f"**{table['title']}**\n\n" + "\n".join(f"| {line} |" for line in [*head, *rows]))
    parts.extend(f"- {note}" for note in result["notes"])
    return "\n\n".join(parts)


def main() -> None:
    """Write the measured part of RESULTS.md from all saved results. Text above the mark stays."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    if not results:
        raise SystemExit(f"no results in {RESULTS}; run `python -m benchmarks` first")
    head = SUMMARY.read_text().partition(MEASURED)[0] if SUMMARY.exists() else "# Measured results\n\n"
    SUMMARY.write_text(head + MEASURED + "\n\n" + "\n\n".join(markdown(result) for result in results) + "\n")
    print(SUMMARY)


if __name__ == "__main__":
    main()
