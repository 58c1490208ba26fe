"""The `nv_` families: what they are made of, and how a label is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ipc.metrics import nv_names


def family(name: str, **labels: str) -> SimpleNamespace:
    """A collected family of one sample, whose value is 3."""
    return SimpleNamespace(samples=[SimpleNamespace(name=name, labels=labels, value=3.0)])


def lines(*families: SimpleNamespace, tags: nv_names.Tags = nv_names.NO_TAGS) -> list[str]:
    """All samples of the exposition."""
    text = nv_names.text(families, tags).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_devices_are_shown_once_however_many_workers_share_them() -> None:
    shared = [family("penstock_gpu_power_watts", worker=f"worker-{n}", uuid="abc") for n in range(2)]
    other = family("penstock_gpu_power_watts", worker="worker-2", uuid="GPU-def")
    assert lines(*shared, other) == [
        'nv_gpu_power_usage{gpu_uuid="GPU-abc"} 3.0',
        'nv_gpu_power_usage{gpu_uuid="GPU-def"} 3.0',
    ]


def test_a_processor_is_no_device() -> None:
    assert lines(family("penstock_gpu_memory_bytes", worker="worker-0", uuid="cpu")) == []


def test_what_waits_in_all_lanes_of_all_workers_is_pending() -> None:
    waiting = [family("penstock_queue_depth", model="add@7", lane=lane) for lane in ("bulk", "interactive")]
    assert lines(*waiting) == ['nv_inference_pending_request_count{model="add",version="7"} 6.0']


def test_labels_are_escaped() -> None:
    name = 'a"b\\c\nd'
    (line,) = lines(family("penstock_infer_rows_total", model=name, version="1"))
    assert line == r'nv_inference_count{model="a\"b\\c\nd",version="1"} 3.0'


def test_figures_of_models_are_by_the_gpu_that_ran_them() -> None:
    counted = [
        family("penstock_infer_requests_total", model="add", version="7", batch_size=size, uuid=uuid)
        for uuid in ("abc", "def")
        for size in ("1", "2")
    ]
    waiting = family("penstock_queue_depth", model="add@7", lane="bulk")
    ran = family("penstock_infer_runs_total", model="add@7", batch_size="1", uuid="abc")
    assert lines(*counted, ran, waiting) == [
        'nv_inference_request_success{model="add",version="7",gpu_uuid="GPU-abc"} 6.0',
        'nv_inference_request_success{model="add",version="7",gpu_uuid="GPU-def"} 6.0',
        'nv_inference_exec_count{model="add",version="7",gpu_uuid="GPU-abc"} 3.0',
        'nv_inference_pending_request_count{model="add",version="7"} 3.0',
    ]


@pytest.mark.parametrize("uuid", ["", "cpu"])
def test_what_no_gpu_ran_names_none(uuid: str) -> None:
    ran = family("penstock_infer_runs_total", model="add@7", batch_size="1", uuid=uuid)
    assert lines(ran) == ['nv_inference_exec_count{model="add",version="7"} 3.0']


def test_the_zeros_that_families_begin_with_are_left_out_beside_figures_of_gpus() -> None:
    name = "penstock_infer_rows_total"
    begun = [family(name, model=model, version="1", uuid="") for model in ("add", "sub")]
    for one in begun:
        one.samples[0].value = 0.0
    assert lines(*begun, family(name, model="add", version="1", uuid="abc")) == [
        'nv_inference_count{model="add",version="1",gpu_uuid="GPU-abc"} 3.0',
        'nv_inference_count{model="sub",version="1"} 0.0',
    ]


def test_the_tags_of_a_model_are_labels_with_an_underscore_in_front() -> None:
    families = [
        family("penstock_infer_rows_total", model="add", version=version, uuid="") for version in "12"
    ]
    failed = family(
        "penstock_infer_failures_total", model="add", version="-1", batch_size="0", reason="OTHER"
    )
    tags = {("add", 1): {"team": 'a"b', "cost-center": "9", "__of": "x"}}
    assert lines(failed, *families, tags=tags) == [
        'nv_inference_request_failure{model="add",version="-1",reason="OTHER"} 3.0',
        r'nv_inference_count{model="add",version="1",_of="x",_cost_center="9",_team="a\"b"} 3.0',
        'nv_inference_count{model="add",version="2"} 3.0',
    ]


def test_the_ratio_of_load_is_by_gpu_and_tags_too() -> None:
    labels = {"model": "add", "version": "1", "batch_size": "1", "uuid": "abc"}
    took = [
        family("penstock_infer_request_seconds_total", **labels),
        family("penstock_infer_compute_seconds_total", **labels),
    ]
    found = lines(*took, tags={("add", 1): {"team": "a"}})
    assert found[-1] == 'nv_inference_load_ratio{model="add",version="1",gpu_uuid="GPU-abc",_team="a"} 1.0'
