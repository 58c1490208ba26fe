"""`penstock tune` with real servers: two trials of a model that computes nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ipc import machine
from ipc.settings import load
from penstock.cli import main
from tests.harness.server import FAKE_CATALOG

SMALL = ["server.frontends=1", "arena.bytes=8MiB", "arena.input_bytes=8MiB"]


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
