"""`penstock models list`: what is searched, what the sizes are, and that lines fit a terminal of 80 columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from penstock.cli import main
from tests.harness.server import ROOT
from tests.tiny import gguf_models

WEIGHTS = (ROOT / "tests" / "fakes" / "weights" / "model.safetensors").read_bytes()


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The models of a list by id."""
    assert main(["models", "list", *words, "--json"]) == 0
    return {row["id"]: row for row in json.loads(capsys.readouterr().out)}


def test_words_are_searched_in_ids_families_outputs_and_descriptions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rows(capsys, "RERANK", "multilingual")
    assert "jinaai/jina-reranker-v2-base-multilingual" in found and "BAAI/bge-m3" not in found
    assert all("score" in row["outputs"] for row in found.values())
    assert rows(capsys, "no such words") == {}


def test_memory_follows_from_the_parameters_and_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    [whole] = rows(capsys, "bge-reranker-v2-m3", "--device", "cpu").values()
    [half] = rows(capsys, "bge-reranker-v2-m3", "--set", "worker.precision=bfloat16").values()
    assert whole["memory_bytes"] == 2 * half["memory_bytes"] == 568_000_000 * 4
    assert (whole["precision"], half["precision"]) == ("float32", "bfloat16")


def test_lines_fit_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 200 and max(map(len, lines)) <= 80
    assert any("..." in line.split()[0] for line in lines)


def cached(root: Path, name: str, *files: str) -> None:
    """A repository of the hub cache."""
    repository = root / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in files:
        blob = repository / "blobs" / file
        blob.write_bytes(WEIGHTS if file.endswith(".safetensors") else b"{}")
        (snapshot / file).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


def test_the_verb_list_shows_the_models_that_are_on_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "Somebody/strange-chat", "config.json", "model.safetensors")
    cached(tmp_path, "somebody/asked-only", "config.json")
    gguf_models.write(tmp_path / "words.gguf")
    cached(tmp_path, "somebody/many-files", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    (tmp_path / "words.gguf").replace(
        tmp_path / "models--somebody--many-files" / "blobs" / "tiny-Q4_K_M.gguf"
    )
    assert main(["list", "--json"]) == 0
    told = capsys.readouterr()
    found = {row["id"]: row for row in json.loads(told.out)}
    assert found.keys() == {
        "sentence-transformers/all-MiniLM-L6-v2",
        "Somebody/strange-chat",
        "somebody/many-files:Q4_K_M",
    }
    assert found["Somebody/strange-chat"]["disk_bytes"] == len(WEIGHTS) + 2
    assert told.err.startswith("penstock: 3 models are on this machine; `penstock models list` shows the 2")
    assert main(["list", "STRANGE"]) == 0
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.split() == ["Somebody/strange-chat", "-", "-", "-", "no", "0", "MB", "-", "-"]
    assert main(["list", "--output", "dense", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [
        "sentence-transformers/all-MiniLM-L6-v2"
    ]


def test_show_says_which_package_a_model_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        "id: my/m\nsource: {kind: package, package: no_such_package}\nadapter: dense\n"
    )
    assert main(["models", "show", "my/m", "--catalog", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["on_disk"] == "no; the package no_such_package is not installed"
