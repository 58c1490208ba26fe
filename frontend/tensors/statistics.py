"""What tensor requests took, of the whole server: the sums of what all slots have counted.

1. Frontends count requests (`frontend.tensors.recorder`), workers their runs (`workers.reporting.executions`),
each into the
   metric files of its slot, where counters go on when a process is started again.
2. `Reader.read` sums the files. A reading that was begun after it was asked for is shared by all who asked, none is
   kept: figures that two frontends give one after the other never go back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from frontend.tensors.version_states import VersionState, model_of
from ipc.metrics.files import MetricFiles
from ipc.metrics.infer_families import split_id
from ipc.processes.paths import RunPaths

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


@dataclass(slots=True)
class Duration:
    """How many, and nanoseconds of all of them together."""

    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class RunStatistics:
    """Runs of the model with one batch size: three phases, each counted once a run."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class RequestStatistics(RunStatistics):
    """Requests, of all batch sizes or of one; the phases are those of answered requests."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """One version of a model. `last_inference_ms` is Unix time in milliseconds, 0: never.

    `by_request_size` is keyed by the batch size of requests (0: failed before it was known), `by_run_size` by that of
    the model's runs. Sizes above 32 are rounded up to a power of two, in these keys only.
    """

    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    requests: RequestStatistics = field(default_factory=RequestStatistics)
    by_request_size: dict[int, RequestStatistics] = field(default_factory=dict)
    by_run_size: dict[int, RunStatistics] = field(default_factory=dict)


@dataclass(slots=True)
class ServerStatistics:
    """All models by (name, version), and calls to the server itself by kind (`ipc.metrics.infer_families.CALLS`).

    Version -1 (`ipc.metrics.infer_families.UNVERSIONED`) has what failed before its version was known.
    """

    models: dict[tuple[str, int], ModelStatistics] = field(default_factory=dict)
    calls: dict[str, Duration] = field(default_factory=dict)

    def of(self, model: str, version: int) -> ModelStatistics:
        """Those of one version; all zero when nothing was counted yet."""
        return self.models.get((model, version)) or ModelStatistics()

    def of_state(self, state: VersionState) -> ModelStatistics:
        """Those of a version as `TensorModels.states` lists it; figures go by full names."""
        return self.of(model_of(state.id), state.version)


class Reader:
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
        """A new reading, when the one before has ended; who asks from now on waits for the next."""
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await asyncio.to_thread(self.look)

    def look(self) -> ServerStatistics:
        """Read now. Blocks on files; one thread at a time."""
        found = ServerStatistics()
        for series, value in self._files.series(_PREFIX).items():
            _note(found, series.name.removeprefix(_PREFIX).removesuffix("_total"), dict(series.labels), value)
        for model in found.models.values():
            for one in model.by_request_size.values():
                for phase in (*_ANSWERED, "fail"):
                    total, part = getattr(model.requests, phase), getattr(one, phase)
                    total.count, total.ns = total.count + part.count, total.ns + part.ns
        return found


def _note(found: ServerStatistics, name: str, labels: dict[str, str], value: float) -> None:
    """Put one series, named without prefix and suffix, to where it belongs."""
    if "kind" in labels:
        call = found.calls.setdefault(labels["kind"], Duration())
        if name == "calls":
            call.count = round(value)
        else:
            call.ns = round(value * 1e9)
        return
    version = int(labels["version"]) if "version" in labels else None
    # What workers count is by catalog id.
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
    elif name == "failures":
        requests.fail.count += round(value)
    else:
        getattr(requests, _TIMES[name]).ns += round(value * 1e9)
