"""Counts and times of tensor requests, by frontend, and their sums over the whole server.

1. `RequestCounters` counts ended requests into the metric files of the slot (`penstock_infer_*`); workers count their
   runs (`workers.scheduling.job`). Counters go on when a process is started again. Labels have few values:
   batch sizes are rounded (`ipc.metrics.families`), models that the catalog lacks are not counted.
2. `StatisticsReader` sums the files. Callers that ask before a reading begins share that reading. No reading is kept,
   so figures from two frontends, one after the other, never go back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta

from frontend.scope import InferenceRecord
from ipc.catalog.entries import Catalog
from ipc.catalog.ids import model_of, split_id
from ipc.metrics.families import UNVERSIONED, size_label
from ipc.metrics.files import MetricFiles
from ipc.metrics.registry import FrontendMetrics
from ipc.processes.paths import RunPaths
from ipc.wire.messages import Timing

_PREFIX = "penstock_infer_"
_COMPUTE = ("compute_input", "compute_infer", "compute_output")
_ANSWERED = ("success", "queue", *_COMPUTE)
_TIMES = {
    "request_seconds": "success",
    "queue_seconds": "queue",
    "compute_input_seconds": "compute_input",
    "compute_seconds": "compute_infer",
    "compute_output_seconds": "compute_output",
    "failed_seconds": "fail",
    "runs_input_seconds": "compute_input",
    "runs_compute_seconds": "compute_infer",
    "runs_output_seconds": "compute_output",
}
"""Which field the seconds of a family belong to."""
_REJECTED = (
    "QUEUE_FULL",
    "SHM_EXHAUSTED",
    "DRAINING",
    "DEADLINE_EXCEEDED",
    "NO_REPLICA",
    "PROVISIONING",
    "QUEUE_UNAVAILABLE",
    "MODEL_LOADING",
    "MODEL_NOT_LOADED",
)
_BACKEND = ("INFERENCE_ERROR", "WORKER_LOST", "WORKER_CRASHED", "RESOURCE_EXHAUSTED")
_REASONS = (
    dict.fromkeys(_REJECTED, "REJECTED") | dict.fromkeys(_BACKEND, "BACKEND") | {"CANCELLED": "CANCELED"}
)


@dataclass(slots=True)
class Duration:
    """A count, and nanoseconds of all counted together."""

    count: Annotated[int, Meta(description="How often.")] = 0
    ns: Annotated[int, Meta(description="Nanoseconds together.")] = 0


@dataclass(slots=True)
class RunStatistics:
    """Runs of the model with one batch size: three phases, each counted once a run."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class RequestStatistics(RunStatistics):
    """Requests of one batch size or of all; the phases belong to answered requests.

    `cached` are the answered requests all of whose rows were in the cache of embeddings: nothing was computed. The time
    of look-ups is not measured.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    cached: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """One version of a model. `last_inference_ms` is Unix time in milliseconds, 0: never.

    `inference_count` are the rows that were computed for answered requests. `by_run_size` has all rows that succeeded:
    also those of requests that failed for another reason. Only requests of named tensors count in either.
    `by_request_size` is keyed by the batch size of requests (0: failed before the size was known), `by_run_size` by
    the batch size of runs. Sizes above 32 are rounded up to a power of two, in these keys only.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    requests: RequestStatistics = field(default_factory=RequestStatistics)
    by_request_size: dict[int, RequestStatistics] = field(default_factory=dict)
    by_run_size: dict[int, RunStatistics] = field(default_factory=dict)


@dataclass(slots=True)
class ServerStatistics:
    """All models by (name, version), and calls to the server itself by kind (`ipc.metrics.families.CALLS`).

    Version -1 (`ipc.metrics.families.UNVERSIONED`) has requests that failed before their version was known.
    """

    models: dict[tuple[str, int], ModelStatistics] = field(default_factory=dict)
    calls: dict[str, Duration] = field(default_factory=dict)

    def of(self, model: str, version: int) -> ModelStatistics:
        """Statistics of one version; all zero before the first count."""
        return self.models.get((model, version)) or ModelStatistics()

    def of_id(self, model_id: str, version: int) -> ModelStatistics:
        """Statistics of a version of the model with this full name."""
        return self.of(model_of(model_id), version)


