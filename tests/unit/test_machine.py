"""Cores and memory that a process may use, also inside a control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipc import machine


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
    (group / "memory.max").write_text("3000\n")
    assert machine.free_memory_nbytes() == 2000
    (group / "meminfo").unlink()
    assert machine.free_memory_nbytes() == 0
