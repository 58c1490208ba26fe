"""Out of memory: which errors say so, which say that the device is gone, and what gives memory back.

A context of CUDA is broken for good after some errors, such as a failed assertion in a kernel. torch may then end the
process by a signal at the next call, even a call that only gives memory back. So `end_if_broken` reads the text of the
error alone, and ends the process before any destructor runs. Code that catches errors of the device calls
`end_if_broken` first.
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from typing import NoReturn

import torch

from ipc import logs
from workers import foreign
from workers.device.stepping import EXIT_BUG

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST = 4

MARKS = (
    "out of memory",
    "cannot allocate memory",
    "failed to allocate",
    "can't allocate memory",
    "not enough memory",
    "status_alloc_failed",  # of cuBLAS and cuDNN
)
LOST_MARKS = ("uncorrectable ecc", "fallen off the bus", "no cuda-capable device", "device is lost")
BROKEN_MARKS = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "address space was not supported",
    "hardware stack error",
    "unspecified launch failure",
    "launch timed out",
    *LOST_MARKS,
)
"""Errors of CUDA after which every further call in the process fails."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out on the device or the host."""
    text = foreign.text_of(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in text for mark in MARKS)


def is_broken_by(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that the CUDA context is poisoned. Never on CPU; asks no device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    texts = (foreign.text_of(link).lower() for link in foreign.chain(error))
    return any(mark in text for text in texts for mark in BROKEN_MARKS)


def end_if_broken(error: BaseException) -> None:
    """End the process by `end_process` where `is_broken_by`."""
    if is_broken_by(error):
        end_process(error)


def end_process(error: BaseException) -> NoReturn:
    """End this process at once, as its device context is lost: no destructor runs, and other workers take its jobs.

    The exit status tells the supervisor whether a restart may help.
    """
    code = EXIT_DEVICE_LOST if any(map(is_device_lost, foreign.chain(error))) else EXIT_BUG
    log.critical("the device context is lost (%s); this process ends", type(error).__name__, exc_info=error)
    logs.flush()
    os._exit(code)


def obstacle_of(raised: Exception) -> str:
    """One line on why code that was tried on the device is not used, such as a kernel or a captured step.

    Ends the process where the device is lost. Raises `raised` where memory is short, which says nothing of the code.
    """
    # NOTE: whoever tries Triton catches every class of errors. Triton has classes of its own for programs that do not
    # compile or ask for too much shared memory, and its C compiler fails by `CalledProcessError`.
    end_if_broken(raised)
    if is_out_of_memory(raised):
        raise raised
    return foreign.line_of(raised)


def context_is_broken(error: BaseException) -> bool:
    """Whether the CUDA context is poisoned, so that nothing may run on it again. Never on CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    if is_broken_by(error):
        return True
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
