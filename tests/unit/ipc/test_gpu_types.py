"""Device names of drivers and the short names that clients know."""

from __future__ import annotations

import pytest

from ipc.machine import gpu_type

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "memory_bytes", "expected"),
    [
        ("NVIDIA L4", 23 * GIB, "l4"),
        ("Tesla T4", 15 * GIB, "t4"),
        ("NVIDIA A10G", 23 * GIB, "a10g"),
        ("NVIDIA A100-SXM4-40GB", 40 * GIB, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80 * GIB, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 79 * GIB, "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", 0, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 80 * GIB, "h100"),
        ("NVIDIA H200", 140 * GIB, "h200"),
        ("NVIDIA B200", 180 * GIB, "b200"),
        ("NVIDIA GeForce RTX 3090", 24 * GIB, "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", 24 * GIB, "rtx-4090"),
        ("NVIDIA L40S", 45 * GIB, "unknown"),
        ("Quadro RTX 4000", 8 * GIB, "unknown"),
        ("", 0, "unknown"),
        ("cpu", 0, "cpu"),
    ],
)
def test_the_short_name_of_a_device(name: str, memory_bytes: int, expected: str) -> None:
    assert gpu_type(name, memory_bytes) == expected
