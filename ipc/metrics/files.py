"""Sums of counters, histograms and gauges over all slots, read from the metric files without merging their text.

1. A file of prometheus_client's multi-process mode only grows at its end, so the place of every value is found once.
2. `MetricFiles.read` and `series` gather the values at these places with numpy and add up equal series of all slots.
3. The result has series above zero only, so a large catalog of idle models costs nothing.

The live page reads the files several times a second; `ipc.metrics.registry.render` is too slow for that.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ipc.processes.paths import RunPaths

Labels = tuple[tuple[str, str], ...]

_HEADER_NBYTES = 8
_KEY_LENGTH = struct.Struct("i")
_SUMMED = ("counter_", "histogram_", "gauge_livesum_")
"""Files whose series are added up over the slots."""
_HIGHEST = ("gauge_max_", "gauge_livemax_")
"""Files of which the highest value over the slots counts."""
_key_decoder: msgspec.json.Decoder[tuple[str, str, dict[str, str], str]] = msgspec.json.Decoder(
    tuple[str, str, dict[str, str], str]
)


class Series(NamedTuple):
    """One sample name with its labels; `kind` is counter, histogram or gauge."""

    kind: str
    name: str
    labels: Labels


class Histogram(NamedTuple):
    """Upper bounds without +Inf, counts up to each of them, the number and the sum of all observations."""

    bounds: list[float]
    counts: list[int]
    observations: int
    total: float


@dataclass(slots=True)
class Totals:
    """Sums over all slots. Counters lose their `_total`; the label `model` names the model."""

    by_model: dict[str, dict[str, float]] = field(default_factory=dict)
    """{counter or gauge: {model: sum over its other labels}}"""
    counters: set[str] = field(default_factory=set)
    """Which names of `by_model` are counters."""
    histograms: dict[str, dict[str, Histogram]] = field(default_factory=dict)
    """{name: {model: histogram}}; of families with phases the phase `total`."""
    codes: dict[str, dict[str, float]] = field(default_factory=dict)
    """{counter with a model and a code: {code: sum over all models}}"""
    operations: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)
    """{counter of operations: {(model, operation): sum over its other labels}}"""
    others: dict[str, dict[Labels, float]] = field(default_factory=dict)
    """{counter or gauge without a model: {labels: value}}"""


class _Index:
    """Every series met so far by number, and the bounds of every histogram."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self._numbers: dict[Series, int] = {}
        self._bounds: dict[str, set[str]] = {}

    def number(self, series: Series) -> int:
        """The number of a series; a new one gets the next."""
        known = self._numbers.setdefault(series, len(self.series))
        if known == len(self.series):
            self.series.append(series)
            if series.name.endswith("_bucket") and series.kind == "histogram":
                bounds = self._bounds.setdefault(series.name.removesuffix("_bucket"), set())
                bounds.add(dict(series.labels)["le"])
        return known

    def bounds(self, name: str) -> list[str]:
        """Bounds of a histogram as in their labels, ascending."""
        return sorted(self._bounds[name], key=float)


