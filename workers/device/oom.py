"""Out of memory: which errors say so, which say that the device is gone, and what gives memory back."""

from __future__ import annotations

import gc
import traceback

import torch

from workers import foreign

MARKS = (
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "can't allocate memory",
    "not enough memory",
    "status_alloc_failed",  # of cuBLAS and cuDNN
)
LOST_MARKS = ("uncorrectable ecc", "fallen off the bus", "no cuda-capable device", "device is lost")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out on the device or the host."""
    text = foreign.text_of(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in text for mark in MARKS)


def context_is_broken() -> bool:
    """Whether the CUDA context is poisoned, so that nothing may run on it again. Never on CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def is_device_lost(error: BaseException) -> bool:
    """Whether the device itself is gone, so that a restart at once would not help."""
    text = foreign.text_of(error).lower()
    return any(mark in text for mark in LOST_MARKS)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of the frames that an error and its causes passed through; its text stays."""
    for link in foreign.chain(error):
        traceback.clear_frames(link.__traceback__)


def release_cached() -> None:
    """Give cached device memory back."""
    # PERF: what a failed pass left is young; a full collection takes 0.1 s, and a split batch needs many.
    gc.collect(1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
