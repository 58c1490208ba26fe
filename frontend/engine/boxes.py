"""The boxes of a gateway: which have a model, and counts of what a gateway does and sees.

The counts are under the names of SIE's gateway and under our own.

1. `finished` counts a request at its end. `machine_profile` is that of the box that answered, empty without one.
2. `report`, twice a second, writes boxes and models, and what the engine has counted since the look before.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engine.interface import BoxView, Counts, Models, WorkerView
from frontend.scope import RequestScope
from ipc.catalog.repository import VersionEntry
from ipc.machine import CPU, gpu_type
from ipc.metrics.registry import GatewayMetrics

BUNDLE = "default"
"""The bundle of every request: no request can choose another one yet."""
_REJECTIONS = {
    "QUEUE_FULL": "queue_full",
    "QUEUE_UNAVAILABLE": "no_broker",
    "DEADLINE_EXCEEDED": "deadline",
    "MODEL_NOT_LOADED": "loading",
    "MODEL_LOADING": "loading",
}


def boxes_with(model: str, directory: Models) -> list[str]:
    """Names of the boxes that take work and have a model loaded."""
    healthy = {box.name for box in directory.boxes() if box.healthy}
    return sorted(
        {
            worker.box
            for worker in directory.workers()
            if worker.box in healthy and model in worker.models and worker.models[model].state == "loaded"
        }
    )


def gpu_of(box: BoxView, workers: Sequence[WorkerView]) -> str:
    """The machine profile of a box in lower case, else the type of its first device; `cpu` where nobody knows one."""
    if box.profile:
        return box.profile.lower()
    for worker in workers:
        if worker.device:
            return gpu_type(worker.device, worker.stats.memory_total if worker.stats else 0)
    return CPU


class GatewayMeter:
    """Feeds the families of one frontend of a gateway."""

    def __init__(self, metrics: GatewayMetrics, directory: Models, counts: Counts) -> None:
        self._metrics, self._directory, self._counts = metrics, directory, counts
        self._profiles: dict[str, str] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._models: set[str] = set()
        metrics.touch()

    def finished(self, scope: RequestScope, status: str) -> None:
        """A request has ended with this HTTP status."""
        profile = self._profiles.get(scope.worker.partition("/")[0], "")
        self._metrics.requests.labels(scope.operation, status, profile).inc()
        self._metrics.latency.labels(scope.operation, profile).observe(scope.phases["total"] / 1000)
        if scope.error == "PROVISIONING":
            self._metrics.provisioning.labels(profile).inc()
        elif scope.error in _REJECTIONS:
            self._metrics.rejected.labels(profile, BUNDLE, _REJECTIONS[scope.error]).inc()

    def report(self) -> None:
        """Write the gauges, and add to the counters what has happened since the last call."""
        boxes, by_box = self._directory.boxes(), dict[str, list[WorkerView]]()
        for worker in self._directory.workers():
            by_box.setdefault(worker.box, []).append(worker)
        self._profiles = {box.name: gpu_of(box, by_box.get(box.name, ())) for box in boxes}
        healthy = sum(box.healthy for box in boxes)
        self._metrics.workers.labels("healthy").set(healthy)
        self._metrics.workers.labels("unhealthy").set(len(boxes) - healthy)
        self._report_models()
        for key, count in self._counts().items():
            what, label = key
            if what == "connected":
                self._metrics.connected.set(count)
                continue
            more = count - self._seen.get(key, 0)
            self._seen[key] = count
            if more > 0:
                self._count(what, label, more)

    def _report_models(self) -> None:
        entries = self._directory.catalog.entries
        models = {entry.id for entry in entries if not isinstance(entry, VersionEntry)}
        for model in models:
            self._metrics.model_workers.labels(model).set(len(boxes_with(model, self._directory)))
        for model in self._models - models:
            # NOTE: the library cannot remove a series that several processes feed.
            self._metrics.model_workers.labels(model).set(0)
        self._models = models

    def _count(self, what: str, label: str, more: float) -> None:
        metrics = self._metrics
        if what == "lane":
            metrics.lane.labels(label).inc(more)
            if label == "queue":
                metrics.published.inc(more)
        elif what in ("resent", "dropped", "beats_missed"):
            getattr(metrics, what).labels(label).inc(more)
        elif what == "duplicate":
            metrics.duplicates.inc(more)
        elif what == "claims":
            metrics.claims.inc(more)