class _File:
    """One file: the series at each place, found once."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self._parsed = _HEADER_NBYTES
        self._places: list[int] = []
        self._numbers: list[int] = []

    def extend(self, kind: str, data: bytes, index: _Index) -> bool:
        """Find the places of the values that were added since the last call; false for a file that shrank."""
        if len(data) < self._parsed:
            return False
        while self._parsed < len(data):
            (length,) = _KEY_LENGTH.unpack_from(data, self._parsed)
            key = data[self._parsed + 4 : self._parsed + 4 + length]
            place = self._parsed + 4 + length + 8 - (length + 4) % 8
            _, sample, labels, _ = _key_decoder.decode(key)
            self._numbers.append(index.number(Series(kind, sample, tuple(labels.items()))))
            self._places.append(place // 8)
            self._parsed = place + 16
        return True

    def values(self, data: bytes) -> tuple[np.ndarray, np.ndarray]:
        """(number of the series int64 [n], value float64 [n])."""
        return np.asarray(self._numbers, np.int64), np.frombuffer(data, np.float64)[self._places]


class MetricFiles:
    """All metric files of a server."""

    def __init__(self, paths: RunPaths) -> None:
        self._directory = paths.metrics()
        self._files: dict[str, _File] = {}
        self._index = _Index()

    def read(self) -> Totals:
        """Present sums. Blocks on files, so call in a thread."""
        return _totals(self._index, self._sums())

    def series(self, prefix: str) -> dict[Series, float]:
        """Present values above zero of series whose name begins so, the latest of instants. Blocks on files."""
        values, known = self._sums(), self._index.series
        return {
            known[number]: float(values[number])
            for number in np.flatnonzero(values).tolist()
            if known[number].name.startswith(prefix)
        }

    def _sums(self) -> np.ndarray:
        """float64 [series]."""
        empty = np.empty(0, np.int64), np.empty(0)
        summed, highest = [empty], [empty]
        # NOTE: always in this order: rounded sums in another order might go back.
        for path in sorted(self._directory.glob("*.db")):
            if path.name.startswith((*_SUMMED, *_HIGHEST)):
                found = self._values(path)
                if found is not None:
                    (highest if path.name.startswith(_HIGHEST) else summed).append(found)
        numbers, values = (np.concatenate(parts) for parts in zip(*summed, strict=True))
        sums = np.bincount(numbers, values, minlength=len(self._index.series))
        for numbers, values in highest:
            np.maximum.at(sums, numbers, values)
        return sums

    def _values(self, path: Path) -> tuple[np.ndarray, np.ndarray] | None:
        """(number of the series int64 [n], value float64 [n]) of one file; None if the file is gone or was replaced."""
        try:
            with path.open("rb") as file:
                inode, data = os.fstat(file.fileno()).st_ino, _used(file.read())
        except FileNotFoundError:
            return None
        known = self._files.get(path.name)
        if known is None or known.inode != inode:
            known = self._files[path.name] = _File(inode)
        if not known.extend(path.name.split("_")[0], data, self._index):
            del self._files[path.name]
            return None
        return known.values(data)


def _used(data: bytes) -> bytes:
    return data[: _KEY_LENGTH.unpack_from(data)[0]] if data else b""


def _totals(index: _Index, sums: np.ndarray) -> Totals:
    totals = Totals()
    buckets: dict[tuple[str, str], dict[str, float]] = {}
    for number in np.flatnonzero(sums).tolist():
        kind, sample, pairs = index.series[number]
        labels, value = dict(pairs), float(sums[number])
        model, name = labels.get("model"), sample.removesuffix("_total")
        if kind == "histogram":
            if model is not None and labels.get("phase", "total") == "total":
                _note_sample(buckets, sample, model, labels, value)
        elif model is None:
            totals.others.setdefault(name, {})[pairs] = value
        else:
            if kind == "counter":
                totals.counters.add(name)
            family = totals.by_model.setdefault(name, {})
            family[model] = family.get(model, 0.0) + value
            if (code := labels.get("code")) is not None:
                codes = totals.codes.setdefault(name, {})
                codes[code] = codes.get(code, 0.0) + value
            if (operation := labels.get("operation")) is not None:
                pairs_of = totals.operations.setdefault(name, {})
                pairs_of[model, operation] = pairs_of.get((model, operation), 0.0) + value
    for (name, model), counts in buckets.items():
        totals.histograms.setdefault(name, {})[model] = _histogram(index.bounds(name), counts)
    return totals


def _note_sample(
    buckets: dict[tuple[str, str], dict[str, float]],
    sample: str,
    model: str,
    labels: Mapping[str, str],
    value: float,
) -> None:
    name, _, part = sample.rpartition("_")
    family = buckets.setdefault((name, model), {})
    place = labels["le"] if part == "bucket" else part
    family[place] = family.get(place, 0.0) + value


def _histogram(bounds: list[str], found: Mapping[str, float]) -> Histogram:
    """The files count each bucket alone; a `Histogram` counts up to each bound."""
    counts = np.cumsum([found.get(bound, 0.0) for bound in bounds]).astype(int).tolist()
    finite = [float(bound) for bound in bounds if bound != "+Inf"]
    return Histogram(finite, counts[: len(finite)], counts[-1] if counts else 0, found.get("sum", 0.0))
