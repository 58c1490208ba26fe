"""One frame of the status stream: the fields of the SIE contract in both spellings, and further fields for the page.

1. `frontend.status.history` has read the files of all frontends.
2. `build` makes the frame, in any thread.
3. Devices: every worker, with the memory and the batches of its last statistics.
4. Models: every entry of the catalog, with the states that workers announced.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from frontend.engine.boxes import BUNDLE
from frontend.engine.interface import STATE_ORDER, WorkerView
from frontend.records.recent import Recent
from frontend.scope import PARTS
from frontend.services import Services
from frontend.status.agents import agent_fields, lacks, run_fields
from frontend.status.health import health_fields, problems
from frontend.status.history import (
    MEASURED_S,
    SHOWN_ERRORS,
    SHOWN_REQUESTS,
    Traffic,
    counted,
    latencies,
)
from ipc.catalog.entries import Catalog, HubSource, ModelEntry
from ipc.machine import CPU, gpu_type
from ipc.metrics.families import UNKNOWN
from ipc.metrics.files import Totals
from ipc.processes.liveness import age_ns
from ipc.version import VERSION
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import BatchRecord, GenerationStats, QueueState, Stats

SHOWN_OPERATIONS = 64
PHASES = ("tokenize", "decode", "queue", "see", "prefill", "write", "device", "copy", "encode")
"""In the order in which they happen. Each moment of a request belongs to one of these at most."""


def request_fields(record: Recent) -> dict[str, Any]:
    """The fields of a finished request in a frame; `other` is the time outside of all phases."""
    total = record.phases.get("total", 0.0)
    phases = {name: round(time_ms, 3) for name, time_ms in _apart(record.phases).items()}
    return {
        "time": round(record.at, 3),
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "protocol": record.protocol,
        "operation": record.operation,
        "model": record.model,
        "status": record.status,
        "code": record.code,
        "message": record.message,
        "total_ms": round(total, 3),
        "phases": {**phases, "other": round(max(0.0, total - sum(phases.values())), 3)},
    }


def _apart(phases: Mapping[str, float]) -> dict[str, float]:
    """The `PHASES` of a request. Those of generated text leave nothing of `device` but the wait for a step."""
    apart = {name: phases.get(name, 0.0) for name in PHASES}
    decode, *parts = (apart[name] for name in PARTS)
    apart["tokenize"] = max(0.0, apart["tokenize"] - decode)
    if sum(parts):
        apart["queue"] += max(0.0, apart["device"] - sum(parts))
        apart["device"] = 0.0
    return apart


def counter_fields(totals: Totals) -> dict[str, dict[str, float]]:
    """`{counter without _total: {model: sum over labels}}`."""
    return {name: totals.by_model[name] for name in sorted(totals.counters)}


def histogram_fields(totals: Totals) -> dict[str, dict[str, Any]]:
    """`{histogram: {model: {buckets, counts, count, sum}}}`, counts up to each bound, without +Inf."""
    return {
        name: {
            model: {
                "buckets": histogram.bounds,
                "counts": histogram.counts,
                "count": histogram.observations,
                "sum": round(histogram.total, 6),
            }
            for model, histogram in models.items()
        }
        for name, models in sorted(totals.histograms.items())
    }


def operation_fields(seen: Traffic, now: float) -> list[dict[str, Any]]:
    """Models and operations by requests in descending order, at most `SHOWN_OPERATIONS`.

    Percentiles and mean phases are those of the answers of the last `MEASURED_S` seconds; None without an answer.
    """
    answers: dict[tuple[str, str], list[Recent]] = {}
    for record in seen.requests:
        if record.status < 400 and now - record.at <= MEASURED_S:
            answers.setdefault((record.model, record.operation), []).append(record)
    counts = seen.totals.operations.get("penstock_requests", {})
    known = sorted((key for key in counts if key[0] not in ("", UNKNOWN)), key=lambda key: -counts[key])
    return [
        {
            "model": model,
            "operation": operation,
            **latencies(answers.get((model, operation), ()), now, MEASURED_S)[""],
            "requests": counts[model, operation],
            "phases": _mean_phases(answers.get((model, operation), ())),
        }
        for model, operation in known[:SHOWN_OPERATIONS]
    ]


def _mean_phases(records: Sequence[Recent]) -> dict[str, float] | None:
    phases = [request_fields(record)["phases"] for record in records]
    return {name: round(fmean(one[name] for one in phases), 3) for name in phases[0]} if phases else None


def fault_fields(totals: Totals) -> dict[str, dict[str, float]]:
    """Faults since the start, by reason: restarts of workers, retries, poison, leases taken back, OOM."""
    counts = {
        kind: _by_label(totals, family, label)
        for kind, family, label in (
            ("worker_restarts", "penstock_worker_restarts", "reason"),
            ("retries", "penstock_retries", "reason"),
            ("poison", "penstock_poison", "reason"),
            ("leases_revoked", "penstock_shm_leases_revoked", "reason"),
        )
    }
    return {**counts, "out_of_memory": totals.by_model.get("penstock_oom", {})}


def restart_fields(totals: Totals) -> dict[str, float]:
    """`{worker: restarts}`."""
    return _by_label(totals, "penstock_worker_restarts", "worker")


def _by_label(totals: Totals, family: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for labels, value in totals.others.get(family, {}).items():
        key = dict(labels).get(label, "")
        sums[key] = sums.get(key, 0.0) + value
    return sums


DEFAULT_THRESHOLD_PCT = 85.0
FILL_S = 10.0


def device_of(worker: WorkerView) -> str:
    """`cuda:<number>` or `cpu`; the supervisor gives every worker the GPU with the number of its slot."""
    return CPU if worker.device == CPU else f"cuda:{worker.number}"


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
        "index": worker.number,
        "device": device_of(worker),
        "name": worker.device,
        "gpu_type": gpu_type(worker.device, total),
        "utilization_percent": utilization,
        "utilization_pct": utilization,
        "memory_used_bytes": stats.memory_used if stats else 0,
        "memory_total_bytes": total,
        "memory_threshold_pct": threshold_pct(budget_bytes, total),
        "temperature_c": int(stats.temperature_c or 0) if stats else 0,
    }


def device_fields(worker: WorkerView, restarts: dict[str, float], budget_bytes: int) -> dict[str, Any]:
    """One entry of `devices`: every worker, also on CPU, also while the worker is down."""
    fields: dict[str, Any] = {
        "worker": worker.number,
        "state": "unresponsive" if worker.state == "ready" and not worker.responsive else worker.state,
        "since": worker.since,
        "device": device_of(worker),
        "name": worker.device,
        "threads": worker.threads,
        "restarts": int(restarts.get(worker.name, 0)),
        "models_loaded": sum(status.state == "loaded" for status in worker.models.values()),
        "loading": _loads(worker),
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


def _loads(worker: WorkerView) -> list[dict[str, Any]]:
    """Models that the worker is loading. A profile loads with its model, and is not listed beside the model."""
    loading = {status.name: status for status in worker.models.values() if status.state == "loading"}
    return [
        {"model": name, "progress": round(status.progress, 3)}
        for name, status in loading.items()
        if name.rpartition(":")[0] not in loading
    ]


def _utilization_pct(worker: WorkerView, stats: Stats) -> float:
    """Utilization that the device reports; on CPU the share of the worker's threads in use."""
    if device_of(worker) != CPU:
        return round((stats.utilization or 0.0) * 100, 1)
    return round(min(100.0, stats.cpu * 100 / max(1, worker.threads)), 1)


