"""Short lives of clean processes: forked from a process that has imported what such programs need, and nothing else.

An interpreter of its own for each would import torch every time.
"""

from __future__ import annotations

import multiprocessing
import sys

from tests.harness.server import PATIENCE_S

_CLEAN = multiprocessing.get_context("forkserver")
_CLEAN.set_forkserver_preload(
    ["frontend.records.statistics", "ipc.metrics.registry", "workers.scheduling.batch_counts"]
)


def live(program: str, *arguments: str) -> None:
    """Run Python source to its end, with `arguments` in `sys.argv`; fails if the program does."""
    process = _CLEAN.Process(target=_run, args=(program, arguments))
    process.start()
    process.join(PATIENCE_S)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0, "the program failed, or did not end in time"


def _run(program: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<life>", "exec"), {"__name__": "__main__"})
