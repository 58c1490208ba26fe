"""Our figures under the names that other inference servers gave them: `nv_inference_*`, `nv_gpu_*`.

The figures are sums of our own families, made for each answer of `/metrics`, so that counting costs nothing. Counters
of these names have no `_total`, which prometheus_client would add: therefore this module writes the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ipc.catalog.ids import split_id

Labels = tuple[tuple[str, str], ...]
Tags = Mapping[tuple[str, int], Mapping[str, str]]
"""The `metric_tags` of models, by name and version."""
NO_TAGS: Tags = MappingProxyType({})
_Samples = dict[str, list[tuple[dict[str, str], float]]]
_NO_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_NO_GPU = ("", "cpu")


class NvFamily(NamedTuple):
    """One family: samples of ours (`sources`), summed by `labels`, times `scale`.

    Families of models have further labels: `gpu_uuid` if a GPU ran the model, and the tags of the model, with an
    underscore in front of the tag's name.
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
    """Exposition of all these families, from the families that prometheus_client collects."""
    sources = {source for family in (*INFERENCE, *GPU) for source in family.sources}
    samples: _Samples = {source: [] for source in sources}
    for family in families:
        for sample in family.samples:
            if sample.name in sources:
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
                # Workers count by catalog id.
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
    """Drop zeros without a GPU, with which every family begins, once there are figures of a GPU."""
    with_gpu = {_without_gpu(key) for key in sums if _without_gpu(key) != key}
    return {key: value for key, value in sums.items() if value or key not in with_gpu}


def _without_gpu(key: Labels) -> Labels:
    return tuple(label for label in key if label[0] != "gpu_uuid")


def _of_devices(row: NvFamily, samples: _Samples) -> dict[Labels, float]:
    """Values by device: workers on the same device measure the same, so the highest value counts."""
    by_device: dict[Labels, float] = {}
    for labels, value in samples[row.sources[0]]:
        if key := _gpu_label(labels["uuid"]):
            by_device[key] = max(by_device.get(key, 0.0), value)
    return by_device


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
