"""Every metric family, declared once for both sides, in files named by slot so that they stay bounded.

prometheus_client's multi-process mode keeps one file per process identity. The identity here is the slot (`frontend-3`,
`worker-0`), so counters go on across restarts and the number of files does not grow. Gauges all use a `live` mode and
are removed when a slot starts again. Any frontend serves `/metrics` by merging the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ipc.paths import RunPaths

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZE_BUCKETS = tuple(2.0**n for n in range(11))
TOKEN_BUCKETS = tuple(2.0**n for n in range(6, 17))
RATIO_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
PHASES = ("queue", "tokenize", "device", "copy", "encode", "total")
LANES = ("interactive", "bulk")
STATES = ("available", "loading", "loaded", "unloading", "failed")
REJECTIONS = ("queue_full", "rate", "deadline", "too_long", "draining")
CANCEL_STAGES = ("queued", "running")
UNKNOWN = "unknown"


def configure(paths: RunPaths, slot: str) -> None:
    """Bind this process to the metric files of `slot`; call it before a family is made."""
    directory = str(paths.metrics())
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
    from prometheus_client import multiprocess, values

    # NOTE: the value class is chosen when the library is imported, which may have been before the directory was known.
    values.ValueClass = values.MultiProcessValue(lambda: slot)
    multiprocess.mark_process_dead(slot, directory)


def retire(paths: RunPaths, slot: str) -> None:
    """A process ends in good order: its gauges go, its counters stay."""
    from prometheus_client import multiprocess

    multiprocess.mark_process_dead(slot, str(paths.metrics()))


class _Families:
    """Makes families with the multi-process options filled in."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry()

    def counter(self, name: str, text: str, *labels: str):  # type: ignore[no-untyped-def]
        """A counter family."""
        from prometheus_client import Counter

        return Counter(name, text, labels, registry=self._registry)

    def gauge(self, name: str, text: str, *labels: str, mode: str = "livesum"):  # type: ignore[no-untyped-def]
        """A gauge family with a live mode."""
        from prometheus_client import Gauge

        return Gauge(name, text, labels, registry=self._registry, multiprocess_mode=mode)

    def histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str):  # type: ignore[no-untyped-def]
        """A histogram family."""
        from prometheus_client import Histogram

        return Histogram(name, text, labels, registry=self._registry, buckets=tuple(buckets))


class FrontendMetrics:
    """Families fed by frontends."""

    def __init__(self) -> None:
        f = _Families()
        self.requests = f.counter(
            "penstock_requests", "Requests by outcome.", "protocol", "operation", "model", "code"
        )
        self.duration = f.histogram(
            "penstock_request_duration_seconds",
            "Time per phase.",
            LATENCY_BUCKETS,
            "operation",
            "model",
            "phase",
        )
        self.in_flight = f.gauge("penstock_requests_in_flight", "Requests being served.", "model", "lane")
        self.rejected = f.counter("penstock_rejected", "Requests refused before they ran.", "model", "reason")
        self.retries = f.counter("penstock_retries", "Requests sent again after a worker was lost.", "reason")
        self.poison = f.counter("penstock_poison", "Inputs refused because they crashed workers.", "reason")
        self.ready = f.gauge("penstock_ready", "1 when this server accepts traffic.", mode="livemax")
        self.workers_joined = f.gauge(
            "penstock_worker_up", "1 when a worker answers.", "worker", mode="livemax"
        )
        self.build_info = f.gauge(
            "penstock_build_info", "Constant 1 with the version.", "version", mode="livemax"
        )
        self.sie_requests = f.counter("sie_requests", "Total request count.", "model", "endpoint", "status")
        self.sie_duration = f.histogram(
            "sie_request_duration_seconds", "Latency by phase.", LATENCY_BUCKETS, "model", "endpoint", "phase"
        )

    def touch(self, models: Iterable[str], version: str) -> None:
        """Make every family exist at zero from the first scrape on."""
        self.build_info.labels(version).set(1)
        self.ready.set(0)
        for reason in ("suspect", "bystander"):
            self.retries.labels(reason)
        self.poison.labels("crashed"), self.poison.labels("refused")
        for model in (*models, UNKNOWN):
            self.requests.labels("sie", "encode", model, "200")
            self.sie_requests.labels(model, "encode", "success")
            for reason in REJECTIONS:
                self.rejected.labels(model, reason)
            for lane in LANES:
                self.in_flight.labels(model, lane).set(0)
            for phase in PHASES:
                self.duration.labels("encode", model, phase)
            for phase in ("total", "queue", "tokenize", "inference"):
                self.sie_duration.labels(model, "encode", phase)


