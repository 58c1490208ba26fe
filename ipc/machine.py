"""What this process may use of the machine: cores, memory, GPUs, and short names of GPU types.

Nothing here imports a model library.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Of version 2; a container sees its own group here."""
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")


def available_cores() -> int:
    """Cores that the scheduler gives this process: its affinity, or fewer by the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _text(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_memory_nbytes() -> int:
    """Memory that new processes can take before the host, or the limit of the control group, has none; 0 if unknown.

    Cached files count as free: the kernel drops cached files when a process needs memory.
    """
    free = _meminfo("MemAvailable:")
    limit, used = _text(CGROUP / "memory.max"), _text(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        facts = dict(line.split(maxsplit=1) for line in _text(CGROUP / "memory.stat").splitlines())
        cached = sum(int(facts.get(name, 0)) for name in ("active_file", "inactive_file"))
        free = min(free, max(0, int(limit) - int(used) + cached))
    return free


def memory_nbytes() -> int:
    """Memory of the host, or the lower limit of the control group; the same at every call. 0 if unknown."""
    total = _meminfo("MemTotal:")
    limit = _text(CGROUP / "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def count_gpus() -> int:
    """NVIDIA devices visible to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def hub_cache() -> Path:
    """Where the client of the model hub keeps what it has fetched (its environment variables, or the default)."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def processor_name() -> str:
    """The model of the processor; empty where the kernel does not say."""
    for line in _text(CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def _meminfo(name: str) -> int:
    """One figure of the host's memory in bytes; 0 where there is none."""
    for line in _text(MEMINFO).splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


UNKNOWN = "unknown"
CPU = "cpu"
_NAMED = ("rtx-3090", "rtx-4090", "a10g", "l4", "t4", "h100", "h200", "b200")
_LARGE_A100_BYTES = 60 << 30
_GAP = re.compile(r"[^a-z0-9]+")


def gpu_type(name: str, memory_bytes: int = 0) -> str:
    """The name that SIE clients use: `l4` for `NVIDIA L4`, `a100-80gb` by memory or name, else `unknown`."""
    words = f"-{_GAP.sub('-', name.lower()).strip('-')}-"
    if words == f"-{CPU}-":
        return CPU
    if "-a100-" in words:
        large = memory_bytes >= _LARGE_A100_BYTES or "-80gb-" in words
        return "a100-80gb" if large else "a100-40gb"
    return next((known for known in _NAMED if f"-{known}-" in words), UNKNOWN)
