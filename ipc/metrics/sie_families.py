"""Families that workers feed under the names of the SIE contract, for dashboards that exist."""

from __future__ import annotations

from ipc.metrics.family import RATIO_BUCKETS, SIZE_BUCKETS, TOKEN_BUCKETS, Family

WORKER = (
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
        "sie_adaptive_wait", "gauge", "sie_adaptive_batch_wait_ms", "Wait to fill a batch: none.", ("model",)
    ),
    Family(
        "sie_adaptive_p50",
        "gauge",
        "sie_adaptive_p50_ms",
        "Median of recent batches.",
        ("model",),
        mode="livemax",
    ),
    Family(
        "sie_adaptive_cost",
        "gauge",
        "sie_adaptive_batch_cost",
        "Tokens a batch may have.",
        ("model",),
        mode="livemax",
    ),
    Family(
        "sie_adaptive_fill",
        "gauge",
        "sie_adaptive_fill_ratio",
        "Fill of recent batches, 0 to 1.",
        ("model",),
        mode="livemax",
    ),
    Family(
        "sie_adaptive_efficiency",
        "histogram",
        "sie_adaptive_batch_efficiency",
        "Tokens of a batch over those it may have.",
        ("model",),
        buckets=RATIO_BUCKETS,
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
    Family(
        "sie_oom_evictions",
        "counter",
        "sie_oom_evictions_triggered",
        "Models unloaded for an item of this model that did not fit alone.",
        ("model",),
    ),
    Family("sie_oom_splits", "counter", "sie_oom_batch_splits", "Batches split in halves.", ("model",)),
    Family(
        "sie_loaded", "gauge", "sie_model_loaded", "Model load status.", ("model", "device"), mode="livemax"
    ),
    Family("sie_memory", "gauge", "sie_model_memory_bytes", "Memory per model.", ("model", "device")),
    Family(
        "sie_idle_evictions", "counter", "sie_idle_evictions", "Models unloaded for being idle.", ("model",)
    ),
)
