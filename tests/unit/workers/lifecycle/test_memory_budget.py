"""Memory for the weights of models: what was set, else a part of what there is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ipc.settings import Settings, Worker
from tests.fakes.clock import Clock
from workers.device.devices import Device
from workers.lifecycle import memory_budget


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
    monkeypatch.setattr(memory_budget, "available_bytes", lambda: 1000)
    device = Device(torch.device("cpu"), "cpu", "", 1)
    assert memory_budget.budget_of(Settings(worker=worker), device).nbytes == expected


def test_the_heap_is_given_back_when_the_process_has_grown_but_not_every_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, heap = Clock.of(memory_budget, monkeypatch), memory_budget.Heap()
    grown, trims = [1000 << 20], []

    def trim() -> None:
        trims.append(clock.now)
        grown[0] -= 100 << 20

    monkeypatch.setattr(memory_budget, "private_bytes", lambda: grown[0])
    monkeypatch.setattr(memory_budget, "_trim", trim)
    assert not heap.look()
    grown[0] += memory_budget.TRIM_AFTER_BYTES - 1
    assert not heap.look()
    grown[0] += 1
    assert heap.look() and len(trims) == 1
    grown[0] += memory_budget.TRIM_AFTER_BYTES
    assert not heap.look(), "what batches take anew at once is not given back at once"
    clock.now += memory_budget.TRIM_EVERY_S
    assert heap.look() and len(trims) == 2
    grown[0] -= 500 << 20
    clock.now += memory_budget.TRIM_EVERY_S
    assert not heap.look()
    grown[0] += memory_budget.TRIM_AFTER_BYTES
    assert heap.look(), "growth counts from the least memory since"


def test_private_memory_is_counted_without_what_is_shared() -> None:
    before = memory_budget.private_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert 48 << 20 < memory_budget.private_bytes() - before < 128 << 20
    del block


_FAULTS = """
import ctypes, resource
from workers.lifecycle import memory_budget
keeps = memory_budget.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
def batch():
    block = libc.malloc(48 << 20)
    libc.memset(block, 1, 48 << 20)
    libc.free(block)
batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, keeps)
"""


def test_memory_that_a_batch_has_freed_serves_the_next_one_without_new_pages() -> None:
    found = subprocess.run([sys.executable, "-c", _FAULTS], check=True, capture_output=True, text=True)
    faults, keeps = found.stdout.split()
    if keeps == "False":
        pytest.skip("this C library cannot be told")
    assert int(faults) < 4 * (48 << 20) // 4096 // 10
