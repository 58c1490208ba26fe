"""A result from a CUDA device into the arena: registered as pinned memory against a plain mapping and torch's own.

Needs a CUDA device; says so and ends otherwise. Each round copies every size both ways in turn; figures are medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.options import parser
from benchmarks.report import Report
from ipc.memory.arena import BLOCKS_OFFSET, STAMP_NBYTES, Arena

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)


def gigabytes_per_s(copy: Callable[[], object], nbytes: int, rounds: int) -> float:
    """Median rate of `copy`, the device synchronised before and after."""
    rates = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        rates.append(nbytes / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def register(arena: Arena, pinned: bool) -> None:
    """Pin or unpin the arena's pages for the device."""
    address = torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if pinned:
        runtime.cudaHostRegister(address, arena.nbytes, 0)
    else:
        runtime.cudaHostUnregister(address)


def main() -> None:
    """Measure and save the report."""
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    rounds = 50 if options.full else 10
    report = Report("pinned", "Device to arena, pinned against plain", {"rounds": rounds})
    rows, samples = [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        arena = Arena(Path(directory) / "arena", (128 << 20) + BLOCKS_OFFSET, "0" * 16)
        for nbytes in SIZES:
            start = BLOCKS_OFFSET + STAMP_NBYTES
            target = torch.frombuffer(arena.view[start : start + nbytes], dtype=torch.uint8)
            source = torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
            staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            to_arena = partial(target.copy_, source, non_blocking=True)
            plain = gigabytes_per_s(to_arena, nbytes, rounds)
            register(arena, True)
            pinned = gigabytes_per_s(to_arena, nbytes, rounds)
            register(arena, False)
            ceiling = gigabytes_per_s(partial(staging.copy_, source, non_blocking=True), nbytes, rounds)
            rows.append((f"{nbytes >> 10} KiB", plain, pinned, ceiling, pinned / plain))
            samples.append({"nbytes": nbytes, "plain": plain, "pinned": pinned, "torch_pinned": ceiling})
        arena.close()
    headers = ("size", "plain GB/s", "pinned GB/s", "torch pinned GB/s", "pinned / plain")
    report.table("Copies from the device", headers, rows)
    report.save(samples)


if __name__ == "__main__":
    main()