def _batch_fields(batch: BatchRecord) -> list[Any]:
    """[items, tokens, budget in tokens, milliseconds] of a batch; a list, because there are many."""
    return [batch.items, batch.tokens, batch.budget, round(batch.seconds * 1e3, 2)]


def model_fields(catalog: Catalog, workers: Sequence[WorkerView], seen: Traffic) -> list[dict[str, Any]]:
    """Every model, by memory in descending order, then as in the catalog."""
    now_ns = time.monotonic_ns()
    models = [_model(entry, workers, seen, now_ns) for entry in catalog.entries]
    return sorted(models, key=lambda fields: -fields["memory_bytes"])


def _model(entry: ModelEntry, workers: Sequence[WorkerView], seen: Traffic, now_ns: int) -> dict[str, Any]:
    on = [(worker, worker.models[entry.id]) for worker in workers if entry.id in worker.models]
    best = min((status for _, status in on), key=_rank, default=ModelStatus(entry.id, "available"))
    held = [worker for worker, status in on if status.state == best.state != "available"]
    queues = [q for worker in workers if worker.stats for q in worker.stats.queues if q.model == entry.id]
    waiting = sum(queue.items for queue in queues)
    timing = seen.latencies.get(entry.id, {})
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
        "in_flight": int(_sum_of(seen, "penstock_requests_in_flight", entry.id)),
        "p50_ms": timing.get("p50_ms"),
        "p99_ms": timing.get("p99_ms"),
        "last_error": _error(best),
        "generation": _generation(entry.id, workers),
    }


