"""Writes down which of our modules a process enters, and when; Python runs this file at the start of every process.

Each line has a time in CLOCK_MONOTONIC nanoseconds and a dotted module name, whenever a thread goes from one of our
modules into another. `tools.walk` puts this directory on PYTHONPATH and reads the files, one per process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

_PLACE = os.environ.get("WALK_DIR", "")
_ROOT = os.environ.get("WALK_ROOT", "") + os.sep
_TOPS = ("frontend/", "ipc/", "workers/")
_here = threading.local()
_names: dict[str, str] = {}
_files: dict[int, int] = {}


def _name_of(path: str) -> str:
    """Dotted name of the module in a file, empty for a file that is not ours."""
    inside = path.removeprefix(_ROOT)
    ours = inside != path and inside.startswith(_TOPS)
    return inside.removesuffix(".py").removesuffix("/__init__").replace(os.sep, ".") if ours else ""


def _entered(frame: FrameType, event: str, argument: object) -> None:
    if event != "call":
        return
    path = frame.f_code.co_filename
    name = _names.get(path)
    if name is None:
        name = _names[path] = _name_of(path)
    if not name or getattr(_here, "name", None) == name:
        return
    _here.name = name
    pid = os.getpid()
    file = _files.get(pid)
    if file is None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = _files[pid] = os.open(f"{_PLACE}/{pid}", flags, 0o600)
    os.write(file, f"{time.monotonic_ns()} {name}\n".encode())


if _PLACE:
    threading.setprofile(_entered)
    sys.setprofile(_entered)
