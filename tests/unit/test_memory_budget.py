"""Memory for the weights of models: what was set, else a part of what there is."""

from __future__ import annotations

import pytest
import torch

from ipc.settings import Settings, Worker
from workers.device import Device
from workers.lifecycle import memory


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (Worker(count=1), 850),
        (Worker(count=1, memory_pressure_percent=60), 600),
        (Worker(count=2, memory_pressure_percent=60), 300),
        (Worker(count=1, memory_budget_bytes=7, memory_pressure_percent=60), 7),
    ],
)
def test_the_budget_is_the_one_set_or_the_share_of_the_memory_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, expected: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    device = Device(torch.device("cpu"), "cpu", "", 1)
    assert memory.budget_of(Settings(worker=worker), device).nbytes == expected
