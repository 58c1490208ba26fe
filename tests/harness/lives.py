"""Lives of clean processes: forked from a process that has imported what they need, and nothing else.

An interpreter of its own for each would import torch every time. A worker that is started here is what becomes of a
spare: the libraries are there, and all else happens after the fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import TimeoutExpired

from tests.harness.server import PATIENCE_S, ROOT
from workers.main import main

_CLEAN = multiprocessing.get_context("forkserver")
_CLEAN.set_forkserver_preload(
    [
        "frontend.records.statistics",
        "ipc.metrics.registry",
        "workers.runtime",
        "workers.images",
        "tests.fakes.program",
    ]
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


class Worker:
    """A running worker of a slot, with the methods of `subprocess.Popen`."""

    def __init__(self, slot: int, environment: Mapping[str, str], log_path: Path) -> None:
        self._process = _CLEAN.Process(target=_work, args=(slot, dict(environment), log_path), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the worker runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; returns the exit code. Raises `TimeoutExpired`."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired("worker", timeout_s or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the worker has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def _work(slot: int, environment: dict[str, str], log_path: Path) -> None:
    with log_path.open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    os._exit(main(["--slot", str(slot)]))
