"""How the supervisor reads the end of a worker, whose last words it may not have read yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.notify import Notifier
from ipc.paths import prepare_run_dir
from ipc.settings import load
from workers.slots import WorkerSlot


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSlot:
    """A slot whose process ends at once, in order."""
    settings = load(None, {"run.dir": str(tmp_path), "worker.device": "cpu"}, {})
    prepare_run_dir(settings.paths)
    made = WorkerSlot(0, settings, settings.paths)

    def start() -> None:
        made._process = subprocess.Popen([sys.executable, "-c", ""])
        made.pidfd = os.pidfd_open(made._process.pid)
        read, made._life_write = os.pipe()
        os.close(read)

    monkeypatch.setattr(made, "_start", start)
    return made


@pytest.mark.parametrize("said", ["STOPPING=1", "READY=1\nSTOPPING=1", "READY=1", ""])
def test_a_worker_that_said_that_it_stops_ended_in_order(slot: WorkerSlot, said: str) -> None:
    assert slot.start_if_due()
    worker = Notifier(str(slot.listener.path))
    for line in said.split():
        name, value = line.split("=")
        assert worker.send(**{name.lower(): int(value)})
    assert slot.reap(others_healthy=True) == ("drained" if "STOPPING" in said else "exit-0")
    assert slot.proven == ("READY" in said)
    slot.close()
