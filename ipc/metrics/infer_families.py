"""Metric families of the tensor protocols: requests as frontends count them, runs of models as workers do.

Batch sizes above 32 are rounded up to a power of two in labels (`size_label`), so that their number is bounded; rows
are counted exactly beside them. `uuid` names the device that ran.

The same figures also stand under the names that other inference servers gave them (`nv_inference_*`, `nv_gpu_*`). These
are sums of our own families, made when `/metrics` is asked for, so counting costs nothing. Their counters have no
`_total`, which prometheus_client would add; the text is therefore written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

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


Labels = tuple[tuple[str, str], ...]
Tags = Mapping[tuple[str, int], Mapping[str, str]]
"""The `metric_tags` of models, by name and version."""
NO_TAGS: Tags = MappingProxyType({})
_Samples = dict[str, list[tuple[dict[str, str], float]]]
_NO_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_NO_GPU = ("", "cpu")


class NvFamily(NamedTuple):
    """One family: `sources` are samples of ours, added up over all labels but those it has, times `scale`.

    Of models it has further labels: `gpu_uuid` where a GPU is known to have run them, and their tags, with an
    underscore in front of their names.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    sources: tuple[str, ...]
    scale: float = 1
    labels: tuple[str, ...] = ("model", "version")


_COMPUTE = tuple(
    f"penstock_infer_{phase}_seconds_total" for phase in ("compute_input", "compute", "compute_output")
)
_REQUEST = "penstock_infer_request_seconds_total"
_REASONED = ("model", "version", "reason")
_US = 1e6

INFERENCE = (
    NvFamily(
        "nv_inference_request_success", "counter", "Requests answered.", ("penstock_infer_requests_total",)
    ),
    NvFamily(
        "nv_inference_request_failure",
        "counter",
        "Requests failed.",
        ("penstock_infer_failures_total",),
        labels=_REASONED,
    ),
    NvFamily("nv_inference_count", "counter", "Inferences performed.", ("penstock_infer_rows_total",)),
    NvFamily("nv_inference_exec_count", "counter", "Model executions.", ("penstock_infer_runs_total",)),
    NvFamily("nv_inference_pending_request_count", "gauge", "Requests that wait.", ("penstock_queue_depth",)),
    NvFamily("nv_inference_request_duration_us", "counter", "Microseconds of requests.", (_REQUEST,), _US),
    NvFamily(
        "nv_inference_queue_duration_us",
        "counter",
        "Microseconds of waiting.",
        ("penstock_infer_queue_seconds_total",),
        _US,
    ),
    NvFamily(
        "nv_inference_compute_input_duration_us", "counter", "Microseconds of inputs.", _COMPUTE[:1], _US
    ),
    NvFamily(
        "nv_inference_compute_infer_duration_us", "counter", "Microseconds of models.", _COMPUTE[1:2], _US
    ),
    NvFamily(
        "nv_inference_compute_output_duration_us", "counter", "Microseconds of outputs.", _COMPUTE[2:], _US
    ),
    NvFamily("nv_inference_compute_duration_us", "counter", "Microseconds of all three.", _COMPUTE, _US),
)
GPU = tuple(
    NvFamily(name, "gauge", text, (source,), labels=("gpu_uuid",))
    for name, text, source in (
        ("nv_gpu_utilization", "Utilization, 0 to 1.", "penstock_gpu_utilization_ratio"),
        ("nv_gpu_memory_total_bytes", "Memory.", "penstock_gpu_memory_total_bytes"),
        ("nv_gpu_memory_used_bytes", "Memory in use.", "penstock_gpu_memory_bytes"),
        ("nv_gpu_power_usage", "Watts drawn.", "penstock_gpu_power_watts"),
        ("nv_gpu_power_limit", "Watts allowed.", "penstock_gpu_power_limit_watts"),
        ("nv_energy_consumption", "Joules since the start.", "penstock_gpu_energy_joules"),
    )
)
LOAD_RATIO = NvFamily(
    "nv_inference_load_ratio", "gauge", "Request duration by compute duration.", (_REQUEST, *_COMPUTE)
)


def text(families: Iterable[Any], tags: Tags = NO_TAGS) -> bytes:
    """Exposition of all of them, from families as prometheus_client collects them."""
    wanted = {source for family in (*INFERENCE, *GPU) for source in family.sources}
    samples: _Samples = {source: [] for source in wanted}
    for family in families:
        for sample in family.samples:
            if sample.name in wanted:
                samples[sample.name].append((sample.labels, sample.value))
    lines: list[str] = []
    for row in INFERENCE:
        lines += _lines(row, _sums(row, samples, tags))
    for row in GPU:
        lines += _lines(row, _of_devices(row, samples))
    lines += _lines(LOAD_RATIO, _ratios(samples, tags))
    return "".join(lines).encode()


def _sums(row: NvFamily, samples: _Samples, tags: Tags) -> dict[Labels, float]:
    sums: dict[Labels, float] = {}
    for source in row.sources:
        for labels, value in samples[source]:
            name, version = labels["model"], labels.get("version")
            if version is None:
                # What workers count is by catalog id.
                name, number = split_id(name)
                version = str(number)
            known = {**labels, "model": name, "version": version}
            key = (
                *((label, known[label]) for label in row.labels),
                *_gpu_label(labels.get("uuid", "")),
                *_tag_labels(tags.get((name, int(version)), {})),
            )
            sums[key] = sums.get(key, 0.0) + value * row.scale
    return _without_idle(sums)


def _gpu_label(uuid: str) -> Labels:
    return () if uuid in _NO_GPU else (("gpu_uuid", f"GPU-{uuid.removeprefix('GPU-')}"),)


def _tag_labels(tags: Mapping[str, str]) -> Labels:
    # NOTE: two underscores are reserved, and a name may stand only once.
    names = {f"_{_NO_LABEL.sub('_', tag).lstrip('_')}": value for tag, value in sorted(tags.items())}
    return tuple(names.items())


def _without_idle(sums: dict[Labels, float]) -> dict[Labels, float]:
    """The same without the zeros of no GPU, with which every family begins, where there are figures of GPUs."""
    with_gpu = {_without_gpu(key) for key in sums if _without_gpu(key) != key}
    return {key: value for key, value in sums.items() if value or key not in with_gpu}


def _without_gpu(key: Labels) -> Labels:
    return tuple(label for label in key if label[0] != "gpu_uuid")


def _of_devices(row: NvFamily, samples: _Samples) -> dict[Labels, float]:
    """By device: workers that share one measure the same."""
    found: dict[Labels, float] = {}
    for labels, value in samples[row.sources[0]]:
        if key := _gpu_label(labels["uuid"]):
            found[key] = max(found.get(key, 0.0), value)
    return found


def _ratios(samples: _Samples, tags: Tags) -> dict[Labels, float]:
    requests = _sums(LOAD_RATIO._replace(sources=(_REQUEST,)), samples, tags)
    computed = _sums(LOAD_RATIO._replace(sources=_COMPUTE), samples, tags)
    return {key: value / computed[key] for key, value in requests.items() if computed.get(key)}


def _lines(row: NvFamily, values: dict[Labels, float]) -> Iterator[str]:
    yield f"# HELP {row.name} {row.text}\n# TYPE {row.name} {row.kind}\n"
    for labels, value in sorted(values.items()):
        shown = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels)
        yield f"{row.name}{{{shown}}} {value!r}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
