"""`penstock run`: a model in a file is served for one question, and nothing is left of the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.cli import main
from tests.conformance.minilm import DIRECTORY
from tests.harness.server import ROOT
from tests.tiny import gguf_models


def test_a_model_in_a_file_is_served_asked_and_stopped(tmp_path: Path) -> None:
    gguf_models.write(tmp_path / "tiny.gguf", "qwen3")
    shared = tmp_path / "shm"
    shared.mkdir()
    line = ["run", str(tmp_path / "tiny.gguf"), "hi", "--max-tokens", "3", "--device", "cpu"]
    settings = tmp_path / "settings.yaml"
    places = f"{{dir: {tmp_path / 'run'}, shm_dir: {shared}}}"
    settings.write_text(f"run: {places}\nworker: {{count: 1}}\nserver: {{frontends: 1}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *line, "--config", str(settings)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(shared.iterdir())
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if str(tmp_path) in " ".join(words)]


def test_a_model_without_text_and_one_that_is_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(DIRECTORY), "--port", "9"]) == 3
    assert "generates no text, it gives dense: use `penstock serve" in capsys.readouterr().err
    assert main(["run", "nothing", "--port", "9"]) == 1
    assert "is no model of the catalog" in capsys.readouterr().err
