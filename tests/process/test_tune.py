"""`penstock tune` with real servers: two trials of a model that computes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from ipc import machine
from ipc.processes import starting
from ipc.settings import load
from penstock import own_server
from penstock.cli import main
from penstock.own_server import descendants
from penstock.tuning import trial
from tests.harness.server import FAKE_CATALOG, alive, wait_until

SMALL = ["server.frontends=1", "arena.bytes=8MiB", "arena.input_bytes=8MiB"]


@pytest.mark.long
def test_two_topologies_are_measured_and_the_settings_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    path = tmp_path / "server.yaml"
    path.write_text("worker:\n  device: cpu  # no GPU here\n")
    command = ["tune", "fake/echo", "--quick", "--seconds", "0.3", "--catalog", str(FAKE_CATALOG)]
    command += ["--config", str(path), "--write", str(path)]
    command += [word for setting in SMALL for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="t") as trials:
        monkeypatch.setattr(tempfile, "tempdir", trials)
        assert main(command) == 0
        assert not list(Path(trials).iterdir()), "a trial left its run directory"
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert sorted(row[:4] for row in rows) == [["1", "2", "2048", "float32"], ["2", "1", "2048", "float32"]]
    assert all(float(cell) > 0 for row in rows for cell in row[4:])
    written = load(path, None, {})
    assert written.worker.count * written.worker.torch_threads == 2
    assert "  device: cpu  # no GPU here" in path.read_text()


@pytest.mark.long
def test_a_killed_tune_leaves_no_server_and_the_next_one_deletes_its_files(tmp_path: Path) -> None:
    command = ["tune", "fake/echo", "--quick", "--seconds", "60", "--catalog", str(FAKE_CATALOG)]
    command += [word for setting in (*SMALL, "worker.device=cpu") for word in ("--set", setting)]
    command += ["--set", f"run.shm_dir={tmp_path}"]
    with tempfile.TemporaryDirectory(prefix="t") as trials:
        tune = subprocess.Popen(
            starting.command("penstock", *command),
            env=starting.environment() | {"TMPDIR": trials},
            stderr=subprocess.DEVNULL,
        )
        below: list[int] = []
        try:
            # The arbiter, the supervisor, a frontend and a worker, which has made its arena.
            wait_until(lambda: list(tmp_path.glob("penstock.penstock-tune-*")), what="arenas of a trial")
            wait_until(lambda: len(descendants(tune.pid)) >= 4, what="processes of a trial")
            below = descendants(tune.pid)
            tune.kill()
            tune.wait()
            wait_until(lambda: not any(map(alive, below)), what="the end of the trial's server")
            # NOTE: torch makes a directory of its own beside those of trials.
            [killed] = Path(trials).glob(f"{trial.PREFIX}*")
            left = tmp_path / f"penstock.{killed.name}.0.00"
            left.touch()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tempfile, "tempdir", trials)
                with own_server.place(trial.PREFIX, tmp_path) as paths:
                    assert list(Path(trials).glob(f"{trial.PREFIX}*")) == [paths.root.parent]
                assert not list(Path(trials).glob(f"{trial.PREFIX}*"))
            assert not list(tmp_path.iterdir()), "arenas of the killed trial"
        finally:
            for pid in (tune.pid, *below):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_trial_that_runs_keeps_its_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(trials))
    with own_server.place(trial.PREFIX, trials) as first:
        with own_server.place(trial.PREFIX, trials) as second:
            assert first.root.parent.parent == trials
            assert first.instance != second.instance
        assert first.root.parent.exists()
    assert not list(trials.iterdir())