class StatisticsReader:
    """Reads the sums of all slots."""

    def __init__(self, paths: RunPaths) -> None:
        self._files = MetricFiles(paths)
        self._running: asyncio.Task[ServerStatistics] | None = None
        self._next: asyncio.Task[ServerStatistics] | None = None

    async def read(self) -> ServerStatistics:
        """Present figures of the whole server; never behind a request that had been answered before the call."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._read(self._running))
        return await asyncio.shield(self._next)

    async def _read(self, before: asyncio.Task[ServerStatistics] | None) -> ServerStatistics:
        """Read after the reading `before` has ended. Later callers wait for the next reading."""
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await asyncio.to_thread(self.look)

    def look(self) -> ServerStatistics:
        """Read now. Blocks on files; one thread at a time."""
        statistics = ServerStatistics()
        for series, value in self._files.series(_PREFIX).items():
            _note(
                statistics,
                series.name.removeprefix(_PREFIX).removesuffix("_total"),
                dict(series.labels),
                value,
            )
        for model in statistics.models.values():
            for one in model.by_request_size.values():
                for phase in (*_ANSWERED, "fail", "cached"):
                    total, part = getattr(model.requests, phase), getattr(one, phase)
                    total.count, total.ns = total.count + part.count, total.ns + part.ns
        return statistics


def _note(found: ServerStatistics, name: str, labels: dict[str, str], value: float) -> None:
    """Add one series, named without prefix and suffix, to the statistics."""
    if "kind" in labels:
        call = found.calls.setdefault(labels["kind"], Duration())
        if name == "calls":
            call.count = round(value)
        else:
            call.ns = round(value * 1e9)
        return
    version = int(labels["version"]) if "version" in labels else None
    # Workers count by catalog id.
    key = split_id(labels["model"]) if version is None else (labels["model"], version)
    model = found.models.setdefault(key, ModelStatistics())
    if name == "rows":
        model.inference_count += round(value)
    elif name == "last_timestamp_seconds":
        model.last_inference_ms = int(value * 1000)
    elif version is None:
        _note_run(model, name, int(labels["batch_size"]), value)
    else:
        _note_request(model, name, int(labels["batch_size"]), value)


def _note_run(model: ModelStatistics, name: str, size: int, value: float) -> None:
    runs = model.by_run_size.setdefault(size, RunStatistics())
    if name == "runs":
        model.execution_count += round(value)
        for phase in _COMPUTE:
            getattr(runs, phase).count += round(value)
    else:
        getattr(runs, _TIMES[name]).ns += round(value * 1e9)


def _note_request(model: ModelStatistics, name: str, size: int, value: float) -> None:
    requests = model.by_request_size.setdefault(size, RequestStatistics())
    if name == "requests":
        for phase in _ANSWERED:
            getattr(requests, phase).count += round(value)
    elif name == "cached":
        requests.cached.count += round(value)
        for phase in _COMPUTE:
            getattr(requests, phase).count -= round(value)
    elif name == "failures":
        requests.fail.count += round(value)
    else:
        getattr(requests, _TIMES[name]).ns += round(value * 1e9)


class Times(NamedTuple):
    """Phases of one request in nanoseconds; `total_ns` from its arrival to its answer."""

    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    total_ns: int

    @classmethod
    def of(cls, timing: Timing, total_ns: int) -> Times:
        """Phases from the times of the worker, by which a run has the same as its only request."""
        input_ns, infer_ns = timing.prepare_ns + timing.collate_ns, timing.device_ns - timing.collate_ns
        return cls(timing.queue_ns, input_ns, infer_ns, timing.copy_ns, total_ns)


class _Row:
    """The counters of one version with one batch size on one device, looked up once.

    `values`: requests; seconds in all, in the queue, of input, compute and output; rows. `cached`: those of which
    nothing was computed. `last`: when one ended last.
    """

    def __init__(self, metrics: FrontendMetrics, key: tuple[str, str], size: str, uuid: str) -> None:
        names = ("requests", "seconds", "queue", "input", "compute", "output")
        children = [getattr(metrics, f"infer_{name}").labels(*key, size, uuid) for name in names]
        # PERF: the values themselves: a counter looks at its labels and at the amount before each increment.
        self.values = [child._value for child in (*children, metrics.infer_rows.labels(*key, uuid))]
        self.cached = metrics.infer_cached.labels(*key, size, uuid)
        self.last = metrics.infer_last.labels(*key)._value


class RequestCounters:
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
        """A request ended: with error `code`, or answered. A request for an unknown model is not counted."""
        if not code:
            if record.timing is not None and record.version is not None:
                times = Times.of(record.timing, total_ns)
                self.succeeded(record.model, record.version, record.rows, times, record.uuid, record.cached)
            return
        if record.found:
            self.failed(record.model, record.version, record.rows, code, total_ns)
            return
        known = self._versions(record.model)
        if known is not None:
            model, versions = known
            version = record.version if record.version in versions else None
            self.failed(model, version, record.rows, code, total_ns)

    def succeeded(
        self, model: str, version: int, rows: int, times: Times, uuid: str = "", cached: int = 0
    ) -> None:
        """A request of `rows`, of which `cached` were in the cache, was answered by the device of that uuid."""
        size = size_label(rows)
        row = self._rows.get((model, version, size, uuid))
        if row is None:
            if not self._known(model):
                return
            row = _Row(self._metrics, (model, str(version)), str(size), uuid)
            self._rows[model, version, size, uuid] = row
        # PERF: the phases of one batch size only; the figures of a whole model are summed up when they are read.
        nanoseconds = (times.total_ns, times.queue_ns, times.input_ns, times.infer_ns, times.output_ns)
        for value, amount in zip(
            row.values, (1, *[ns * 1e-9 for ns in nanoseconds], rows - cached), strict=True
        ):
            value.inc(amount)
        if cached and cached == rows:
            row.cached.inc()
        row.last.set(time.time())

    def failed(self, model: str, version: int | None, rows: int, code: str, total_ns: int) -> None:
        """A request failed with error `code`; `version` None and `rows` 0: not known yet."""
        if not self._known(model):
            return
        key = (model, str(UNVERSIONED if version is None else version), str(size_label(rows)))
        self._metrics.infer_failures.labels(*key, _REASONS.get(code, "OTHER")).inc()
        self._metrics.infer_failed.labels(*key).inc(total_ns * 1e-9)

    def called(self, kind: str, total_ns: int) -> None:
        """A call about the server or its models ended; `kind` is one of `ipc.metrics.families.CALLS`."""
        self._metrics.infer_calls.labels(kind).inc()
        self._metrics.infer_calls_time.labels(kind).inc(total_ns * 1e-9)

    def _known(self, model: str) -> bool:
        return model in self._catalog.versions or model in self._catalog