class WorkerMetrics:
    """Families fed by workers."""

    def __init__(self, worker: str) -> None:
        f = _Families()
        self.worker = worker
        self.queue_depth = f.gauge("penstock_queue_depth", "Items waiting.", "model", "lane")
        self.queue_tokens = f.gauge("penstock_queue_tokens", "Tokens waiting.", "model", "lane")
        self.queue_oldest = f.gauge(
            "penstock_queue_oldest_seconds", "Age of the oldest item.", "model", "lane", mode="livemax"
        )
        self.cancelled = f.counter("penstock_cancelled", "Requests whose caller went away.", "model", "stage")
        self.saved = f.counter(
            "penstock_cancelled_saved_seconds", "Device time not spent on cancelled work.", "model", "stage"
        )
        self.batch_size = f.histogram(
            "penstock_batch_size", "Items per batch.", SIZE_BUCKETS, "model", "worker"
        )
        self.batch_tokens = f.histogram(
            "penstock_batch_tokens", "Tokens per batch.", TOKEN_BUCKETS, "model", "worker"
        )
        self.padding = f.histogram(
            "penstock_padding_ratio", "Share of padding per batch.", RATIO_BUCKETS, "model", "worker"
        )
        self.oom = f.counter("penstock_oom", "Batches that ran out of memory.", "model", "worker")
        self.budget = f.gauge(
            "penstock_batch_budget_tokens",
            "Token budget of a batch.",
            "model",
            "worker",
            mode="livemostrecent",
        )
        self.state = f.gauge(
            "penstock_model_state",
            "1 for the present state.",
            "model",
            "worker",
            "state",
            mode="livemostrecent",
        )
        self.load_seconds = f.gauge(
            "penstock_model_load_seconds",
            "Duration of the last load.",
            "model",
            "worker",
            mode="livemostrecent",
        )
        self.load_progress = f.gauge(
            "penstock_model_load_progress_ratio",
            "Progress of a load.",
            "model",
            "worker",
            mode="livemostrecent",
        )
        self.memory = f.gauge(
            "penstock_model_memory_bytes", "Memory of a model.", "model", "worker", mode="livemostrecent"
        )
        self.shm_used = f.gauge(
            "penstock_shm_bytes_used", "Arena bytes in use.", "worker", mode="livemostrecent"
        )
        self.shm_total = f.gauge("penstock_shm_bytes_total", "Arena size.", "worker", mode="livemostrecent")
        self.shm_leases = f.gauge(
            "penstock_shm_leases", "Blocks that frontends may read.", "worker", mode="livemostrecent"
        )
        self.revoked = f.counter("penstock_shm_leases_revoked", "Leases taken back.", "worker", "reason")
        self.tokens = f.counter("penstock_tokens", "Tokens processed.", "model", "direction")
        self.truncated = f.counter(
            "penstock_truncated_inputs", "Inputs cut to the model's length.", "model", "policy"
        )
        self.gpu_memory = f.gauge(
            "penstock_gpu_memory_bytes", "Device memory in use.", "worker", "uuid", mode="livemostrecent"
        )
        self.gpu_utilization = f.gauge(
            "penstock_gpu_utilization_ratio",
            "Share of time the device was busy.",
            "worker",
            "uuid",
            mode="livemostrecent",
        )
        self.sie_batch_size = f.histogram("sie_batch_size", "Batch size distribution.", SIZE_BUCKETS, "model")
        self.sie_tokens = f.counter("sie_tokens_processed", "Total tokens processed.", "model")
        self.sie_queue_depth = f.gauge("sie_queue_depth", "Pending items per model.", "model")
        self.sie_loaded = f.gauge("sie_model_loaded", "Model load status.", "model", "device", mode="livemax")
        self.sie_memory = f.gauge("sie_model_memory_bytes", "Memory per model.", "model", "device")

    def touch(self, models: Iterable[str], device: str) -> None:
        """Make every family exist at zero from the first scrape on."""
        w = self.worker
        self.shm_used.labels(w).set(0), self.shm_leases.labels(w).set(0)
        self.revoked.labels(w, "age")
        self.gpu_memory.labels(w, device).set(0), self.gpu_utilization.labels(w, device).set(0)
        for model in models:
            for lane in LANES:
                for gauge in (self.queue_depth, self.queue_tokens, self.queue_oldest):
                    gauge.labels(model, lane).set(0)
            for stage in CANCEL_STAGES:
                self.cancelled.labels(model, stage), self.saved.labels(model, stage)
            for family in (self.batch_size, self.batch_tokens, self.padding, self.oom):
                family.labels(model, w)
            for gauge in (self.budget, self.load_seconds, self.load_progress, self.memory):
                gauge.labels(model, w).set(0)
            for state in STATES:
                self.state.labels(model, w, state).set(0)
            self.tokens.labels(model, "in"), self.truncated.labels(model, "truncate")
            self.sie_batch_size.labels(model), self.sie_tokens.labels(model)
            self.sie_queue_depth.labels(model).set(0)
            self.sie_loaded.labels(model, device).set(0), self.sie_memory.labels(model, device).set(0)


class SupervisorMetrics:
    """Families fed by the embedded supervisor."""

    def __init__(self) -> None:
        f = _Families()
        self.restarts = f.counter(
            "penstock_worker_restarts", "Workers started again, by cause.", "worker", "reason"
        )
        self.quarantined = f.gauge(
            "penstock_quarantined", "1 when a slot is no longer restarted.", "worker", mode="livemax"
        )


def render(paths: RunPaths) -> bytes:
    """Text exposition of all slots merged; reads files, so call it in a thread."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(paths.metrics()))
    return generate_latest(registry)
