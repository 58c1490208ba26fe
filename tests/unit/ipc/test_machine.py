"""Cores and memory that a process may use, also inside a control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipc import machine, settings


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group without limits, and eight cores."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    return tmp_path


def test_cores_follow_affinity_and_the_quota(group: Path) -> None:
    assert machine.available_cores() == 8
    for quota, cores in (("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("900000 100000", 8)):
        (group / "cpu.max").write_text(quota + "\n")
        assert machine.available_cores() == cores


def test_free_memory_is_that_of_the_host_or_the_rest_of_the_limit(group: Path) -> None:
    assert machine.free_memory_nbytes() == 4000 << 10
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert machine.free_memory_nbytes() == 4000 << 10
    assert machine.memory_nbytes() == 9000 << 10
    (group / "memory.max").write_text("3000\n")
    assert machine.memory_nbytes() == 3000
    assert machine.free_memory_nbytes() == 2000
    (group / "memory.stat").write_text("anon 100\nfile 900\nshmem 200\ninactive_file 300\nactive_file 400\n")
    assert machine.free_memory_nbytes() == 2700, "the kernel drops cached files, and no shared memory"
    (group / "meminfo").unlink()
    assert machine.free_memory_nbytes() == machine.memory_nbytes() == 0


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [
        (1, 2, 1),
        (2, 64, 1),
        (7, 64, 1),
        (8, 64, 2),
        (16, 64, 4),
        (16, 15, 3),
        (16, 2, 1),
        (64, 512, 16),
        (8, 0, 1),
    ],
)
def test_a_worker_on_cpu_has_four_cores_and_four_gib(cores: int, gib: int, workers: int) -> None:
    assert settings.cpu_workers(cores, gib << 30) == workers


def test_only_a_host_without_gpus_divides_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "available_cores", lambda: 16)
    monkeypatch.setattr(settings, "memory_nbytes", lambda: 64 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert settings.load(None, {}, {}).worker_count == 2
    assert settings.load(None, {"worker.device": "cpu"}, {}).worker_count == 4
    assert settings.load(None, {"worker.device": "cpu", "worker.count": "1"}, {}).worker_count == 1
