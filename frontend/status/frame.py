"""One frame of the status stream: the fields of the SIE contract in both spellings, and what the page needs besides."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontend.engine.interface import WorkerView
from frontend.services import Services
from frontend.status import traffic
from frontend.status.devices import device_fields, gpu_fields
from frontend.status.gpu_types import CPU
from frontend.status.models import model_fields
from ipc.processes.liveness import start_ticks
from ipc.version import VERSION

BUNDLE = "default"


@dataclass(frozen=True, slots=True)
class View:
    """What the event loop knew at one moment."""

    workers: Sequence[WorkerView]
    ready: bool
    why: str


def build(services: Services, view: View, seen: traffic.Traffic) -> dict[str, Any]:
    """The frame. Reads nothing that the event loop changes, so any thread may build it."""
    budget = services.settings.worker.memory_budget_bytes
    gpus = [gpu_fields(worker, budget) for worker in view.workers if worker.name not in ("", CPU)]
    gpu = services.settings.server.gpu_type or (gpus[0]["gpu_type"] if gpus else CPU)
    models = model_fields(services.catalog, view.workers, seen)
    restarts = traffic.restart_fields(seen.totals)
    return {
        "timestamp": time.time(),
        "gpu": gpu,
        "machine_profile": services.settings.server.machine_profile or gpu,
        "loaded_models": [model["name"] for model in models if model["state"] == "loaded"],
        "server": _server(services),
        "gpus": gpus,
        "models": models,
        "counters": traffic.counter_fields(seen.totals),
        "histograms": traffic.histogram_fields(seen.totals),
        "ready": view.ready,
        "name": services.settings.instance,
        "pool_name": "default",
        "gpu_count": len(gpus),
        "bundle": BUNDLE,
        "bundle_config_hash": "",
        "max_batch_requests": services.settings.batch.max_items,
        "saturated": _saturated(view.workers),
        "not_ready_because": "" if view.ready else view.why,
        "devices": [device_fields(worker, restarts, budget) for worker in view.workers],
        "latency": seen.latencies[""],
        "faults": traffic.fault_fields(seen.totals),
        "recent_requests": [traffic.request_fields(record) for record in seen.requests],
        "recent_errors": [traffic.request_fields(record) for record in seen.errors],
    }


def _server(services: Services) -> dict[str, Any]:
    server = services.settings.server
    return {
        "version": server.version_header,
        "uptime_seconds": int(time.time() - server_started_at(services)),
        "user": server.status_user,
        "working_dir": server.status_working_dir,
        "pid": os.getppid(),
        "penstock_version": VERSION,
        "frontends": services.settings.frontend_count,
        "keys_required": bool(server.keys_file),
    }


def server_started_at(services: Services) -> float:
    """Unix seconds at which the arbiter started, the same for all frontends; of this frontend when it has none."""
    ticks = start_ticks(os.getppid())
    if not ticks:
        return services.started_at
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_at + ticks / os.sysconf("SC_CLK_TCK")


def _saturated(workers: Sequence[WorkerView]) -> bool:
    """Whether every worker has as much as it admits."""
    stats = [worker.stats for worker in workers if worker.stats is not None]
    return bool(stats) and all(each.admitted >= each.bound for each in stats)
