"""Metric families of the tensor protocols: requests as frontends count them, runs of models as workers do.

Batch sizes above 32 are rounded up to a power of two in labels (`size_label`), so that their number is bounded; rows
are counted exactly beside them. `uuid` is that of the device that ran. `ipc.metrics.nv_families` shows the same
figures under
the names that other servers use.
"""

from __future__ import annotations

from ipc.metrics.family import Family

EXACT_SIZES = 32
LARGEST_SIZE = 1 << 20
VERSION_ALONE = 1
"""Version of a catalog model that has no others."""
UNVERSIONED = -1
"""Version label of requests that failed before their version was known; their batch size is 0."""
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
CALLS = ("status", "profile", "health", "control", "regions", "index")

_MODEL = ("model", "version")
_SIZED = (*_MODEL, "batch_size")
_ANSWERED = (*_SIZED, "uuid")
_RUN = ("model", "batch_size", "uuid")
_GPU = ("worker", "uuid")

FRONTEND = (
    Family("infer_requests", "counter", "penstock_infer_requests", "Tensor requests answered.", _ANSWERED),
    Family(
        "infer_seconds", "counter", "penstock_infer_request_seconds", "Time of the answered ones.", _ANSWERED
    ),
    Family("infer_queue", "counter", "penstock_infer_queue_seconds", "Of it, waiting.", _ANSWERED),
    Family(
        "infer_input", "counter", "penstock_infer_compute_input_seconds", "Of it, reading inputs.", _ANSWERED
    ),
    Family("infer_compute", "counter", "penstock_infer_compute_seconds", "Of it, in the model.", _ANSWERED),
    Family(
        "infer_output",
        "counter",
        "penstock_infer_compute_output_seconds",
        "Of it, writing outputs.",
        _ANSWERED,
    ),
    Family(
        "infer_rows", "counter", "penstock_infer_rows", "Batch sizes of answered requests.", (*_MODEL, "uuid")
    ),
    Family(
        "infer_failures",
        "counter",
        "penstock_infer_failures",
        "Tensor requests that failed.",
        (*_SIZED, "reason"),
    ),
    Family("infer_failed", "counter", "penstock_infer_failed_seconds", "Time of the failed ones.", _SIZED),
    Family(
        "infer_last",
        "gauge",
        "penstock_infer_last_timestamp_seconds",
        "When the last tensor request was answered.",
        _MODEL,
        mode="max",
    ),
    Family("infer_calls", "counter", "penstock_infer_calls", "Calls about server and models.", ("kind",)),
    Family("infer_calls_time", "counter", "penstock_infer_calls_seconds", "Time of them.", ("kind",)),
)
WORKER = (
    Family("runs", "counter", "penstock_infer_runs", "Runs of models by batch size.", _RUN),
    Family(
        "runs_input",
        "counter",
        "penstock_infer_runs_input_seconds",
        "Joining and placing their inputs.",
        _RUN,
    ),
    Family(
        "runs_compute",
        "counter",
        "penstock_infer_runs_compute_seconds",
        "The runs themselves.",
        _RUN,
    ),
    Family(
        "runs_output",
        "counter",
        "penstock_infer_runs_output_seconds",
        "Writing their outputs.",
        _RUN,
    ),
    Family("parts", "counter", "penstock_stream_parts", "Parts of streamed answers.", ("model",)),
    Family(
        "gpu_memory_total",
        "gauge",
        "penstock_gpu_memory_total_bytes",
        "Memory of the device.",
        _GPU,
        mode="livemostrecent",
    ),
    Family(
        "gpu_power",
        "gauge",
        "penstock_gpu_power_watts",
        "Power that the device draws, 0 when nobody can tell.",
        _GPU,
        mode="livemostrecent",
    ),
    Family(
        "gpu_power_limit",
        "gauge",
        "penstock_gpu_power_limit_watts",
        "Power that the device may draw.",
        _GPU,
        mode="livemostrecent",
    ),
    Family(
        "gpu_energy",
        "gauge",
        "penstock_gpu_energy_joules",
        "Energy that the device took since the worker started.",
        _GPU,
        mode="livemostrecent",
    ),
)


def size_label(rows: int) -> int:
    """The batch size that stands for `rows` in labels: itself up to 32, above the next power of two."""
    if rows <= EXACT_SIZES:
        return max(rows, 0)
    return min(1 << (rows - 1).bit_length(), LARGEST_SIZE)


def split_id(entry: str) -> tuple[str, int]:
    """(name, version) of a catalog id: `<name>@<version>` of a repository, any other is a model of one version."""
    name, at, version = entry.rpartition("@")
    return (name, int(version)) if at and version.isdigit() else (entry, VERSION_ALONE)
