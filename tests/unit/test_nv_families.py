"""The `nv_` families: what they are made of, and how a label is written."""

from __future__ import annotations

from types import SimpleNamespace

from ipc import nv_families


def family(name: str, **labels: str) -> SimpleNamespace:
    """A collected family of one sample, whose value is 3."""
    return SimpleNamespace(samples=[SimpleNamespace(name=name, labels=labels, value=3.0)])


def lines(*families: SimpleNamespace) -> list[str]:
    """All samples of the exposition."""
    text = nv_families.text(families).decode()
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
