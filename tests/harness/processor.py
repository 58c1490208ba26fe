"""Tests that need what not every processor has."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

_VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}

needs_integers = pytest.mark.skipif(
    platform.machine() == "x86_64" and _VNNI.isdisjoint(Path("/proc/cpuinfo").read_text().split()),
    reason="products of int8 saturate on this processor, which has no VNNI: their proof refuses them",
)
"""For tests whose layers compute with int8: on an x86-64 processor without VNNI the product makes numbers instead."""
