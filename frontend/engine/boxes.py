"""The boxes of a gateway: which have a model, and counts of what a gateway does and sees.

The counts are under the names of SIE's gateway and under our own.

1. `finished` counts a request at its end. `machine_profile` is that of the box that answered, empty without one.
2. Demand is the requests of the last `DEMAND_S` that no box of their machine profile was there for, also those that
   another box served. Only profiles that the cluster knows are labels.
3. `report`, twice a second, writes boxes and models, and what the engine has counted since the look before.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Self

from frontend.engine.interface import BoxView, Counts, Models, Times, WorkerView, no_times
from frontend.scope import RequestScope
from ipc.catalog.repository import VersionEntry
from ipc.machine import CPU, gpu_type
from ipc.metrics.cluster import GatewayMetrics
from ipc.metrics.registry import Amount, Observations, Tally
from ipc.wire.stats import Stats

BUNDLE = "default"
"""The bundle of a request that chooses none."""
DEMAND_S = 120.0
MOST_SERIES = 1024
"""Series of requests whose counters are at hand."""
_GAUGES = ("connected", "config_degraded", "config_epoch")
"""Counts that are told as they are."""
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


def _loaded(workers: Iterable[WorkerView]) -> set[str]:
    """Models that any of these workers has loaded."""
    return {
        model for worker in workers for model, status in worker.models.items() if status.state == "loaded"
    }


def known_profiles(configured: Sequence[str], directory: Models) -> list[str]:
    """The machine profiles of the settings, else those of the boxes that take work."""
    if configured:
        return sorted(configured)
    by_box = by_boxes(directory)
    return sorted({gpu_of(box, by_box.get(box.name, ())) for box in directory.boxes() if box.healthy})


def by_boxes(directory: Models) -> dict[str, list[WorkerView]]:
    """The workers of each box by its name."""
    by_box: dict[str, list[WorkerView]] = {}
    for worker in directory.workers():
        by_box.setdefault(worker.box, []).append(worker)
    return by_box


def gpu_of(box: BoxView, workers: Sequence[WorkerView]) -> str:
    """The machine profile of a box in lower case, else the type of its first device; `cpu` where nobody knows one."""
    return profile_of(box.profile, ((worker.device, worker.stats) for worker in workers))


def profile_of(stated: str, devices: Iterable[tuple[str, Stats | None]]) -> str:
    """As `gpu_of`, for what the settings of a box state and its workers' devices with their figures, if any."""
    if stated:
        return stated.lower()
    for device, stats in devices:
        if device:
            return gpu_type(device, stats.memory_total if stats is not None else 0)
    return CPU


