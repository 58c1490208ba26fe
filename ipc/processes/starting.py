"""Our own processes: how a Python process is started, imports large libraries, and its title in `ps`.

Modules come from this installation and its libraries, never from the current directory (`-P`): a `workers.py` or a
`frontend/` that lies where somebody starts the server is not ours. docs/adr/0026 has the reasons.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
"""The directory with `frontend`, `ipc`, `workers` and `penstock`: the source tree, or a folder of the installation."""

_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Tells setproctitle to leave the environment that /proc/PID/environ shows; else a title is written over it."""


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """`given` (this process's environment when None) in which a child finds our modules, and none by its directory."""
    found = dict(os.environ if given is None else given)
    places = [part for part in found.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(TOP)]
    return found | {
        "PYTHONPATH": os.pathsep.join([str(TOP), *places]),
        "PYTHONSAFEPATH": "1",
        _KEEP_ENVIRONMENT: "1",
    }


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in this block; the cyclic garbage collector rests.

    PERF: modules are never garbage. The collector would look at them again and again while they are made, which is a
    fifth of the processor time of an import of torch and transformers.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def title(text: str) -> None:
    """Show `penstock: text` in `ps`, in place of the command line. Without the library that stays as it is."""
    os.environ.setdefault(_KEEP_ENVIRONMENT, "1")
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(f"penstock: {text}")
