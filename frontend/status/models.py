"""The models of the catalog as they go into a frame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from frontend.engine.interface import STATE_ORDER, WorkerView
from frontend.status.devices import device_of, fill
from frontend.status.traffic import Traffic
from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import QueueState


def model_fields(catalog: Catalog, workers: Sequence[WorkerView], traffic: Traffic) -> list[dict[str, Any]]:
    """Every model, by memory in descending order, then as in the catalog."""
    now_ns = time.monotonic_ns()
    found = [_model(entry, workers, traffic, now_ns) for entry in catalog.entries]
    return sorted(found, key=lambda fields: -fields["memory_bytes"])


def _model(entry: ModelEntry, workers: Sequence[WorkerView], traffic: Traffic, now_ns: int) -> dict[str, Any]:
    on = [(worker, worker.models[entry.id]) for worker in workers if entry.id in worker.models]
    best = min((status for _, status in on), key=_rank, default=ModelStatus(entry.id, "available"))
    held = [worker for worker, status in on if status.state == best.state != "available"]
    queues = [q for worker in workers if worker.stats for q in worker.stats.queues if q.model == entry.id]
    waiting = sum(queue.items for queue in queues)
    timing = traffic.latencies.get(entry.id, {})
    return {
        "name": entry.id,
        "state": best.state,
        "device": device_of(held[0]) if held else None,
        "memory_bytes": sum(status.memory_bytes for _, status in on),
        "queue_depth": waiting,
        "queue_pending_items": waiting,
        "config": _config(entry, best),
        "adaptive_batching": _batching(entry.id, workers, timing, now_ns),
        "devices": [device_of(worker) for worker in held],
        "queue_tokens": sum(queue.tokens for queue in queues),
        "queue_oldest_seconds": _oldest_s(queues),
        "progress": round(best.progress, 3),
        "load_seconds": round(best.load_s, 2),
        "in_flight": int(_sum_of(traffic, "penstock_requests_in_flight", entry.id)),
        "p50_ms": timing.get("p50_ms"),
        "p99_ms": timing.get("p99_ms"),
        "last_error": _error(best),
    }


def _rank(status: ModelStatus) -> int:
    return STATE_ORDER.index(status.state)


def _oldest_s(queues: Sequence[QueueState]) -> float:
    return round(max((queue.oldest_s for queue in queues), default=0.0), 3)


def _sum_of(traffic: Traffic, family: str, model: str) -> float:
    return traffic.totals.by_model.get(family, {}).get(model, 0.0)


def _error(status: ModelStatus) -> dict[str, Any] | None:
    if status.state != "failed":
        return None
    return {"code": status.error_class, "message": status.error_message, "attempts": status.attempts}


def _config(entry: ModelEntry, status: ModelStatus) -> dict[str, Any]:
    dims = {name: spec.dims or status.dims.get(name) for name, spec in entry.outputs.items()}
    return {
        "hf_id": entry.source.repo if isinstance(entry.source, HubSource) else None,
        "adapter": entry.adapter,
        "inputs": list(entry.inputs),
        "outputs": list(entry.outputs),
        "dims": {name: width for name, width in dims.items() if width},
        "max_sequence_length": entry.max_sequence_length or status.max_sequence_length or None,
    }


def _batching(
    model: str, workers: Sequence[WorkerView], timing: dict[str, Any], now_ns: int
) -> dict[str, Any]:
    """Penstock never waits to fill a batch and calibrates nothing: no target, no headroom, a wait of 0."""
    stats = [worker.stats for worker in workers if worker.stats and model in worker.models]
    return {
        "calibrated": False,
        "target_p50_ms": None,
        "wait_ms": 0.0,
        "batch_cost": max((each.budget for each in stats), default=0),
        "p50_ms": timing.get("p50_ms"),
        "headroom_ms": None,
        "fill_ratio": fill([batch for each in stats for batch in each.batches], now_ns, model),
    }
