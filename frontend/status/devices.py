"""The devices of all workers as they go into a frame."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from frontend.engine.interface import WorkerView
from frontend.status.gpu_types import CPU, gpu_type
from ipc.wire.stats import BatchRecord, Stats

DEFAULT_THRESHOLD_PCT = 85.0
FILL_S = 10.0


def device_of(worker: WorkerView) -> str:
    """`cuda:<slot>` or `cpu`; the supervisor gives every worker the GPU with the number of its slot."""
    return CPU if worker.name == CPU else f"cuda:{worker.slot}"


def fill(batches: Iterable[BatchRecord], now_ns: int, model: str | None = None) -> float | None:
    """Share of the token budget that the batches of the last `FILL_S` seconds used; None without a batch."""
    recent = [
        batch
        for batch in batches
        if now_ns - batch.at_ns < FILL_S * 1e9 and (model is None or batch.model == model)
    ]
    budget = sum(batch.budget for batch in recent)
    return round(min(1.0, sum(batch.tokens for batch in recent) / budget), 4) if budget else None


def threshold_pct(budget_bytes: int, total_bytes: int) -> float:
    """Share of a device's memory up to which models are loaded, by `worker.memory_budget_bytes`."""
    if not budget_bytes or not total_bytes:
        return DEFAULT_THRESHOLD_PCT
    return round(min(100.0, budget_bytes / total_bytes * 100), 1)


def gpu_fields(worker: WorkerView, budget_bytes: int) -> dict[str, Any]:
    """One entry of `gpus`, with both spellings of the utilization."""
    stats = worker.stats
    total = stats.memory_total if stats else 0
    utilization = round((stats.utilization or 0.0) * 100, 1) if stats else 0.0
    return {
        "index": worker.slot,
        "device": device_of(worker),
        "name": worker.name,
        "gpu_type": gpu_type(worker.name, total),
        "utilization_percent": utilization,
        "utilization_pct": utilization,
        "memory_used_bytes": stats.memory_used if stats else 0,
        "memory_total_bytes": total,
        "memory_threshold_pct": threshold_pct(budget_bytes, total),
        "temperature_c": int(stats.temperature_c or 0) if stats else 0,
    }


def device_fields(worker: WorkerView, restarts: dict[str, float], budget_bytes: int) -> dict[str, Any]:
    """One entry of `devices`: every worker, those on CPU and those that are down included."""
    fields: dict[str, Any] = {
        "worker": worker.slot,
        "state": "unresponsive" if worker.state == "ready" and not worker.responsive else worker.state,
        "device": device_of(worker),
        "name": worker.name,
        "threads": worker.threads,
        "restarts": int(restarts.get(f"worker-{worker.slot}", 0)),
        "models_loaded": sum(status.state == "loaded" for status in worker.models.values()),
    }
    stats = worker.stats
    if stats is None:
        return fields
    return {
        **fields,
        "memory_used_bytes": stats.memory_used,
        "memory_total_bytes": stats.memory_total,
        "memory_threshold_pct": threshold_pct(budget_bytes, stats.memory_total),
        "resident_bytes": stats.resident,
        "utilization_pct": _utilization_pct(worker, stats),
        "cpu_pct": round(stats.cpu * 100, 1),
        "busy_pct": round(stats.busy * 100, 1),
        "temperature_c": stats.temperature_c,
        "queue": {"tokens": stats.admitted, "bound_tokens": stats.bound},
        "tokens_per_s": round(worker.credits.rate),
        "shared_memory": {
            "used_bytes": stats.arena_used,
            "total_bytes": stats.arena_total,
            "leases": stats.leases,
        },
        "batch": {
            "budget_tokens": stats.budget,
            "fill_ratio": fill(stats.batches, time.monotonic_ns()),
            "last": [_batch_fields(batch) for batch in stats.batches],
        },
    }


def _utilization_pct(worker: WorkerView, stats: Stats) -> float:
    """What the device says; on CPU the share of the worker's threads that is in use."""
    if device_of(worker) != CPU:
        return round((stats.utilization or 0.0) * 100, 1)
    return round(min(100.0, stats.cpu * 100 / max(1, worker.threads)), 1)


def _batch_fields(batch: BatchRecord) -> list[Any]:
    """[items, tokens, budget in tokens, milliseconds] of a batch; a list, because there are many."""
    return [batch.items, batch.tokens, batch.budget, round(batch.seconds * 1e3, 2)]