class GatewayMeter:
    """Feeds the families of one frontend of a gateway."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        directory: Models,
        counts: Counts,
        configured: Sequence[str] = (),
        now_s: Callable[[], float] = time.monotonic,
        times: Times = no_times,
        tally: Tally | None = None,
    ) -> None:
        """`configured` are the machine profiles that the settings name; requests are counted in `tally`."""
        self._metrics, self._directory, self._counts, self._times = metrics, directory, counts, times
        self._tally = tally or Tally()
        self._configured, self._now_s = configured, now_s
        self._unmet: deque[tuple[float, tuple[str, str]]] = deque()
        self._demand: Counter[tuple[str, str]] = Counter()
        self._gauges: set[tuple[str, str, str]] = set()
        self._boxes: set[tuple[str, str, str]] = set()
        self._profiles: dict[str, str] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._models: set[str] = set()
        self._ended = lru_cache(maxsize=MOST_SERIES)(self._outcome)
        self._observed = lru_cache(maxsize=MOST_SERIES)(self._observations)
        metrics.touch()

    @classmethod
    def made(
        cls, directory: Models, counts: Counts, configured: Sequence[str], times: Times, tally: Tally
    ) -> Self:
        """A meter with the families of this process."""
        return cls(GatewayMetrics(), directory, counts, configured, times=times, tally=tally)

    def _outcome(self, operation: str, status: str, profile: str) -> tuple[Amount, Observations]:
        """What one more request counts into."""
        requests = self._metrics.requests.labels(operation, status, profile)
        return self._tally.amount(requests), self._observed("latency", operation, profile)

    def _observations(self, what: str, *labels: str) -> Observations:
        family = getattr(self._metrics, what)
        return self._tally.observations(family.labels(*labels) if labels else family)

    def finished(self, scope: RequestScope, status: str) -> None:
        """A request has ended with this HTTP status."""
        profile = self._profiles.get(scope.worker.partition("/")[0], "")
        requests, latency = self._ended(scope.operation, status, profile)
        requests.inc()
        latency.observe(scope.phases["total"] / 1000)
        chosen = self._label(scope.choice.profile)
        is_unmet = scope.error == "PROVISIONING" or (scope.worker and chosen not in ("", profile))
        if is_unmet:
            labels = chosen, self._bundle(scope.choice.bundle)
            self._unmet.append((self._now_s(), labels))
            self._demand[labels] += 1
        if scope.error == "PROVISIONING":
            self._metrics.provisioning.labels(chosen).inc()
        elif scope.error in _REJECTIONS:
            bundle = self._bundle(scope.choice.bundle)
            self._metrics.rejected.labels(profile or chosen, bundle, _REJECTIONS[scope.error]).inc()

    def _label(self, profile: str) -> str:
        """A machine profile of the cluster, empty for any other text of a request."""
        return profile if profile in self._configured or profile in self._profiles.values() else ""

    def _bundle(self, bundle: str) -> str:
        return bundle if any(box.bundle == bundle for box in self._directory.boxes()) else BUNDLE

    def report(self) -> None:
        """Write the gauges, and add to the counters what has happened since the last call."""
        boxes, by_box = self._directory.boxes(), by_boxes(self._directory)
        self._profiles = {box.name: gpu_of(box, by_box.get(box.name, ())) for box in boxes}
        healthy = sum(box.healthy for box in boxes)
        self._metrics.workers.labels("healthy").set(healthy)
        self._metrics.workers.labels("unhealthy").set(len(boxes) - healthy)
        self._report_models({box.name for box in boxes if box.healthy}, by_box)
        self._report_demand()
        self._report_boxes(boxes, by_box)
        for what, label, seconds in self._times():
            self._observed(what, *([label] if label else ())).observe(seconds)
        for key, count in self._counts().items():
            what, label = key
            if what in _GAUGES:
                getattr(self._metrics, what).set(count)
            if what == "leased" or what in _GAUGES:
                continue
            more = count - self._seen.get(key, 0)
            self._seen[key] = count
            if more > 0:
                self._count(what, label, more)

    def _report_boxes(self, boxes: Sequence[BoxView], by_box: Mapping[str, Sequence[WorkerView]]) -> None:
        """Write what waits at each box, and the memory that its devices use."""
        seen = set[tuple[str, str, str]]()
        for box in boxes:
            key = box.name, self._profiles[box.name], box.bundle
            seen.add(key)
            stats = [worker.stats for worker in by_box.get(box.name, ()) if worker.stats is not None]
            self._metrics.box_queue.labels(*key).set(sum(q.items for each in stats for q in each.queues))
            self._metrics.box_memory.labels(*key).set(sum(each.memory_used for each in stats))
        for key in self._boxes - seen:
            # NOTE: the library cannot remove a series that several processes feed.
            self._metrics.box_queue.labels(*key).set(0), self._metrics.box_memory.labels(*key).set(0)
        self._boxes = seen

    def _report_models(self, healthy: set[str], by_box: Mapping[str, Sequence[WorkerView]]) -> None:
        # PERF: one look at each worker for all models; a cluster may have thousands of them.
        ready = Counter(model for box in healthy for model in _loaded(by_box.get(box, ())))
        entries = self._directory.catalog.entries
        models = {entry.id for entry in entries if not isinstance(entry, VersionEntry)}
        for model in models:
            self._metrics.model_workers.labels(model).set(ready[model])
        for model in self._models - models:
            # NOTE: the library cannot remove a series that several processes feed.
            self._metrics.model_workers.labels(model).set(0)
        self._models = models

    def _report_demand(self) -> None:
        """Requests without a box, and boxes that pools need, by machine profile and bundle."""
        while self._unmet and self._unmet[0][0] < self._now_s() - DEMAND_S:
            self._demand[self._unmet.popleft()[1]] -= 1
        self._demand = +self._demand
        now = Counter({("demand", *labels): count for labels, count in self._demand.items()})
        for (what, label), count in self._counts().items():
            if what == "leased":
                profile, _, bundle = label.partition(" ")
                now["leased", self._label(profile), bundle] += int(count)
        # NOTE: the library cannot remove a series that several processes feed.
        for gauge in self._gauges | now.keys():
            getattr(self._metrics, gauge[0]).labels(*gauge[1:]).set(now[gauge])
        self._gauges |= now.keys()

    def _count(self, what: str, label: str, more: float) -> None:
        metrics = self._metrics
        if what == "lane":
            metrics.lane.labels(label).inc(more)
            if label == "queue":
                metrics.published.inc(more)
        elif what in ("resent", "dropped", "beats_missed", "pool_events", "transferred"):
            getattr(metrics, what).labels(label).inc(more)
        elif what == "duplicate":
            metrics.duplicates.inc(more)
        elif what in ("config_deltas", "dead", "dead_failures"):
            getattr(metrics, what).labels(*label.split()).inc(more)
        elif what in ("offloads", "skips", "unconfirmed", "config_failures"):
            getattr(metrics, what).inc(more)
        elif what == "claims":
            metrics.claims.inc(more)
