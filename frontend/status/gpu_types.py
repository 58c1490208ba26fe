"""Short names of GPU types, as clients of the SIE contract know them."""

from __future__ import annotations

import re

UNKNOWN = "unknown"
CPU = "cpu"
_NAMED = ("rtx-3090", "rtx-4090", "a10g", "l4", "t4", "h100", "h200", "b200")
_LARGE_A100_BYTES = 60 << 30
_GAP = re.compile(r"[^a-z0-9]+")


def gpu_type(name: str, memory_bytes: int = 0) -> str:
    """`l4` of `NVIDIA L4`, `a100-80gb` of an A100 with that memory or such a name; `unknown` for any other device."""
    words = f"-{_GAP.sub('-', name.lower()).strip('-')}-"
    if words == f"-{CPU}-":
        return CPU
    if "-a100-" in words:
        large = memory_bytes >= _LARGE_A100_BYTES or "-80gb-" in words
        return "a100-80gb" if large else "a100-40gb"
    return next((known for known in _NAMED if f"-{known}-" in words), UNKNOWN)
