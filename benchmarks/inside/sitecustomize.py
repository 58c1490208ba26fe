"""Looks at the memory of worker processes from inside; `benchmarks.growth` puts this directory on their path.

Python imports a module of this name at its start. In a worker it writes a line of JSON every few seconds into the file
that GROWTH_FILE names: what glibc's heap holds and has free, and, with GROWTH_TRACE, what Python's objects take.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import tracemalloc
from pathlib import Path

EVERY_S = 5.0
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes in use, free in the heaps, and mapped one by one."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def _look(path: str, trace: bool) -> None:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    with Path(path).open("a", buffering=1) as file:
        while True:
            found = libc.mallinfo2()
            line = {
                "at": time.monotonic(),
                "used": found.uordblks,
                "free": found.fordblks,
                "mapped": found.hblkhd,
                "python": tracemalloc.get_traced_memory()[0] if trace else 0,
            }
            file.write(json.dumps(line) + "\n")
            time.sleep(EVERY_S)


def _begin() -> None:
    path, trace = os.environ.get("GROWTH_FILE", ""), bool(os.environ.get("GROWTH_TRACE"))
    if not path or "workers" not in sys.orig_argv or "--slot" not in sys.orig_argv:
        return
    if trace:
        tracemalloc.start(1)
    threading.Thread(target=_look, args=(path, trace), name="growth", daemon=True).start()


_begin()
