"""Processes of tests that end with the process that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ends_with_parent() -> Callable[[], None]:
    """A function for `preexec_fn`: the kernel kills the new process at the death of the thread that calls `Popen`.

    So a run of tests that is killed leaves no broker and no fake behind. Call `Popen` in the main thread.
    """
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return follow
