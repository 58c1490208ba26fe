"""What `/proc` and `/sys` say about the processor."""

from __future__ import annotations

from pathlib import Path

_NAMED = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def _field(name: str) -> str:
    """First value of a field of `/proc/cpuinfo`, or nothing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def model_name() -> str:
    """Model name of the first core."""
    return _field("model name") or "unknown"


def features() -> list[str]:
    """Vector and matrix extensions that decide how fast a model runs."""
    flags = set(_field("flags").split())
    return [name for name in _NAMED if name in flags]
