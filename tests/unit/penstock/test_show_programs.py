"""What `penstock models show` says of a program, or of a model, that a running server has loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ipc.catalog.model_config import ModelConfig
from ipc.processes.paths import RunPaths
from ipc.wire.messages import ModelStatus
from penstock import files, processes
from penstock.processes import NotReadable, View, Worker
from tests.fakes.tensors import entry

WHY = "requests run one at a time"


def view(*statuses: ModelStatus) -> View:
    """A server with one worker."""
    worker = Worker(slot=0, state="serving", models=list(statuses))
    return View(run_dir="", arbiter=None, supervisor=None, frontends=[], workers=[worker])


def status(name: str, state: str = "loaded") -> ModelStatus:
    """A version of a program; only what is loaded has a configuration."""
    config = ModelConfig(name.partition("@")[0], max_batch_size=4, parameters={"joining": WHY})
    return ModelStatus(name, state, config=config if state == "loaded" else None)


def test_loaded_versions_are_shown_with_what_their_load_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = view(status("m@10"), status("m@2"), status("m@3", "failed"), status("mm@1"))
    monkeypatch.setattr(processes, "look", lambda *_: found)
    loaded = processes.programs(RunPaths(tmp_path, "i"), 1, "m", 0.1)
    assert [each.name for each in loaded] == ["m@2", "m@10"]
    assert files.print_programs(loaded, as_json=True) == 0
    [first, _] = json.loads(capsys.readouterr().out)
    assert first["configuration"]["parameters"] == {"joining": WHY} and first["id"] == "m@2"
    assert files.print_programs(loaded, as_json=False) == 0 and WHY in capsys.readouterr().out


def test_a_run_directory_of_another_user_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> View:
        raise NotReadable("belongs to another user")

    monkeypatch.setattr(processes, "look", refuse)
    assert processes.programs(RunPaths(tmp_path, "i"), 1, "m", 0.1) == []


def test_a_loaded_model_is_shown_with_how_tools_are_told_and_what_bounds_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ModelStatus(
        "m", "loaded", max_sequence_length=64, tools="system text", limited_by="generation.cache_bytes"
    )
    monkeypatch.setattr(processes, "look", lambda *_: view(ModelStatus("m", "failed"), told))
    found = processes.loaded(RunPaths(tmp_path, "i"), 1, "m", 0.1)
    assert found == told and processes.loaded(RunPaths(tmp_path, "i"), 1, "n", 0.1) is None
    for loaded in (found, None):
        assert files.print_one(entry("m"), loaded, as_json=True) == 0
        shown = json.loads(capsys.readouterr().out)
        fields = {
            "max_sequence_length": 64,
            "tools": "system text",
            "limited_by": "generation.cache_bytes",
        }
        assert shown.get("loaded") == (fields if loaded else None)