def _generation(model: str, workers: Sequence[WorkerView]) -> dict[str, int] | None:
    """Sequences, cache and counts of a model that generates, summed over the workers that have the model loaded."""
    engines = [
        each for worker in workers if worker.stats for each in worker.stats.generations if each.model == model
    ]
    names = [name for name in GenerationStats.__struct_fields__ if name != "model"]
    return {name: sum(getattr(each, name) for each in engines) for name in names} if engines else None


def _rank(status: ModelStatus) -> int:
    return STATE_ORDER.index(status.state)


def _oldest_s(queues: Sequence[QueueState]) -> float:
    return round(max((queue.oldest_s for queue in queues), default=0.0), 3)


def _sum_of(seen: Traffic, family: str, model: str) -> float:
    return seen.totals.by_model.get(family, {}).get(model, 0.0)


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
        "max_sequence_length": status.max_sequence_length or entry.max_sequence_length or None,
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


@dataclass(frozen=True, slots=True)
class View:
    """Directory and readiness at one moment, copied on the event loop. `expected`: how many workers there should be."""

    workers: Sequence[WorkerView]
    ready: bool
    why: str
    expected: int = 0


def build(services: Services, view: View, seen: Traffic) -> dict[str, Any]:
    """The frame but for runs and recent requests (`recent_fields`), the same for all viewers.

    Reads nothing that the event loop changes, so any thread may build it.
    """
    budget = services.settings.worker.memory_budget_bytes
    gpus = [gpu_fields(worker, budget) for worker in view.workers if worker.device not in ("", CPU)]
    gpu = services.settings.server.gpu_type or (gpus[0]["gpu_type"] if gpus else CPU)
    models = model_fields(services.catalog, view.workers, seen)
    restarts = restart_fields(seen.totals)
    return {
        "timestamp": time.time(),
        "gpu": gpu,
        "machine_profile": services.settings.server.machine_profile or gpu,
        "loaded_models": [model["name"] for model in models if model["state"] == "loaded"],
        "server": _server(services),
        "gpus": gpus,
        "models": models,
        "counters": counter_fields(seen.totals),
        "histograms": histogram_fields(seen.totals),
        "ready": view.ready,
        "health": health_fields(
            view.ready, view.why, problems(view.workers, view.expected, models) + lacks(services)
        ),
        "name": services.settings.instance,
        "pool_name": "default",
        "gpu_count": len(gpus),
        "bundle": BUNDLE,
        "bundle_config_hash": "",
        "max_batch_requests": services.settings.batch.max_items,
        "saturated": _saturated(view.workers),
        "not_ready_because": "" if view.ready else view.why,
        "devices": [device_fields(worker, restarts, budget) for worker in view.workers],
        "totals": msgspec.structs.asdict(counted(seen.totals)),
        "latency": seen.latencies[""],
        "operations": operation_fields(seen, time.time()),
        "faults": fault_fields(seen.totals),
        "agent": agent_fields(services, seen.totals),
    }


def recent_fields(
    seen: Traffic, owner: str | None, *, operates: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Runs, the last requests and errors of the key with the public id `owner`; None: those of all callers.

    `operates`: whether the viewer may operate the server. Errors of one status, code, model and message are one entry:
    the newest of them, with their `count`.
    """
    requests = (record for record in seen.requests if owner is None or record.owner == owner)
    errors: dict[tuple[int, str, str, str], list[Recent]] = {}
    for record in seen.errors:
        if owner is None or record.owner == owner:
            errors.setdefault((record.status, record.code, record.model, record.message), []).append(record)
    return {
        "recent_requests": [request_fields(record) for record in itertools.islice(requests, SHOWN_REQUESTS)],
        "runs": run_fields(seen.runs, owner, operates=operates),
        "recent_errors": [
            {**request_fields(equal[0]), "count": len(equal)}
            for equal in itertools.islice(errors.values(), SHOWN_ERRORS)
        ],
    }


def _server(services: Services) -> dict[str, Any]:
    server = services.settings.server
    return {
        "version": server.version_header,
        "uptime_seconds": age_ns(os.getppid()) // 10**9 or int(time.time() - services.started_at),
        "user": server.status_user,
        "working_dir": server.status_working_dir,
        "pid": os.getppid(),
        "host": platform.node(),
        "penstock_version": VERSION,
        "frontends": services.settings.frontend_count,
        "keys_required": bool(server.keys_file),
    }


def _saturated(workers: Sequence[WorkerView]) -> bool:
    """Whether every worker has admitted as much as its bound allows."""
    stats = [worker.stats for worker in workers if worker.stats is not None]
    return bool(stats) and all(each.admitted >= each.bound for each in stats)
