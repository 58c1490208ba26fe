"""Counts ended tensor requests of one frontend into the metric files of its slot (`penstock_infer_*`).

Batch sizes and models are labels of few values: sizes are rounded (`ipc.metrics.infer_families`), names that the
catalog lacks are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from frontend.engine.scope import InferenceRecord
from ipc.catalog.entries import Catalog
from ipc.metrics.infer_families import UNVERSIONED, size_label
from ipc.metrics.registry import FrontendMetrics
from ipc.wire.messages import Timing

_REJECTED = (
    "QUEUE_FULL",
    "SHM_EXHAUSTED",
    "DRAINING",
    "DEADLINE_EXCEEDED",
    "NO_REPLICA",
    "MODEL_LOADING",
    "MODEL_NOT_LOADED",
)
_BACKEND = ("INFERENCE_ERROR", "WORKER_LOST", "WORKER_CRASHED", "RESOURCE_EXHAUSTED")
_REASONS = (
    dict.fromkeys(_REJECTED, "REJECTED") | dict.fromkeys(_BACKEND, "BACKEND") | {"CANCELLED": "CANCELED"}
)


class Times(NamedTuple):
    """Phases of one request in nanoseconds; `total_ns` from its arrival to its answer."""

    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    total_ns: int

    @classmethod
    def of(cls, timing: Timing, total_ns: int) -> Times:
        """Phases as the worker tells them."""
        return cls(timing.queue_ns, timing.prepare_ns, timing.device_ns, timing.copy_ns, total_ns)


class _Row:
    """The counters of one version with one batch size on one device, looked up once."""

    def __init__(self, metrics: FrontendMetrics, key: tuple[str, str], size: str, uuid: str) -> None:
        names = ("requests", "seconds", "queue", "input", "compute", "output")
        self.requests, self.total, self.queue, self.input, self.infer, self.output = (
            getattr(metrics, f"infer_{name}").labels(*key, size, uuid) for name in names
        )
        self.rows, self.last = metrics.infer_rows.labels(*key, uuid), metrics.infer_last.labels(*key)


class Recorder:
    """Counts ended requests of this frontend. Models are named as the catalog does, without short names."""

    def __init__(
        self,
        metrics: FrontendMetrics,
        catalog: Catalog,
        known: Callable[[str], tuple[str, tuple[int, ...]] | None] = lambda name: None,
    ) -> None:
        """`known` gives the full name and the versions of a model by any of its names."""
        self._metrics, self._catalog, self._versions = metrics, catalog, known
        self._rows: dict[tuple[str, int, int, str], _Row] = {}

    def ended(self, record: InferenceRecord, code: str, total_ns: int) -> None:
        """A request ended: with error `code`, or answered. A request for a model that nobody knows is not counted."""
        if not code:
            if record.timing is not None and record.version is not None:
                times = Times.of(record.timing, total_ns)
                self.succeeded(record.model, record.version, record.rows, times, record.uuid)
            return
        if record.found:
            self.failed(record.model, record.version, record.rows, code, total_ns)
            return
        known = self._versions(record.model)
        if known is not None:
            model, versions = known
            version = record.version if record.version in versions else None
            self.failed(model, version, record.rows, code, total_ns)

    def succeeded(self, model: str, version: int, rows: int, times: Times, uuid: str = "") -> None:
        """A request of `rows` was answered by the device of that uuid."""
        size = size_label(rows)
        row = self._rows.get((model, version, size, uuid))
        if row is None:
            if not self._known(model):
                return
            row = _Row(self._metrics, (model, str(version)), str(size), uuid)
            self._rows[model, version, size, uuid] = row
        # PERF: the phases of one batch size only; the figures of a whole model are summed up when they are read.
        row.requests.inc()
        row.total.inc(times.total_ns * 1e-9)
        row.queue.inc(times.queue_ns * 1e-9)
        row.input.inc(times.input_ns * 1e-9)
        row.infer.inc(times.infer_ns * 1e-9)
        row.output.inc(times.output_ns * 1e-9)
        row.rows.inc(rows)
        row.last.set(time.time())

    def failed(self, model: str, version: int | None, rows: int, code: str, total_ns: int) -> None:
        """A request failed with error `code`; `version` None and `rows` 0 are for what was not known yet."""
        if not self._known(model):
            return
        key = (model, str(UNVERSIONED if version is None else version), str(size_label(rows)))
        self._metrics.infer_failures.labels(*key, _REASONS.get(code, "OTHER")).inc()
        self._metrics.infer_failed.labels(*key).inc(total_ns * 1e-9)

    def called(self, kind: str, total_ns: int) -> None:
        """A call about the server or its models ended; `kind` is one of `ipc.metrics.infer_families.CALLS`."""
        self._metrics.infer_calls.labels(kind).inc()
        self._metrics.infer_calls_time.labels(kind).inc(total_ns * 1e-9)

    def _known(self, model: str) -> bool:
        return model in self._catalog.versions or model in self._catalog
