"""Every metric family as a row of a table: kind, name, help text, labels, buckets or gauge mode.

The rows are ordered by the process that feeds the family.
"""

from __future__ import annotations

from ipc.metrics import infer_families
from ipc.metrics import sie_families as sie_metrics
from ipc.metrics.family import (
    LATENCY_BUCKETS,
    RATIO_BUCKETS,
    SIZE_BUCKETS,
    TOKEN_BUCKETS,
    Family,
)

__all__ = ["FRONTEND", "SUPERVISOR", "WORKER", "Family"]

FRONTEND = (
    *infer_families.FRONTEND,
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
        "Time per phase, of requests that were answered (ok) or not (error).",
        ("operation", "model", "phase", "outcome"),
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
        "input_shm_used",
        "gauge",
        "penstock_input_shm_bytes_used",
        "Input arena bytes in use.",
        ("frontend",),
        mode="livemostrecent",
    ),
    Family(
        "copied",
        "counter",
        "penstock_tensor_copied_bytes",
        "Bytes of named tensors that were copied, by place.",
        ("process", "place"),
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
    *infer_families.WORKER,
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
    Family("shm_total", "gauge", "penstock_shm_bytes", "Arena size.", ("worker",), mode="livemostrecent"),
    Family(
        "shm_leases",
        "gauge",
        "penstock_shm_leases",
        "Blocks that frontends may read.",
        ("worker",),
        mode="livemostrecent",
    ),
    Family("revoked", "counter", "penstock_shm_leases_revoked", "Leases taken back.", ("worker", "reason")),
    Family(
        "copied",
        "counter",
        "penstock_tensor_copied_bytes",
        "Bytes of named tensors that were copied, by place.",
        ("process", "place"),
    ),
    Family(
        "sequences",
        "gauge",
        "penstock_sequences",
        "Sequences that have a slot (active) or wait for one (waiting).",
        ("model", "worker", "state"),
        mode="livemostrecent",
    ),
    Family(
        "sequences_expired",
        "counter",
        "penstock_sequences_expired",
        "Sequences whose slot was taken back because nobody asked for them.",
        ("model", "worker"),
    ),
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
    *sie_metrics.WORKER,
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
