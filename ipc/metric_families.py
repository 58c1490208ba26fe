"""Every metric family as a row of a table: kind, name, help text, labels, buckets or gauge mode, by who feeds it."""

from __future__ import annotations

from typing import Literal, NamedTuple

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZE_BUCKETS = tuple(2.0**n for n in range(11))
TOKEN_BUCKETS = tuple(2.0**n for n in range(6, 17))
RATIO_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)

GaugeMode = Literal["livesum", "livemax", "livemostrecent"]
Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One family; `attribute` is its name in the code."""

    attribute: str
    kind: Kind
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    mode: GaugeMode = "livesum"


FRONTEND = (
    Family(
        "requests",
        "counter",
        "penstock_requests",
        "Requests by outcome.",
        ("protocol", "operation", "model", "code"),
    ),
    Family(
        "duration",
        "histogram",
        "penstock_request_duration_seconds",
        "Time per phase.",
        ("operation", "model", "phase"),
        buckets=LATENCY_BUCKETS,
    ),
    Family("in_flight", "gauge", "penstock_requests_in_flight", "Requests being served.", ("model", "lane")),
    Family(
        "rejected", "counter", "penstock_rejected", "Requests refused before they ran.", ("model", "reason")
    ),
    Family(
        "retries", "counter", "penstock_retries", "Requests sent again after a worker was lost.", ("reason",)
    ),
    Family(
        "poison", "counter", "penstock_poison", "Inputs refused because they crashed workers.", ("reason",)
    ),
    Family(
        "by_key", "counter", "penstock_requests_by_key", "Requests by API key and outcome.", ("key", "code")
    ),
    Family(
        "access_refused",
        "counter",
        "penstock_access_refused",
        "Requests refused for their API key.",
        ("reason",),
    ),
    Family(
        "traced",
        "counter",
        "penstock_traced_requests",
        "Traced requests whose spans were exported, failed to be, or were dropped.",
        ("outcome",),
    ),
    Family("ready", "gauge", "penstock_ready", "1 when this server accepts traffic.", (), mode="livemax"),
    Family(
        "workers_joined",
        "gauge",
        "penstock_worker_up",
        "1 when a worker answers.",
        ("worker",),
        mode="livemax",
    ),
    Family(
        "build_info",
        "gauge",
        "penstock_build_info",
        "Constant 1 with the version.",
        ("version",),
        mode="livemax",
    ),
    Family(
        "sie_requests", "counter", "sie_requests", "Total request count.", ("model", "endpoint", "status")
    ),
    Family("sie_active", "gauge", "sie_active_requests", "Requests being served.", ("model",)),
    Family(
        "sie_duration",
        "histogram",
        "sie_request_duration_seconds",
        "Latency by phase.",
        ("model", "endpoint", "phase"),
        buckets=LATENCY_BUCKETS,
    ),
)
WORKER = (
    Family("queue_depth", "gauge", "penstock_queue_depth", "Items waiting.", ("model", "lane")),
    Family("queue_tokens", "gauge", "penstock_queue_tokens", "Tokens waiting.", ("model", "lane")),
    Family(
        "queue_oldest",
        "gauge",
        "penstock_queue_oldest_seconds",
        "Age of the oldest item.",
        ("model", "lane"),
        mode="livemax",
    ),
    Family(
        "cancelled", "counter", "penstock_cancelled", "Requests whose caller went away.", ("model", "stage")
    ),
    Family(
        "saved",
        "counter",
        "penstock_cancelled_saved_seconds",
        "Device time not spent on cancelled work.",
        ("model", "stage"),
    ),
    Family(
        "batch_size",
        "histogram",
        "penstock_batch_size",
        "Items per batch.",
        ("model", "worker"),
        buckets=SIZE_BUCKETS,
    ),
    Family(
        "batch_tokens",
        "histogram",
        "penstock_batch_tokens",
        "Tokens per batch.",
        ("model", "worker"),
        buckets=TOKEN_BUCKETS,
    ),
    Family(
        "padding",
        "histogram",
        "penstock_padding_ratio",
        "Share of padding per batch.",
        ("model", "worker"),
        buckets=RATIO_BUCKETS,
    ),
    Family("oom", "counter", "penstock_oom", "Batches that ran out of memory.", ("model", "worker")),
    Family(
        "budget",
        "gauge",
        "penstock_batch_budget_tokens",
        "Token budget of a batch.",
        ("model", "worker"),
        mode="livemostrecent",
    ),
    Family(
        "state",
        "gauge",
        "penstock_model_state",
        "1 for the present state.",
        ("model", "worker", "state"),
        mode="livemostrecent",
    ),
    Family(
        "load_seconds",
        "gauge",
        "penstock_model_load_seconds",
        "Duration of the last load.",
        ("model", "worker"),
        mode="livemostrecent",
    ),
    Family(
        "load_progress",
        "gauge",
        "penstock_model_load_progress_ratio",
        "Progress of a load.",
        ("model", "worker"),
        mode="livemostrecent",
    ),
    Family(
        "memory",
        "gauge",
        "penstock_model_memory_bytes",
        "Memory of a model.",
        ("model", "worker"),
        mode="livemostrecent",
    ),
    Family(
        "shm_used",
        "gauge",
        "penstock_shm_bytes_used",
        "Arena bytes in use.",
        ("worker",),
        mode="livemostrecent",
    ),
    Family(
        "shm_total", "gauge", "penstock_shm_bytes_total", "Arena size.", ("worker",), mode="livemostrecent"
    ),
    Family(
        "shm_leases",
        "gauge",
        "penstock_shm_leases",
        "Blocks that frontends may read.",
        ("worker",),
        mode="livemostrecent",
    ),
    Family("revoked", "counter", "penstock_shm_leases_revoked", "Leases taken back.", ("worker", "reason")),
    Family("tokens", "counter", "penstock_tokens", "Tokens processed.", ("model", "direction")),
    Family(
        "truncated",
        "counter",
        "penstock_truncated_inputs",
        "Inputs cut to the model's length.",
        ("model", "policy"),
    ),
    Family(
        "gpu_memory",
        "gauge",
        "penstock_gpu_memory_bytes",
        "Device memory in use.",
        ("worker", "uuid"),
        mode="livemostrecent",
    ),
    Family(
        "gpu_temperature",
        "gauge",
        "penstock_gpu_temperature_celsius",
        "Temperature of the device, 0 when nobody can tell.",
        ("worker", "uuid"),
        mode="livemostrecent",
    ),
    Family(
        "gpu_utilization",
        "gauge",
        "penstock_gpu_utilization_ratio",
        "Share of time the device was busy.",
        ("worker", "uuid"),
        mode="livemostrecent",
    ),
    Family(
        "sie_batch_size",
        "histogram",
        "sie_batch_size",
        "Batch size distribution.",
        ("model",),
        buckets=SIZE_BUCKETS,
    ),
    Family("sie_tokens", "counter", "sie_tokens_processed", "Total tokens processed.", ("model",)),
    Family("sie_queue_depth", "gauge", "sie_queue_depth", "Pending items per model.", ("model",)),
    Family(
        "sie_request_queue", "gauge", "sie_request_queue_depth", "The same, under its other name.", ("model",)
    ),
    Family(
        "sie_gpu_items",
        "histogram",
        "sie_gpu_batch_items",
        "Items per batch on the device.",
        ("model",),
        buckets=SIZE_BUCKETS[:10],
    ),
    Family(
        "sie_gpu_tokens",
        "histogram",
        "sie_gpu_batch_tokens",
        "Tokens per batch on the device.",
        ("model",),
        buckets=TOKEN_BUCKETS[:10],
    ),
    Family(
        "sie_oom_attempted",
        "counter",
        "sie_oom_recoveries_attempted",
        "Batches that ran out of memory.",
        ("model",),
    ),
    Family(
        "sie_oom_succeeded",
        "counter",
        "sie_oom_recoveries_succeeded",
        "Of them, those that lost no item.",
        ("model",),
    ),
    Family(
        "sie_oom_terminal",
        "counter",
        "sie_oom_terminal_failures",
        "Items that did not fit even alone.",
        ("model",),
    ),
    Family(
        "sie_oom_clears", "counter", "sie_oom_cache_clears", "Cached device memory given back.", ("model",)
    ),
    Family("sie_oom_splits", "counter", "sie_oom_batch_splits", "Batches split in halves.", ("model",)),
    Family(
        "sie_loaded", "gauge", "sie_model_loaded", "Model load status.", ("model", "device"), mode="livemax"
    ),
    Family("sie_memory", "gauge", "sie_model_memory_bytes", "Memory per model.", ("model", "device")),
    Family(
        "sie_idle_evictions", "counter", "sie_idle_evictions", "Models unloaded for being idle.", ("model",)
    ),
    Family(
        "loads", "counter", "penstock_model_loads", "Loads by how they ended.", ("model", "worker", "outcome")
    ),
    Family(
        "unloads",
        "counter",
        "penstock_model_unloads",
        "Models unloaded, by why.",
        ("model", "worker", "reason"),
    ),
    Family(
        "model_budget",
        "gauge",
        "penstock_model_budget_bytes",
        "Memory that models may take together.",
        ("worker",),
        mode="livemostrecent",
    ),
)
SUPERVISOR = (
    Family(
        "restarts",
        "counter",
        "penstock_worker_restarts",
        "Workers started again, by cause.",
        ("worker", "reason"),
    ),
    Family(
        "quarantined",
        "gauge",
        "penstock_quarantined",
        "1 when a slot is no longer restarted.",
        ("worker",),
        mode="livemax",
    ),
)
