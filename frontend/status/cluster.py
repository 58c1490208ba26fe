"""What a gateway tells of its cluster: the frames of `/ws/cluster-status`, and the fields of `/health`.

1. A box is one worker in the words of SIE: named after the box, `gpu` is its machine profile or the type of its device.
2. Memory and queues are those of boxes that tell them; a box that tells none has zeros.
3. A box that has died stays in the frames, not healthy, as long as the directory shows the box.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from frontend.engine.boxes import boxes_with, by_boxes, gpu_of
from frontend.engine.interface import BoxView, Models, WorkerView
from frontend.status.stream import Feed
from ipc.catalog.repository import VersionEntry
from ipc.errors import PenstockError
from ipc.machine import CPU

log = logging.getLogger(__name__)


def worker_fields(box: BoxView, workers: Sequence[WorkerView]) -> dict[str, Any]:
    """One entry of `workers`: a box with its workers."""
    stats = [worker.stats for worker in workers if worker.stats is not None]
    on_gpus = [worker for worker in workers if worker.device not in ("", CPU)]
    loaded = {name for w in workers for name, status in w.models.items() if status.state == "loaded"}
    return {
        "name": box.name,
        "url": "",
        "gpu": gpu_of(box, workers),
        "gpu_count": len(on_gpus),
        "ready_gpu_slots": sum(worker.responsive for worker in on_gpus) if box.healthy else 0,
        "loaded_models": sorted(loaded) if box.alive else [],
        "queue_depth": sum(queue.items for each in stats for queue in each.queues),
        "pending_cost": sum(each.admitted for each in stats),
        "inflight_batches": sum(each.busy > 0 for each in stats),
        "memory_used_bytes": sum(each.memory_used for each in stats),
        "memory_total_bytes": sum(each.memory_total for each in stats),
        "healthy": box.healthy,
        "bundle": box.bundle,
        "bundle_config_hash": "",
        "pool_name": box.pool,
    }


def cluster_fields(directory: Models, qps: float = 0.0) -> dict[str, Any]:
    """The fields of a frame but its time; `qps` are requests a second of this gateway."""
    by_box = by_boxes(directory)
    workers = [worker_fields(box, by_box.get(box.name, ())) for box in directory.boxes()]
    healthy = [worker for worker in workers if worker["healthy"]]
    models = [_model(name, directory, by_box, workers) for name in _names(directory)]
    return {
        "cluster": {
            "worker_count": len(healthy),
            "gpu_count": sum(worker["gpu_count"] for worker in healthy),
            "models_loaded": sum(model["worker_count"] > 0 for model in models),
            "total_qps": round(qps, 2),
        },
        "workers": workers,
        "models": models,
    }


def _names(directory: Models) -> Iterable[str]:
    return (entry.id for entry in directory.catalog.entries if not isinstance(entry, VersionEntry))


def _model(
    name: str,
    directory: Models,
    by_box: Mapping[str, Sequence[WorkerView]],
    workers: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    having = set(boxes_with(name, directory))
    depth = sum(
        queue.items
        for views in by_box.values()
        for view in views
        if view.stats is not None
        for queue in view.stats.queues
        if queue.model == name
    )
    return {
        "name": name,
        "state": directory.status(name).state,
        "worker_count": len(having),
        "gpu_types": sorted({worker["gpu"] for worker in workers if worker["name"] in having}),
        "total_queue_depth": depth,
    }


def health_fields(directory: Models) -> dict[str, Any]:
    """The JSON of a gateway's `/health`: `healthy`, `no_workers`, or `degraded` if some box takes no work."""
    fields = cluster_fields(directory)
    states = [worker["healthy"] for worker in fields["workers"]]
    status = "no_workers" if not any(states) else "healthy" if all(states) else "degraded"
    live = sorted({worker["gpu"] for worker in fields["workers"] if worker["healthy"]})
    return {
        "status": status,
        "type": "gateway",
        "configured_gpu_types": live,
        "live_gpu_types": live,
        **fields,
    }


class ClusterFeed(Feed):
    """The frames of `/ws/cluster-status`, one each second."""

    every_s = 1.0
    _counted: tuple[float, float] | None = None
    """Instant and number of requests of the last frame."""

    async def _publish(self) -> None:
        directory = self._services.directory
        directory.watch(True)
        self._services.recorder.flush()
        try:
            seen = await asyncio.to_thread(self._traffic.read)
        except (OSError, PenstockError) as error:
            log.error("a frame of the cluster's status was left out: %s", error)
            return
        requests = sum(seen.totals.operations.get("penstock_requests", {}).values())
        fields = cluster_fields(directory, self._rate(time.monotonic(), requests))
        self._show(orjson.dumps({"timestamp": time.time(), **fields}).decode())

    def _rate(self, now: float, requests: float) -> float:
        """Requests a second since the frame before; 0 for the first frame."""
        before, self._counted = self._counted, (now, requests)
        if before is None or now <= before[0]:
            return 0.0
        return max(0.0, requests - before[1]) / (now - before[0])
